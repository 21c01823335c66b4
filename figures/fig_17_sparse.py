"""F17: three generations of sparse parallelism: modelled over thousands of GPUs, measured on those of one host."""

import sys

import pandas as pd

from figures import cli, style
from figures.load import need, select

ID = "F17"
CAPTION = (
    "Upper panels, modelled from table sizes alone, over the number of GPUs: bytes of tables that a GPU holds "
    "between steps, bytes of lookups that it sends to each member of its group a step, bytes of copies that it "
    "sends inside its host a step, and largest over mean load of the GPUs that share a copy. V1: one copy over "
    "all GPUs. V2: a copy for every group of 256. V3: as V2, but the replicas of a shard, on one host, hold a "
    "part of it each. Lookups leave the zone with the same share of bytes in all three; groups make fewer and "
    "longer messages. Lower panels, where such records exist, measured on the GPUs of one host with TorchRec: "
    "bytes of tables between steps and, outlined, at most during one; time of a step, V1 exchanging lookups, V2 "
    "averaging its copies, V3 gathering and scattering them."
)
MODELLED = {
    ("memory_bytes", "resident"): ("table bytes held, GiB", 2**30),
    ("comm_bytes", "to_one_peer"): ("lookups to one peer, KiB a step", 2**10),
    ("comm_bytes", "nvlink"): ("copies on NVLink, MiB a step", 2**20),
    ("skew", "model"): ("busiest / mean GPU", 1),
}


def draw(source):
    frame = source.frame("sparse")
    modelled = select(frame, subject=("v1", "v2", "v3"), scope="modelled")
    modelled = modelled.drop_duplicates(["case", "subject", "impl", "metric"])
    measured = rows_of_hosts(frame)
    need(pd.concat([modelled, measured]), "sparse")
    upper, lower = 2 * bool(len(modelled)), 1 * bool(len(measured))
    figure, axes = style.panels(upper + lower, 2, height=2.2)
    gpus = modelled.case.str.extract(r"^gpus(\d+)$")[0].astype(float)
    modelled = modelled.assign(gpus=gpus)
    for axis, ((metric, impl), (label, unit)) in zip(axes[:upper].flat, MODELLED.items(), strict=False):
        part = modelled[(modelled.metric == metric) & (modelled.impl == impl)]
        part = part.assign(plot=lambda f, u=unit: f.p50 / u)
        for name in style.FAMILIES["sparse"]:
            one = part[part.subject == name]
            if len(one):
                style.line(axis, one, "gpus", "plot", "sparse", name, size={"v1": 9, "v2": 7}.get(name, 4))
        style.powers(axis, part.gpus)
        axis.set(xlabel="GPUs", ylabel=label)
        axis.set_ylim(bottom=1 if metric == "skew" else 0)
    if lower:
        memory_of_hosts(axes[-1][0], measured)
        time_of_hosts(axes[-1][1], measured)
    style.legend(figure, axes.flat, columns=3)
    columns = ["case", "gpus", "subject", "impl", "phase", "metric", "unit", "p50", "p20", "p80", "scope", "note"]
    return figure, pd.concat([modelled, measured]).reindex(columns=columns)


def rows_of_hosts(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured rows of the generations and of their synchronisation, those of the largest host."""
    rows = select(frame, scope="measured")
    rows = rows.assign(gpus=rows.case.str.extract(r"^gpus(\d+)$")[0].astype(float))
    return rows[rows.gpus == rows.gpus.max()] if len(rows) else rows


def bars(rows: pd.DataFrame) -> list[str]:
    """Generations that have records, and TorchRec's own order of V3."""
    return [name for name in (*style.FAMILIES["sparse"], "v3_torchrec") if (rows.subject == name).any()]


def memory_of_hosts(axis, rows: pd.DataFrame) -> None:
    held = rows[rows.metric == "memory_bytes"].set_index(["subject", "impl"]).p50 / 2**30
    names = bars(rows)
    for place, name in enumerate(names):
        peak = held.get((name, "tables_peak"))
        if peak is not None:
            axis.bar(place, peak, width=0.8, color="none", edgecolor=style.GREY, linewidth=0.8)
        style.bar(axis, place, held.get((name, "tables"), 0.0), "sparse", name[:2], label=False)
    labels(axis, names)
    axis.set(ylabel="table bytes of a GPU, GiB", title=f"Measured, {int(rows.gpus.max())} GPUs")


def time_of_hosts(axis, rows: pd.DataFrame) -> None:
    times = rows[(rows.metric == "time_ms") & (rows.impl == "step")]
    times = times.set_index(["subject", "phase"]).p50
    names = bars(rows)
    for place, name in enumerate(names):
        start = 0.0
        for phase in style.FAMILIES["sparse_step"]:
            key = (f"{name}_sync", "step") if phase == "sync" else (name, phase)
            value = float(times.get(key, 0.0))
            style.bar(axis, place, value, "sparse_step", phase, start=start, label=place == 0)
            start += value
    labels(axis, names)
    axis.set(ylabel="ms a step", title=f"Measured, {int(rows.gpus.max())} GPUs")


def labels(axis, names: list[str]) -> None:
    axis.set_xticks(range(len(names)), [{"v3_torchrec": "V3, TorchRec's"}.get(name, name.upper()) for name in names])
    axis.grid(axis="x", visible=False)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
