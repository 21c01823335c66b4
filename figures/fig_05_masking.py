"""F05: what masking costs."""

import sys

from figures import cli, style
from figures.load import best_device_first, need, select, with_case

ID = "F05"
CAPTION = (
    "Time of the forward pass of jagged attention with a two-dimensional -inf mask and without any mask, over the "
    "time with masking by subtraction. Left: lengths that are multiples of the tile, where no mask is needed at "
    "all. Right: lengths with a ragged last tile. Measured; whiskers: 20 and 80 % quantiles."
)


def draw(source):
    rows = with_case(select(source.frame("masking"), phase="fwd", metric="time_ms"), source, "q_max")
    need(rows, "masking")
    rows = rows.assign(mask=rows.impl.str.partition(":")[2], aligned=rows.case.str.contains("_aligned"))
    base = rows[rows["mask"] == "subtraction"].set_index(["device", "case"]).p50
    rows = rows[[key in base.index for key in zip(rows.device, rows.case, strict=True)]]
    over = [base[key] for key in zip(rows.device, rows.case, strict=True)]
    table = rows.assign(value=rows.p50 / over, low=rows.p20 / over, high=rows.p80 / over)
    devices = best_device_first(table.device)
    figure, axes = style.panels(len(devices), 2, height=2.3)
    for row, device in zip(axes, devices, strict=True):
        for axis, aligned in zip(row, (True, False), strict=True):
            part = table[(table.device == device) & (table.aligned == aligned)]
            sizes, masks = sorted(set(part.q_max)), [m for m in style.FAMILIES["mask"] if m in set(part["mask"])]
            for index, mask in enumerate(masks):
                for item in part[part["mask"] == mask].itertuples():
                    at = sizes.index(item.q_max) + (index - (len(masks) - 1) / 2) * 0.27
                    style.bar(axis, at, item.value, "mask", mask, width=0.27, low=item.low, high=item.high)
            axis.axhline(1, color=style.INK, linewidth=0.8)
            axis.set_xticks(range(len(sizes)), [f"{int(size):,}" for size in sizes])
            axis.set(xlabel="length, tokens", ylabel="time / time with subtraction")
            kind = "aligned" if aligned else "ragged last tile"
            axis.set_title(f"{source.device_label(device)}: {kind}")
    style.legend(figure, axes.flat)
    return figure, table[["device", "case", "impl", "mask", "aligned", "q_max", "p50", "unit", "value", "low", "high"]]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
