"""T06: generations of sparse parallelism."""

import sys

import pandas as pd

from figures import cli
from figures.load import need, select

ID = "T06"
CAPTION = (
    "Three generations of sparse parallelism at the largest number of GPUs of the model: the source's words, and "
    "bytes and balance from our model of a table set (F17). V1 keeps one copy of the tables over all GPUs, V2 one "
    "for every group of 256, V3 the same with replicas of a shard holding a part each. Modelled, nothing is "
    "measured."
)
WORDS = {
    "v1": ("1D model parallel", "poor", "none", "very high"),
    "v2": ("2D", "good", "high", "moderate"),
    "v3": ("fully sharded 2D", "good", "near zero", "moderate, more on NVLink"),
}
VALUES = {
    "busiest / mean GPU": ("skew", "model", 1),
    "tables held, GiB": ("memory_bytes", "resident", 2**30),
    "peak of tables, GiB": ("memory_bytes", "peak", 2**30),
    "sent outside the host, MiB a step": ("comm_bytes", "network", 2**20),
    "of that, to other zones, MiB a step": ("comm_bytes", "across_zones", 2**20),
    "sent inside the host, MiB a step": ("comm_bytes", "nvlink", 2**20),
}


def build(source):
    rows = need(select(source.frame("sparse"), subject=tuple(WORDS)), "sparse")
    gpus = rows.case.str.extract(r"^gpus(\d+)$")[0].astype(int)
    rows = rows[gpus == gpus.max()].drop_duplicates(["subject", "impl", "metric"])
    value = rows.set_index(["subject", "metric", "impl"]).p50
    table = []
    for name, (title, balance, memory, communication) in WORDS.items():
        row = {"generation": name.upper(), "scheme": title, "GPUs": int(gpus.max())}
        row |= {"source: balance": balance, "source: memory overhead": memory, "source: communication": communication}
        for label, (metric, impl, unit) in VALUES.items():
            found = value.get((name, metric, impl))
            row[label] = None if found is None else float(found) / unit
        table.append(row)
    return pd.DataFrame(table)


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
