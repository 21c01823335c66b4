"""F09: how unevenly tile schedules load the programs of a persistent kernel."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import best_device_first, need, select

ID = "F09"
CAPTION = (
    "Work of the busiest program over the mean (left) and over the least busy (right, log scale) for three ways "
    "of dealing query tiles to programs: arithmetic on the lengths, so it belongs to the workload and the number "
    "of programs, not to a speed. A bar that is missing on the right: some program has no work at all. Below, "
    "where a GPU was measured: time of the forward GDPA kernel by tile order, over the plain grid."
)


def draw(source):
    frame = source.frame("schedule")
    rows = select(frame, subject="tile_schedule", metric=("skew", "skew_max_min"))
    rows = rows.drop_duplicates(["case", "impl", "metric"]).assign(panel=lambda f: f.metric, value=lambda f: f.p50)
    rows["device"] = "any"
    times = select(frame, subject="gdpa", phase="fwd", metric="time_ms")
    times = times.assign(impl=[name.partition(":")[2] for name in times.impl])
    base = times[times.impl == "grid"][["device", "case", "p50"]].rename(columns={"p50": "grid"})
    times = times.merge(base, on=["device", "case"]).assign(panel="time", value=lambda f: f.p50 / f.grid)
    columns = ["panel", "device", "case", "impl", "value"]
    table = need(pd.concat([part[columns] for part in (rows, times) if len(part)] or [rows]), "schedule")
    devices = best_device_first(times.device)
    first = 1 if len(rows) else 0  # records shipped for a GPU alone may hold times only
    figure, axes = style.panels(first + len(devices), 2, height=2.2)
    if first:
        grouped(axes[0, 0], rows[rows.metric == "skew"])
        grouped(axes[0, 1], rows[rows.metric == "skew_max_min"])
        axes[0, 0].set(ylabel="busiest / mean", title="Skew: busiest over mean")
        axes[0, 1].set(ylabel="busiest / least busy", yscale="log", title="Skew: busiest over least busy")
        style.plain_log(axes[0, 1].yaxis)
        for axis in axes[0]:
            axis.axhline(1, color=style.INK, linewidth=0.8)
    for line, device in enumerate(devices, start=first):
        axes[line, 1].remove()
        axes[line, 0].set_subplotspec(axes[line, 0].get_gridspec()[line, :])
        grouped(axes[line, 0], times[times.device == device])
        axes[line, 0].set(ylabel="time / time of the grid")
        axes[line, 0].set_title(f"{source.device_label(device)}: GDPA forward")
    style.legend(figure, [*axes[0, : 1 + first], *axes[1:, 0]], columns=3)
    return figure, table.reset_index(drop=True)


def grouped(axis, part):
    cases = list(dict.fromkeys(part.case))
    orders = [name for name in style.FAMILIES["order"] if name in set(part.impl)]
    width = 0.8 / max(1, len(orders))
    for index, name in enumerate(orders):
        for row in part[part.impl == name].itertuples():
            at = cases.index(row.case) + (index - (len(orders) - 1) / 2) * width
            style.bar(axis, at, row.value, "order", name, width=width)
    labels = [case.removeprefix("gdpa_switch_").removeprefix("tiles_").replace("_", " ") for case in cases]
    axis.set_xticks(range(len(cases)), labels, rotation=25, ha="right", rotation_mode="anchor")
    axis.grid(axis="x", visible=False)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
