"""F18: what collectives cost the products beside them, and what copy engines give back."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import NoDataError, need, select

ID = "F18"
CAPTION = (
    "Measured on the GPUs of one host; percentages are time beyond that of the same matrix products alone. Upper "
    "left: products beside a kernel that does nothing but hold multiprocessors, as the kernel of a collective "
    "does; grey, what the share of lost multiprocessors alone would cost. Upper right: products beside as many "
    "all-gathers, over the bandwidth that the gather reaches by itself; NCCL as it is, NCCL with its blocks "
    "limited (numbers: blocks), and copy engines; linear up to 10 %, logarithmic above. "
    "Lower left: eight layers whose weights are gathered one layer ahead, against the same layers without a gather, "
    "over the rows of a layer's input; of NCCL the fastest setting. Lower right: bytes that a rank sends over the time "
    "of a collective, over the bytes of the whole buffer. In-switch reduction was not attempted."
)


def draw(source):
    rows = need(select(source.frame("topology"), scope="measured"), "topology")
    rows = rows[rows.device == rows.device.iloc[-1]]
    times = rows[rows.metric == "time_ms"]
    held, beside = beside_holder(times), beside_gather(times)
    layered, rates = steps(times), bandwidth(rows)
    if not sum(map(len, (held, beside, layered, rates))):
        raise NoDataError("no records of topology (collectives beside products)")
    figure, axes = style.panels(2, 2, height=2.4)
    draw_held(axes[0][0], held, multiprocessors(source, held))
    draw_beside(axes[0][1], beside)
    draw_steps(axes[1][0], layered)
    draw_rates(axes[1][1], rates)
    style.legend(figure, axes.flat)
    parts = {"held": held, "beside": beside, "layered": layered, "bandwidth": rates}
    table = pd.concat([part.assign(panel=name) for name, part in parts.items()])
    columns = ["panel", "case", "subject", "impl", "place", "value", "p50", "p20", "p80", "n", "scope", "note"]
    return figure, table.reindex(columns=columns)


def over(times: pd.DataFrame, base: str) -> pd.Series:
    """Time of `base` by case."""
    return times[times.subject == base].groupby("case").p50.min()


def beside_holder(times: pd.DataFrame) -> pd.DataFrame:
    """place: held multiprocessors; value: time over the products alone, in per cent more."""
    found = times.subject.str.extract(r"^gemm_beside_(\d+)_sms$")[0]
    rows = times[found.notna()].assign(place=found.dropna().astype(float))
    return rows.assign(value=100 * (rows.p50 / rows.case.map(over(times, "gemm_alone")) - 1))


def beside_gather(times: pd.DataFrame) -> pd.DataFrame:
    """place: GB/s that a rank sends in the gather alone; value: per cent more time of the products."""
    rows = times[times.subject == "gemm_beside_gather"]
    sizes = times.case.str.extract(r"^bytes(\d+)$")[0].astype(float)
    alone = times[times.subject.isin(("gather_limited", "gather_copy_engine"))].assign(bytes=sizes)
    alone = alone[alone.bytes == alone[alone.subject == "gather_limited"].bytes.max()]
    rate = (alone.bytes / 2 / alone.p50 / 1e6).groupby(alone.impl).max()
    return rows.assign(place=rows.impl.map(rate), value=100 * (rows.p50 / rows.case.map(over(times, "gemm_alone")) - 1))


def steps(times: pd.DataFrame) -> pd.DataFrame:
    """place: rows of a layer; value: per cent more time than without a gather. Of NCCL the fastest setting."""
    names = {"step_nccl_gather": "nccl", "step_copy_engine_gather": "copy_engine"}
    rows = times[times.subject.isin(names)].sort_values("p50").drop_duplicates(["case", "subject"])
    place = rows.case.str.extract(r"^rows(\d+)$")[0].astype(float)
    base = rows.case.map(over(times, "step_no_gather"))
    return rows.assign(place=place, value=100 * (rows.p50 / base - 1)).sort_values(["place", "subject"])


def bandwidth(rows: pd.DataFrame) -> pd.DataFrame:
    """place: MiB of the whole buffer; value: GB/s that a rank sends."""
    rows = rows[rows.subject.isin(style.FAMILIES["collective"])]
    sent = rows[rows.metric == "comm_bytes"].groupby(["case", "subject"]).p50.first()
    times = rows[rows.metric == "time_ms"]
    found = [sent.get(key, float("nan")) for key in zip(times.case, times.subject, strict=True)]
    size = times.case.str.extract(r"^bytes(\d+)$")[0].astype(float) / 2**20
    return times.assign(place=size, value=pd.Series(found, times.index, dtype=float) / times.p50 / 1e6)


def multiprocessors(source, held: pd.DataFrame) -> int | None:
    """Of the device, from the run of the records."""
    runs = [source.runs.get(run, {}).get("config", {}).get("settings", {}).get("sms") for run in held.run_id]
    return next((int(found) for found in runs if found), None)


def draw_held(axis, rows: pd.DataFrame, total: int | None) -> None:
    if rows.empty:
        style.blank(axis)
        return
    rows = rows.sort_values("place")
    if total:
        axis.plot(rows.place, 100 * rows.place / (total - rows.place), color=style.GREY, linestyle=":")
    for _, case in rows.groupby("case"):
        axis.plot(case.place, case.value, color=style.look("gather", "nccl").color, marker="s", markersize=4)
    axis.set(xlabel="multiprocessors held", ylabel="products slower, %", title="Beside a kernel that holds SMs")
    axis.set_ylim(bottom=min(0, rows.value.min()))


def draw_beside(axis, rows: pd.DataFrame) -> None:
    if rows.empty:
        style.blank(axis)
        return
    for row in rows.itertuples():
        limited = row.impl.startswith("nccl_ctas")
        look = style.look("gather", "nccl_ctas" if limited else row.impl)
        axis.plot(row.place, row.value, look.marker, color=look.color, label=look.label, markersize=5)
        if limited:
            blocks = row.impl.removeprefix("nccl_ctas")
            axis.annotate(blocks, (row.place, row.value), xytext=(4, 2), textcoords="offset points")
    axis.set(xlabel="gather alone, GB/s sent", ylabel="products slower, %", title="Beside all-gathers")
    axis.set_xlim(0, 1.08 * rows.place.max())
    # few blocks hold the products up tenfold, copy engines by next to nothing: linear up to 10 %, decades above
    axis.set_yscale("symlog", linthresh=10)
    axis.set_ylim(min(-1, 1.5 * rows.value.min()), max(20, 3 * rows.value.max()))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")


def draw_steps(axis, rows: pd.DataFrame) -> None:
    if rows.empty:
        style.blank(axis)
        return
    places = {place: index for index, place in enumerate(sorted(rows.place.unique()))}
    for shift, name, subject in ((-0.2, "nccl", "step_nccl_gather"), (0.2, "copy_engine", "step_copy_engine_gather")):
        for row in rows[rows.subject == subject].itertuples():
            style.bar(axis, places[row.place] + shift, row.value, "gather", name, width=0.38, label=False)
    axis.set_xticks(range(len(places)), [f"{int(place):,}" for place in places])
    axis.axhline(0, color=style.INK, linewidth=0.6)
    axis.set(xlabel="rows of a layer's input", ylabel="step slower, %", title="Weights gathered a layer ahead")
    axis.grid(axis="x", visible=False)


def draw_rates(axis, rows: pd.DataFrame) -> None:
    if rows.empty:
        style.blank(axis)
        return
    for name in style.FAMILIES["collective"]:
        part = rows[rows.subject == name]
        if len(part):
            style.line(axis, part, "place", "value", "collective", name, size=4)
    axis.set(
        xscale="log", yscale="log", xlabel="MiB of the whole buffer", ylabel="GB/s sent", title="Collectives alone"
    )
    style.plain_log(axis.xaxis)
    style.plain_log(axis.yaxis)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
