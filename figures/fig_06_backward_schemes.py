"""F06: backward schemes of jagged attention."""

import sys

from figures import cli, style
from figures.load import best_device_first, need, select, with_case

ID = "F06"
CAPTION = (
    "Time of the backward pass of jagged attention by scheme, over the time of the split scheme (dQ in a kernel of "
    "its own), by length and batch (uniform lengths, mean fill 0.5, 4 heads of 128). Above 1 is slower than split. "
    "Measured; the matrix products that each scheme really does stand in the data file (gemms)."
)


def draw(source):
    frame = source.frame("backward_schemes")
    rows = with_case(select(frame, phase="bwd", metric="time_ms"), source, "q_max", "batch")
    need(rows, "backward_schemes")
    rows = rows.assign(scheme=rows.impl.str.partition(":")[2])
    key = ["device", "case"]
    base = rows[rows.scheme == "split"][[*key, "p50"]].rename(columns={"p50": "split"})
    table = rows.merge(base, on=key)
    table = need(table, "backward_schemes with the split scheme as base")
    table = table.assign(value=table.p50 / table.split, low=table.p20 / table.split, high=table.p80 / table.split)
    gemms = select(frame, phase="bwd", metric="gemms")[[*key, "impl", "p50"]].rename(columns={"p50": "gemms"})
    table = table.merge(gemms, on=[*key, "impl"], how="left")
    # the longest case halves the largest batch to fit, and continues its line
    large = table.batch.max()
    table["panel"] = [large if batch >= large / 2 else batch for batch in table.batch]
    batches, devices = sorted(set(table.panel)), best_device_first(table.device)
    figure, axes = style.panels(len(devices), len(batches), height=2.4, sharey="row")
    for row, device in zip(axes, devices, strict=True):
        for axis, batch in zip(row, batches, strict=True):
            part = table[(table.device == device) & (table.panel == batch)]
            for scheme in (name for name in style.FAMILIES["scheme"] if name in set(part.scheme)):
                style.line(
                    axis, part[part.scheme == scheme], "q_max", "value", "scheme", scheme, low="low", high="high"
                )
            style.powers(axis, part.q_max)
            axis.set(xlabel="longest sequence, tokens", title=f"{source.device_label(device)}, batch {int(batch):,}")
        row[0].set_ylabel("time / time of split dQ")
    style.legend(figure, axes.flat, columns=5)
    columns = ["device", "case", "scheme", "batch", "q_max", "p50", "unit", "value", "low", "high", "gemms"]
    return figure, table[columns]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
