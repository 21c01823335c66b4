"""F12: what 8-bit attention and linear layers gain over bf16."""

import sys

from figures import cli, style
from figures.load import best_device_first, need, select, with_case

ID = "F12"
CAPTION = (
    "Time of our bf16 kernel over that of the 8-bit one (format hopper: E4M3, power-of-two scales for slabs of 128, "
    "a row and head, or 128 keys and a channel; accurate accumulation). Left: attention and GDPA forward, with the "
    "quantisation of q, k and v inside the time and with operands that are quantised already; no 8-bit backward was "
    "built. Right: linear layers of 65,536 tokens, quantisation of every operand inside. Dotted: the source's 1.3 "
    "(forward, Blackwell). Measured; whiskers: 20 and 80 % quantiles of the 8-bit time."
)
BASES = {"jagged_attention": "v4", "gdpa": "tlx", "mx_linear": "bf16"}
LAYERS = {"fwd": "forward", "bwd": "backward"}


def draw(source):
    rows = select(source.frame("kernels"), metric="time_ms", subject=tuple(BASES))
    low = need(rows[rows.impl.str.startswith("hopper_fp8")], "8-bit kernels")
    base = rows[[row.impl == BASES[row.subject] for row in rows.itertuples()]]
    base = base.set_index(["device", "case", "phase"]).p50
    low = low[[key in base.index for key in zip(low.device, low.case, low.phase, strict=True)]]
    low = with_case(need(low, "8-bit kernels beside bf16 ones"), source, "q_law", "q_max", "num_heads", "head_dim")
    over = [base[key] for key in zip(low.device, low.case, low.phase, strict=True)]
    table = low.assign(value=over / low.p50, low=over / low.p80, high=over / low.p20)
    table["label"] = [label(row) for row in table.itertuples()]
    devices = best_device_first(table.device)
    figure, axes = style.panels(len(devices), 2, height=3.2, width_ratios=(3, 2))
    for line, device in zip(axes, devices, strict=True):
        part = table[table.device == device]
        for axis, mine, title in (
            (line[0], part[part.subject != "mx_linear"], "attention forward"),
            (line[1], part[part.subject == "mx_linear"], "linear layers"),
        ):
            if mine.empty:
                style.blank(axis, title)
                continue
            bars(axis, mine)
            axis.set_title(f"{source.device_label(device)}: {title}")
        line[0].set_ylabel("time in bf16 / time in 8 bits")
    style.legend(figure, axes.flat, columns=2)
    columns = ["device", "case", "subject", "impl", "phase", "p50", "unit", "label", "value", "low", "high"]
    return figure, table[columns].reset_index(drop=True)


def label(row) -> str:
    """Two or three short lines under a group of bars."""
    if row.subject == "mx_linear":
        return f"{int(row.num_heads * row.head_dim):,}\n{LAYERS[row.phase]}"
    return f"{'GDPA' if row.subject == 'gdpa' else 'softmax'}\n{row.q_law}\n{int(row.q_max):,}"


def bars(axis, part) -> None:
    labels = list(dict.fromkeys(part.label))
    impls = [name for name in style.FAMILIES["low_precision"] if name in set(part.impl)]
    width = 0.8 / len(impls)
    for index, impl in enumerate(impls):
        for row in part[part.impl == impl].itertuples():
            at = labels.index(row.label) + (index - (len(impls) - 1) / 2) * width
            style.bar(axis, at, row.value, "low_precision", impl, width=width, low=row.low, high=row.high)
    axis.axhline(1, color=style.INK, linewidth=0.8)
    axis.axhline(1.3, color=style.GREY, linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(labels)), [label.replace("\n", " ") for label in labels], rotation=60, ha="right")


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
