"""F21: training throughput and MFU as each optimisation is added."""

import sys

import pandas as pd
from matplotlib.ticker import MaxNLocator

from figures import cli, style, training
from figures.load import NoDataError, best_device_first

ID = "F21"
CAPTION = (
    "Training throughput (left) and MFU (right) of the baselines, of a baseline plus one optimisation, and of "
    "everything together. MFU counts useful model FLOPs only, on a GPU over its bf16 dense peak, on a CPU over "
    "its measured rate of matrix products. Each device has its own panels; on a CPU every optimisation runs in "
    "plain torch, so its bars show what changes the mathematics or the padding, not kernels. Variants that skip "
    "work have other FLOPs: read MFU and throughput together. Whiskers: 20 and 80 % quantiles over seeds."
)
SHOWN = ("baseline", "add_one", "full")


def draw(source):
    tables = [training.by_variant(source, experiment, ("qps", "mfu")) for experiment in ("step", "train")]
    tables = [table for table in tables if len(table)]
    if not tables:
        raise NoDataError("no records of train or step (qps, mfu)")
    table = pd.concat(tables, ignore_index=True).drop_duplicates(["device", "subject", "metric"])
    table = training.ordered(table[table.group.isin(SHOWN)])
    devices = best_device_first(table.device)
    counts = [max(4, table[table.device == device].subject.nunique()) for device in devices]
    figure, axes = style.panels(len(devices), 2, height=0.19 * sum(counts) / len(counts) + 0.6, height_ratios=counts)
    for row, device in zip(axes, devices, strict=True):
        own = table[table.device == device]
        names = list(dict.fromkeys(own.subject))
        for axis, metric in zip(row, ("qps", "mfu"), strict=True):
            factor = 100 if metric == "mfu" else 1
            for item in own[own.metric == metric].itertuples():
                style.bar(
                    axis, names.index(item.subject), item.p50 * factor, "group", item.group, horizontal=True,
                    low=item.p20 * factor, high=item.p80 * factor,
                )  # fmt: skip
            axis.set_yticks(range(len(names)), names if metric == "qps" else [])
            axis.invert_yaxis()
            axis.grid(axis="y", visible=False)
            axis.xaxis.set_major_locator(MaxNLocator(5))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value / 1e3:g}k")
            axis.set_xlabel("samples a second" if metric == "qps" else "MFU, %")
        row[0].set_title(f"{source.device_label(device)}: throughput")
        row[1].set_title("MFU, useful FLOPs")
    style.legend(figure, axes.flat)
    return figure, table[["device", "case", "subject", "group", "metric", "p50", "p20", "p80", "n"]]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
