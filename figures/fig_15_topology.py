"""F15: tiers of the network, what a collective costs on each, and which axis uses which."""

import sys

import pandas as pd

from figures import cli, large_jobs, style
from figures.load import NoDataError, need

ID = "F15"
CAPTION = (
    "Time of an all-gather over the bytes gathered. Crosses: NCCL between two GPUs of one host, where such records "
    "exist. Lines, where jobs are modelled: each tier of the network, a host, a zone, and across zones whose links are "
    "oversubscribed; small messages pay for hops, large ones for bandwidth. Right, modelled: what each axis of "
    "a job of 4,096 GPUs would spend on its tier in a step if nothing were hidden, and the bytes that a rank sends. "
    "Models take the constants in the run of the records, not calibrated unless the title says otherwise."
)
AXES = {
    "axis_shard": "FSDP, all but experts",
    "axis_expert_shard": "FSDP, experts",
    "axis_expert": "experts: activations",
    "axis_replica": "DDP: gradient shards",
}
COLUMNS = ["case", "subject", "impl", "tier", "mib", "metric", "unit", "p50", "scope", "note"]


def draw(source):
    pair = measured(source)
    try:
        rows = large_jobs.rows_of(source)
    except NoDataError:
        return alone(need(pair, "simulate, nor of all-gathers in topology"))
    curves = rows[rows.subject.str.startswith("all_gather_") & (rows.metric == "time_ms")]
    curves = curves.assign(tier=curves.subject.str.removeprefix("all_gather_"))
    curves["mib"] = pd.to_numeric(curves.case.str.removeprefix("bytes")) / 2**20
    jobs = large_jobs.drawn(rows)
    axes = jobs[jobs.subject.isin(AXES) & (jobs.metric == "time_ms")]
    sent = jobs[jobs.metric == "comm_bytes"].set_index("subject").p50
    figure, panels = style.panels(1, 2, height=2.6)
    left, right = panels[0]
    for tier in style.FAMILIES["tier"]:
        style.line(left, curves[curves.tier == tier], "mib", "p50", "tier", tier)
    gathers(left, pair)
    axes = axes.assign(tier=axes.note.str.partition(":")[0]).sort_values("p50")
    for place, row in enumerate(axes.itertuples()):
        style.bar(right, place, row.p50, "tier", row.tier, horizontal=True, label=False, width=0.7)
        right.annotate(f" {sent[row.subject] / 1e9:.2g} GB", (row.p50, place), va="center")
    right.set_yticks(range(len(axes)), [AXES[name] for name in axes.subject])
    right.set(xlabel="ms of a step, hidden or not", title=f"{int(axes.gpus.max()):,} GPUs" if len(axes) else "")
    right.set_xlim(0, 1.25 * axes.p50.max() if len(axes) else 1)
    right.grid(axis="y", visible=False)
    figure.suptitle(f"Modelled, {large_jobs.standing(rows)}", x=0.01, ha="left")
    style.legend(figure, [left])
    table = pd.concat([curves, axes, jobs[jobs.subject.isin(AXES) & (jobs.metric == "comm_bytes")], pair])
    return figure, table.reindex(columns=COLUMNS)


def alone(pair: pd.DataFrame):
    """What was measured, where nothing is modelled: a build from shipped records."""
    figure, panels = style.panels(1, 1, height=2.1)
    gathers(panels[0][0], pair)
    panels[0][0].set(xlim=(pair.mib.min() / 2, 2 * pair.mib.max()), ylim=(pair.p50.min() / 2, 2 * pair.p50.max()))
    figure.suptitle("Measured on one host; no records of modelled jobs in this build", x=0.01, ha="left")
    style.legend(figure, [panels[0][0]])
    return figure, pair.reindex(columns=COLUMNS)


def gathers(axis, pair: pd.DataFrame) -> None:
    if len(pair):
        axis.plot(pair.mib, pair.p50, "x", color=style.INK, label="two GPUs, measured")
    axis.set(xscale="log", yscale="log", xlabel="MiB gathered", ylabel="ms", title="All-gather")
    axis.set_xticks([0.1, 1, 10, 100, 1000, 10_000], ["0.1", "1", "10", "100", "1,000", "10,000"])
    axis.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    axis.minorticks_off()


def measured(source) -> pd.DataFrame:
    """All-gathers of records with their bytes, which a rank sent to its one peer: half of what is gathered."""
    rows = source.frame("topology")
    rows = rows[(rows.status == "ok") & (rows.subject == "all_gather")]
    sizes = rows[rows.metric == "comm_bytes"].set_index(["case", "subject", "impl"]).p50
    times = rows[rows.metric == "time_ms"]
    keys = list(zip(times.case, times.subject, times.impl, strict=True))
    times = times.assign(mib=[2 * sizes.get(key, float("nan")) / 2**20 for key in keys])
    return times[times.mib.notna()]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
