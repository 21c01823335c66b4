"""F11: full, sliding-window and block self-attention over length."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import best_device_first, need, select, with_case

ID = "F11"
CAPTION = (
    "Time of self-attention over sequence length at a fixed number of tokens in the batch: full attention, a "
    "sliding window whose off-window tiles are skipped, and aligned 64-token blocks; the fastest implementation "
    "of each that was measured (in plain torch, on a CPU, a window skips nothing). Each device has its own axis. "
    "Row of the self-attention layer, where a GPU measured it: time of forward and backward and MFU of the whole layer "
    "(norm, projections, rotary, attention, residual) by kind and implementation, all layers of the model. "
    "Last row: the source's B200 with block attention (right bars) against a kernel that masks blocks, and with "
    "the rotary's backward fused against separate (left bars), and ours on the same shape where a GPU was "
    "measured. Whiskers: 20 and 80 % quantiles."
)
PHASES = {"fwd": "forward", "bwd": "backward"}
LAYERS = ("full", "window", "block")
COLUMNS = ["panel", "device", "case", "mode", "impl", "phase", "length", "value", "low", "high", "unit"]


def over_length(source) -> pd.DataFrame:
    rows = with_case(select(source.frame("windows"), metric="time_ms"), source, "q_max", "window", "batch")
    window = [str(value) not in ("", "nan") for value in rows.window] if len(rows) else []
    mode = [
        "block" if s == "block_attention" else "window" if w else "full"
        for s, w in zip(rows.subject, window, strict=True)
    ]
    rows = rows.assign(mode=mode, length=rows.q_max if len(rows) else [], panel="length")
    rows = rows.sort_values("p50").groupby(["device", "case", "phase"], as_index=False).head(1)
    return rows.assign(value=rows.p50, low=rows.p20, high=rows.p80)


def against_mask(source) -> pd.DataFrame:
    """The source's three comparisons and ours on the same cases, in ms."""
    rows = []
    for item in source.chart("block_attention").itertuples():
        phase = "rotary" if "rotary" in item.case else item.case.split()[0]
        for name, value in (("baseline", item.baseline_ms), ("block", item.tlx_ms)):
            rows.append({"device": "B200 (source)", "case": item.case, "mode": name, "phase": phase, "value": value})
    frame = select(source.frame("kernels"), metric="time_ms")
    for device in best_device_first(frame.device):
        own = frame[frame.device == device]
        for phase in ("fwd", "bwd"):
            part = own[(own.case == "block_2000") & (own.phase == phase)]
            rows += pairs(
                device,
                part,
                phase,
                part.impl == "v2:block_mask",
                (part.subject == "block_attention") & part.impl.isin(("triton", "tlx")),
            )
        part = own[(own.case == "block_rotary_h3") & (own.phase == "bwd")]
        rows += pairs(device, part, "rotary", part.impl == "triton:eager_rotary", part.impl.isin(("triton", "tlx")))
    return pd.DataFrame(rows).assign(panel="block", unit="ms")


def pairs(device, part, phase, baseline, block) -> list[dict]:
    if not (baseline.any() and block.any()):
        return []
    best = part[block].sort_values("p50").iloc[0]
    base = part[baseline].iloc[0]
    common = {"device": device, "case": base.case, "phase": phase}
    return [common | {"mode": "baseline", "impl": base.impl, "value": base.p50},
            common | {"mode": "block", "impl": best.impl, "value": best.p50}]  # fmt: skip


def whole_layer(source) -> pd.DataFrame:
    """Self-attention layers of the first GPU that timed them alone: ms of forward and backward, and MFU."""
    rows = select(source.frame("layers"), phase="step", metric=("time_ms", "mfu"))
    rows = rows[rows.subject.isin([f"self_attention_{name}" for name in LAYERS]) & (rows.device != "cpu")]
    rows = rows[rows.device == next(iter(best_device_first(rows.device)), "")]
    mode = rows.subject.str.removeprefix("self_attention_")
    rows = rows.assign(panel="layer", mode=mode, value=rows.p50, low=rows.p20, high=rows.p80)
    return rows.assign(place=mode.map(LAYERS.index)).sort_values(["place", "impl"], kind="stable")


def layer_bars(line, rows: pd.DataFrame, device: str) -> None:
    names = list(dict.fromkeys(zip(rows["mode"], rows.impl, strict=True)))
    for axis, metric, title in zip(line, ("time_ms", "mfu"), ("self-attention layer", "its MFU"), strict=True):
        for item in rows[rows.metric == metric].itertuples():
            mode = item.mode
            factor = 100 if metric == "mfu" else 1
            style.bar(axis, names.index((mode, item.impl)), item.value * factor, "attention", mode, horizontal=True)
        labels = [f"{mode}, {impl.replace('_', ' ')}" for mode, impl in names]
        axis.set_yticks(range(len(names)), labels if metric == "time_ms" else [])
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.set(xlabel="ms, forward and backward" if metric == "time_ms" else "MFU, %", title=f"{device}: {title}")


def draw(source):
    rows, block, layer = over_length(source), against_mask(source), whole_layer(source)
    devices = best_device_first(rows.device)
    figure, axes = style.panels(len(devices) + 1 + (len(layer) > 0), 2, height=2.2)
    if len(layer):
        layer_bars(axes[len(devices)], layer, source.device_label(layer.device.iloc[0]))
    for line, device in zip(axes, devices, strict=False):
        for axis, phase in zip(line, PHASES, strict=True):
            part = rows[(rows.device == device) & (rows.phase == phase)]
            for mode in (name for name in style.FAMILIES["attention"] if name in set(part["mode"])):
                style.line(
                    axis, part[part["mode"] == mode], "length", "value", "attention", mode, low="low", high="high"
                )
            if part.empty:
                style.blank(axis, source.device_label(device))
                continue
            style.powers(axis, part.length)
            if part.length.nunique() > 5:
                axis.tick_params(axis="x", rotation=45)
            axis.set(yscale="log", xlabel="sequence length, tokens", ylabel="time, ms")
            style.plain_log(axis.yaxis)
            axis.set_title(f"{source.device_label(device)}, {PHASES[phase]}")
    shown = ["B200 (source)", *best_device_first(set(block.device) - {"B200 (source)"})][:2]
    for axis, device in zip(axes[-1], shown, strict=False):
        comparison(axis, block[block.device == device])
        name = device if device.startswith("B200") else source.device_label(device)
        axis.set_title(f"{name}: mask | block")
    if len(shown) < 2:
        axes[-1, 1].remove()
    style.legend(figure, [axis for line in axes[:-1] for axis in line])
    table = pd.concat([rows, layer, block], ignore_index=True).reindex(columns=COLUMNS)
    return figure, need(table, "windows")


def comparison(axis, part):
    names = ["fwd", "bwd", "rotary"]
    for index, (mode, color, hatch) in enumerate((("baseline", style.GREY, "//"), ("block", style.BLUE, "xx"))):
        for row in part[part["mode"] == mode].itertuples():
            at = names.index(row.phase) + (index - 0.5) * 0.38
            axis.bar(at, row.value, 0.38, color=color, hatch=hatch, edgecolor="white", linewidth=0.3)
            other = part[(part["mode"] != mode) & (part.phase == row.phase)].value
            if mode == "block" and len(other):
                axis.annotate(f"{other.iloc[0] / row.value:.2f}x", (at, row.value), ha="center", va="bottom")
    axis.set_xticks(range(3), ["forward", "backward", "rotary,\nbackward"])
    axis.set(ylabel="time, ms")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
