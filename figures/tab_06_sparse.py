"""T06: generations of sparse parallelism."""

import sys

import pandas as pd

from figures import cli
from figures.load import need, select

ID = "T06"
CAPTION = (
    "Three generations of sparse parallelism: the source's words; bytes and balance from our model of a table set "
    "at its largest number of GPUs (F17), modelled, nothing of it is measured; and, where such records exist, "
    "what the GPUs of one host hold and take with TorchRec (measured). V1 keeps one copy of the tables "
    "over all GPUs, V2 one for every group, V3 the same with replicas of a shard holding a part each. On two GPUs "
    "a group of V2 and V3 is one GPU, so V1 alone exchanges lookups there."
)
WORDS = {
    "v1": ("1D model parallel", "poor", "none", "very high"),
    "v2": ("2D", "good", "high", "moderate"),
    "v3": ("fully sharded 2D", "good", "near zero", "moderate, more on NVLink"),
}
MODELLED = {
    "busiest / mean GPU": ("skew", "model", 1),
    "tables held, GiB": ("memory_bytes", "resident", 2**30),
    "peak of tables, GiB": ("memory_bytes", "peak", 2**30),
    "lookups sent outside the host, MiB a step": ("comm_bytes", "network", 2**20),
    "of that, to other zones, MiB a step": ("comm_bytes", "across_zones", 2**20),
    "lookups to one peer, KiB a step": ("comm_bytes", "to_one_peer", 2**10),
    "copies sent inside the host, MiB a step": ("comm_bytes", "nvlink", 2**20),
}
MEASURED = {
    "measured: tables held, GiB": ("memory_bytes", "tables", "step", 2**30),
    "measured: peak of tables, GiB": ("memory_bytes", "tables_peak", "step", 2**30),
    "measured: busiest / mean GPU, lookups": ("skew", "lookups", "step", 1),
    "measured: step, ms": ("time_ms", "step", "step", 1),
}


def build(source):
    rows = need(select(source.frame("sparse"), subject=tuple(WORDS)), "sparse")
    rows = rows.assign(gpus=rows.case.str.extract(r"^gpus(\d+)$")[0].astype(int))
    modelled, measured = (largest(rows[rows.scope == scope]) for scope in ("modelled", "measured"))
    value = modelled.set_index(["subject", "metric", "impl"]).p50
    seen = measured.set_index(["subject", "metric", "impl", "phase"]).p50
    table = []
    for name, (title, balance, memory, communication) in WORDS.items():
        row = {"generation": name.upper(), "scheme": title}
        row |= {"source: balance": balance, "source: memory overhead": memory, "source: communication": communication}
        if len(modelled):
            row["GPUs"] = int(modelled.gpus.max())
            for label, (metric, impl, unit) in MODELLED.items():
                row[label] = scaled(value.get((name, metric, impl)), unit)
        if len(measured):
            row["measured: GPUs"] = int(measured.gpus.max())
            for label, (metric, impl, phase, unit) in MEASURED.items():
                row[label] = scaled(seen.get((name, metric, impl, phase)), unit)
        table.append(row)
    return pd.DataFrame(table)


def largest(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the largest number of GPUs, once each."""
    return rows[rows.gpus == rows.gpus.max()].drop_duplicates(["subject", "impl", "metric", "phase"])


def scaled(found, unit: float) -> float | None:
    return None if found is None else float(found) / unit


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
