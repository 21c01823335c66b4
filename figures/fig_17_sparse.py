"""F17: three generations of sparse parallelism, modelled."""

import sys

from figures import cli, style
from figures.load import need, select

ID = "F17"
CAPTION = (
    "Embedding tables of a large model over the number of GPUs, modelled from table sizes alone: bytes of tables "
    "that a GPU holds between steps, bytes that it sends a step to other zones of 256 GPUs, bytes that it sends "
    "inside its host a step, and largest over mean load of the GPUs that share a copy of the tables. V1: one copy "
    "over all GPUs. V2: a copy for every group of 256. V3: as V2, but the replicas of a shard, on one host, hold "
    "a part of it each. Nothing here is measured."
)
PANELS = {
    ("memory_bytes", "resident"): ("table bytes held, GiB", 2**30),
    ("comm_bytes", "across_zones"): ("across zones, MiB sent a step", 2**20),
    ("comm_bytes", "nvlink"): ("NVLink, MiB sent a step", 2**20),
    ("skew", "model"): ("busiest / mean GPU", 1),
}


def draw(source):
    rows = need(select(source.frame("sparse"), subject=("v1", "v2", "v3")), "sparse")
    rows = rows.drop_duplicates(["case", "subject", "impl", "metric"])
    rows = rows.assign(gpus=rows.case.str.extract(r"^gpus(\d+)$")[0].astype(int))
    figure, axes = style.panels(2, 2, height=2.2)
    for axis, ((metric, impl), (label, unit)) in zip(axes.flat, PANELS.items(), strict=True):
        part = rows[(rows.metric == metric) & (rows.impl == impl)].assign(plot=lambda f, u=unit: f.p50 / u)
        for name in style.FAMILIES["sparse"]:
            one = part[part.subject == name]
            if len(one):
                style.line(axis, one, "gpus", "plot", "sparse", name, size={"v1": 9, "v2": 7}.get(name, 4))
        style.powers(axis, part.gpus)
        axis.set(xlabel="GPUs", ylabel=label)
        axis.set_ylim(bottom=1 if metric == "skew" else 0)
    style.legend(figure, axes.flat)
    return figure, rows[["case", "gpus", "subject", "impl", "metric", "unit", "p50", "scope", "note"]]


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
