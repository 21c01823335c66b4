"""F13: what quantisation costs: alone after a norm, fused into it, and as a share of 8-bit attention."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import best_device_first, need, select, with_case

ID = "F13"
CAPTION = (
    "Left: time of RMSNorm followed by quantisation to 8 bits (slabs of 1 x 128), as two kernels and as one, by the "
    "width of the layer; the least time that moving the bytes of one pass takes is the bound. Right: share of "
    "8-bit attention's forward time that goes into quantising q, k and v. Measured; whiskers: 20 and 80 % quantiles."
)


def draw(source):
    rows = source.frame("kernels")
    norms = with_case(
        select(rows, subject="norm_quantize", metric=("time_ms", "bound_ms")), source, "num_heads", "head_dim"
    )
    parts = []
    if len(norms):
        bound = (norms.metric == "bound_ms") & (norms.impl == "fused")
        norms = norms[(norms.metric == "time_ms") | bound]
        width = (norms.num_heads * norms.head_dim).astype(int)
        name = norms.impl.where(norms.metric == "time_ms", "bound")
        parts.append(norms.assign(panel="norm", width=width, name=name, value=norms.p50, low=norms.p20, high=norms.p80))
    times = select(rows, subject=("jagged_attention", "gdpa"), metric="time_ms", phase="fwd")
    whole, alone = (times[times.impl == impl] for impl in ("hopper_fp8", "hopper_fp8:kernel"))
    alone = alone.set_index(["device", "case"]).p50
    whole = whole[[key in alone.index for key in zip(whole.device, whole.case, strict=True)]]
    if len(whole):
        whole = with_case(whole, source, "q_max", "q_law")
        kernel = [alone[key] for key in zip(whole.device, whole.case, strict=True)]
        share = 1 - kernel / whole.p50
        parts.append(whole.assign(panel="attention", width=whole.q_max, name=whole.subject, value=share))
    table = need(pd.concat(parts) if parts else norms, "quantisation")
    devices = best_device_first(table.device)
    figure, axes = style.panels(len(devices), 2, height=3.2)
    for line, device in zip(axes, devices, strict=True):
        mine = table[table.device == device]
        grouped(line[0], mine[mine.panel == "norm"], "width", "time, ms")
        line[0].set(xlabel="width of the layer", title=f"{source.device_label(device)}: norm and quantise")
        shares(line[1], mine[mine.panel == "attention"])
        line[1].set_title(f"{source.device_label(device)}: quantising q, k, v")
    style.legend(figure, axes.flat)
    columns = ["panel", "device", "case", "subject", "impl", "metric", "name", "width", "value", "low", "high"]
    return figure, table.reindex(columns=columns).reset_index(drop=True)


def grouped(axis, part, column: str, ylabel: str) -> None:
    if part.empty:
        return style.blank(axis, "norm and quantise")
    sizes = sorted(set(part[column]))
    names = [name for name in style.FAMILIES["quantise"] if name in set(part.name)]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        for row in part[part["name"] == name].itertuples():
            at = sizes.index(row.width) + (index - (len(names) - 1) / 2) * width
            style.bar(axis, at, row.value, "quantise", name, width=width, low=row.low, high=row.high)
    axis.set_xticks(range(len(sizes)), [f"{int(size):,}" for size in sizes])
    axis.set_ylabel(ylabel)
    return None


def shares(axis, part) -> None:
    if part.empty:
        style.blank(axis, "attention")
        return
    labels = [
        f"{'GDPA' if row.subject == 'gdpa' else 'softmax'}\n{row.q_law}\n{int(row.width):,}"
        for row in part.itertuples()
    ]
    for at, row in enumerate(part.itertuples()):
        style.bar(axis, at, 100 * row.value, "quantise", row.subject, width=0.6)
    axis.set_xticks(range(len(labels)), [label.replace("\n", " ") for label in labels], rotation=60, ha="right")
    axis.set_ylabel("% of forward time")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
