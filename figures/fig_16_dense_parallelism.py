"""F16: dense parallelism over the number of GPUs, modelled."""

import sys

import pandas as pd
from matplotlib.ticker import NullFormatter, NullLocator

from figures import cli, large_jobs, style

ID = "F16"
CAPTION = (
    "Top: communication of a step that compute does not hide, and the scaling ratio (mean compute of the ranks over "
    "the step), over the number of GPUs, as dense parallelism changes and all else stays: FSDP over all GPUs, FSDP in "
    "groups with replicas, and two-way expert parallelism (EP) on top. The cross is FSDP over all GPUs with gathers "
    "whose latency grows with the logarithm of the group instead of its size. Bottom left: the unhidden part at 4,096 "
    "GPUs when ports between hosts are slower or faster than assumed. Bottom right: step without over step with expert "
    "parallelism when experts grow, at the peak of an H200 and of a chip 2.3 times as fast: it pays once gathering the "
    "experts takes longer than the compute beside it. Modelled; not calibrated unless the title says otherwise."
)
CHIPS = {
    "experts": ("H200 peak", style.BLACK, "o", "-"),
    "experts_fast_chip": ("2,250 TFLOP/s peak", style.ORANGE, "s", "--"),
}


def draw(source):
    rows = large_jobs.rows_of(source)
    jobs = large_jobs.drawn(rows)
    names = style.FAMILIES["dense"]
    figure, axes = style.panels(2, 2, height=2.1)
    for axis, (metric, label) in zip(axes[0], PANELS.items(), strict=True):
        part = large_jobs.over_gpus(jobs, metric)
        part = part[part.subject.isin(names)]
        for name in names:
            if len(part[part.subject == name]):
                size = {"dense_1d": 8, "dense_2d_ep": 7}.get(name, 4)
                style.line(axis, part[part.subject == name], "gpus", "p50", "dense", name, size=size)
        style.powers(axis, [gpus for gpus in part.gpus if gpus in (8, 32, 128, 512, 2048, 8192)])
        axis.set(xlabel="GPUs", ylabel=label)
    axes[0][0].set_yscale("log")
    style.plain_log(axes[0][0].yaxis)
    axes[0][1].set_ylim(0, 1.03)
    changed = jobs[jobs.subject.str.contains("@")]
    split = changed.subject.str.split("@", expand=True).reindex(columns=[0, 1])
    changed = changed.assign(dense=split[0], constant=split[1])
    logarithmic = changed[changed.subject.eq("dense_1d@log_latency") & (changed.metric == "exposed_ms")]
    label = "1D, gathers of log2 n hops" if len(logarithmic) else None
    axes[0][0].plot(logarithmic.gpus, logarithmic.p50, "x", color=style.INK, markersize=7, label=label)
    slow = changed[(changed.constant == "zone_bandwidth") & (changed.metric == "exposed_ms")]
    for name in names:
        if len(slow[slow.dense == name]):
            style.line(axes[1][0], slow[slow.dense == name], "factor", "p50", "dense", name)
    axes[1][0].set(xscale="log", yscale="log", xlabel="bandwidth between hosts, x assumed", ylabel=PANELS["exposed_ms"])
    style.plain_log(axes[1][0].yaxis)
    ticks(axes[1][0], slow.factor)
    gains = gain_of_experts(changed)
    for constant, (label, color, marker, line) in CHIPS.items():
        part = gains[gains.constant == constant]
        axes[1][1].plot(part.factor, part.p50, color=color, marker=marker, linestyle=line, label=label)
    axes[1][1].axhline(1, color=style.GREY, linewidth=0.8)
    axes[1][1].set(xscale="log", xlabel="size of the experts, x ours", ylabel="step without / with EP")
    ticks(axes[1][1], gains.factor)
    if len(gains):
        axes[1][1].legend()
    figure.suptitle(f"Modelled, {large_jobs.standing(rows)}", x=0.01, ha="left")
    style.legend(figure, axes[0], columns=2)
    shown = large_jobs.over_gpus(jobs, "exposed_ms"), large_jobs.over_gpus(jobs, "scaling_ratio")
    table = pd.concat([*(part[part.subject.isin(names)] for part in shown), logarithmic, slow, gains])
    columns = ["case", "gpus", "subject", "factor", "impl", "metric", "unit", "p50", "scope", "note"]
    return figure, table.reindex(columns=columns)


def ticks(axis, factors) -> None:
    """x ticks at the factors that were modelled, and no others."""
    places = sorted(set(factors))
    axis.set_xticks(places, [f"{factor:g}" for factor in places])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.xaxis.set_minor_locator(NullLocator())


PANELS = {"exposed_ms": "not hidden, ms a step", "scaling_ratio": "scaling ratio"}


def gain_of_experts(changed: pd.DataFrame) -> pd.DataFrame:
    """Step time of dense_2d over that of dense_2d_ep, by size of the experts and chip."""
    times = changed[changed.constant.isin(CHIPS) & (changed.metric == "time_ms")]
    wide = times.pivot_table(index=["constant", "factor"], columns="dense", values="p50")
    if not {"dense_2d", "dense_2d_ep"} <= set(wide):
        return pd.DataFrame(columns=["constant", "factor", "p50"])
    gains = (wide.dense_2d / wide.dense_2d_ep).rename("p50").reset_index()
    return gains.assign(
        subject="dense_2d / dense_2d_ep@" + gains.constant, metric="time_ms ratio", unit="x", scope="modelled"
    )


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
