"""F22: end-to-end MFU as local MFU times scaling ratio, and what each dimension of parallelism is worth."""

import sys

import pandas as pd

from figures import cli, large_jobs, style
from figures import steps as timed
from figures.load import NoDataError

ID = "F22"
CAPTION = (
    "Where steps were timed: scaling ratio of the measured step of each variant, one (dotted) when a step takes as "
    "long as its layers one by one, more when it takes less. Where jobs are modelled, left: where the time of a step "
    "goes over the number of GPUs with every dimension in use; the compute part is the scaling ratio. Beside it: "
    "end-to-end MFU at 4,096 GPUs with every dimension, without one of them, and with none; the dotted line is local "
    "MFU, which a scaling ratio of one would keep. Modelled panels are not calibrated unless the title says otherwise."
)
JOBS = {
    "full": "all",
    "without_2d": "no 2D FSDP",
    "without_ep": "no expert parallelism",
    "without_sparse": "tables 1D (V1)",
    "without_balance": "no balancing",
    "without_sm_free": "gathers on SMs",
    "none": "none of them",
}


def draw(source):
    measured = timed.scaling_ratios(source)
    try:
        rows = large_jobs.rows_of(source)
        jobs = large_jobs.drawn(rows)
    except NoDataError:
        if measured.empty:
            raise NoDataError("no records of step (scaling_ratio) or simulate") from None
        rows = jobs = None
    bars = measured.groupby(["device", "subject"]).ngroups
    heights = [2.5] * (jobs is not None) + [0.5 + 0.22 * bars] * (bars > 0)
    figure, axes = style.panels(
        len(heights), 1 + (jobs is not None), height=sum(heights) / len(heights), gridspec_kw={"height_ratios": heights}
    )
    parts = []
    if jobs is not None:
        parts += [shares(axes[0][0], jobs), dimensions(axes[0][1], jobs)]
        figure.suptitle(f"Modelled, {large_jobs.standing(rows)}", x=0.01, ha="left")
        style.legend(figure, [axes[0][0]], columns=2)
    if len(measured):
        for axis in axes[-1][1:]:
            axis.remove()
        axes[-1][0].set_subplotspec(axes[-1][0].get_gridspec()[-1, :])
        parts.append(steps(axes[-1][0], measured, source))
    table = pd.concat(parts)
    columns = ["case", "gpus", "subject", "impl", "metric", "unit", "p50", "scope", "device", "note"]
    return figure, table.reindex(columns=columns)


def shares(axis, jobs: pd.DataFrame) -> pd.DataFrame:
    """Stacked shares of the step of the job with every dimension."""
    part = jobs[(jobs.metric == "time_share") & jobs.subject.str.startswith("full:")]
    sizes = sorted(part.gpus.unique())
    bottom = dict.fromkeys(sizes, 0.0)
    for name in style.FAMILIES["step_part"]:
        values = part[part.subject == f"full:{name}"].set_index("gpus").p50
        for place, gpus in enumerate(sizes):
            value = float(values.get(gpus, 0.0))
            style.bar(axis, place, value, "step_part", name, label=place == 0, start=bottom[gpus])
            bottom[gpus] += value
    axis.set_xticks(range(len(sizes)), [f"{int(gpus):,}" for gpus in sizes], rotation=60)
    axis.set(xlabel="GPUs", ylabel="share of the step", ylim=(0, 1))
    axis.grid(axis="x", visible=False)
    return part


def dimensions(axis, jobs: pd.DataFrame) -> pd.DataFrame:
    """End-to-end MFU with and without each dimension."""
    part = large_jobs.over_gpus(jobs, "mfu")
    part = part[part.subject.isin(JOBS)]
    local = jobs[(jobs.metric == "scaling_ratio") & (jobs.subject == "full")].merge(part, on=["case", "subject"])
    place = {name: index for index, name in enumerate(reversed(JOBS))}
    for row in part.itertuples():
        color = style.BLUE if row.subject == "full" else style.GREY if row.subject == "none" else style.SKY
        axis.barh(place[row.subject], row.p50, color=color, height=0.7)
        ink = style.INK if color == style.SKY else "white"
        axis.annotate(f"{row.p50:.3f} ", (row.p50, place[row.subject]), va="center", ha="right", color=ink)
    if len(local):
        axis.axvline(local.p50_y.iloc[0] / local.p50_x.iloc[0], color=style.INK, linestyle=":", linewidth=0.8)
    axis.set_yticks(list(place.values()), [JOBS[name] for name in place])
    axis.set_xlim(0, 1.25 * part.p50.max() if len(part) else 1)
    axis.set(xlabel="end-to-end MFU", title=f"{int(part.gpus.max()):,} GPUs" if len(part) else "")
    axis.grid(axis="y", visible=False)
    return part


def steps(axis, measured: pd.DataFrame, source) -> pd.DataFrame:
    """Measured scaling ratio by subject and device."""
    best = measured.groupby(["device", "subject"], as_index=False, sort=False).p50.median()
    axis.barh(range(len(best)), best.p50, color=style.GREEN, height=0.7)
    for place, value in enumerate(best.p50):
        axis.annotate(f"{value:.2f} ", (value, place), va="center", ha="right", color="white")
    labels = [f"{row.subject}, {source.device_label(row.device)}" for row in best.itertuples()]
    axis.set_yticks(range(len(best)), labels)
    axis.invert_yaxis()
    # above 1: the step takes less than its layers timed one by one
    axis.set(xlabel="scaling ratio, measured", xlim=(0, 1.05 * max(1.0, best.p50.max())))
    axis.axvline(1, color=style.INK, linestyle=":", linewidth=0.8)
    axis.grid(axis="y", visible=False)
    return measured


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
