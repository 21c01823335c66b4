"""T04: the source's four conditions for near-linear scaling and what our records say of each."""

import sys

import pandas as pd

from figures import balancing, cli, training
from figures.load import NoDataError

ID = "T04"
CAPTION = (
    "The source's four conditions for near-linear scaling, its remedy for each, and what our records say. Balance "
    "is simulated from a length law, checkpointing is measured in training; conditions about communication need "
    "more than one GPU and are named as not measured where no record exists."
)
LEADERS = {"local": "local", "bbs": "base-batch shuffling", "global": "global"}


def build(source):
    try:
        balance = balanced(source)
    except NoDataError:
        balance = None
    recompute = recomputation(source)
    if balance is None and recompute is None:
        raise NoDataError("no records of balance or train")
    missing = "not measured: no record with more than one GPU"
    rows = [
        ("compute far above communication", "parallelism by topology", missing),
        ("communication hidden, without contention", "collectives off the compute units", missing),
        ("little recomputation", "checkpointing by region, quantised activations", recompute or "not measured"),
        ("balanced ranks", "balancing by sequence length", balance or "not simulated"),
    ]
    return pd.DataFrame(rows, columns=["condition", "remedy of the source", "our records"])


def balanced(source) -> str:
    rows = balancing.rows_of(source)
    top = rows[rows.ranks == rows.ranks.max()]
    none = top[top.scheme == "none"]["skew"]
    parts = [f"heaviest rank {100 * (none.iloc[0] - 1):.1f} % above the mean" if len(none) else ""]
    for scheme, name in LEADERS.items():
        best = top[top.scheme == scheme]["skew"]
        if len(best):
            parts.append(f"{name} {100 * (best.min() - 1):.1f} %")
    return f"{', '.join(part for part in parts if part)}, at {int(rows.ranks.max()):,} ranks (simulated)"


def recomputation(source) -> str | None:
    table = training.by_variant(source, "train", ("qps",))
    found = []
    for device, own in table.groupby("device", sort=False):
        value = own.set_index("subject").p50
        if {"add_checkpointing", "baseline_varlen"} <= set(value.index):
            change = 100 * (value["add_checkpointing"] / value["baseline_varlen"] - 1)
            found.append(
                f"uniform checkpointing changes throughput by {change:+.0f} % on {source.device_label(device)}"
            )
    return "; ".join(found) or None


if __name__ == "__main__":
    sys.exit(cli.main(sys.modules[__name__]))
