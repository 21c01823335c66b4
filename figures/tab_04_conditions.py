"""T04: the source's four conditions for near-linear scaling and what our records say of each."""

import sys

import pandas as pd

from figures import balancing, cli, large_jobs, training
from figures.load import NoDataError, select

ID = "T04"
CAPTION = (
    "The source's four conditions for near-linear scaling, its remedy for each, and what our records say. Balance "
    "is simulated from a length law, checkpointing is measured in training, communication beside compute on two GPUs "
    "of one host (F18), a step of thousands of GPUs is modelled; what has no record says so."
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
    rows = [
        ("compute far above communication", "parallelism by topology", exposed(source) or "no record of modelled jobs"),
        (
            "communication hidden, without contention",
            "collectives off the compute units",
            contention(source) or "not measured: no record with more than one GPU",
        ),
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


def exposed(source) -> str | None:
    """Share of a modelled step that waits for communication, with every dimension in use, at the largest job."""
    try:
        rows = large_jobs.rows_of(source)
        jobs = large_jobs.drawn(rows)
    except NoDataError:
        return None
    part = jobs[(jobs.metric == "time_share") & (jobs.subject == "full:exposed")].sort_values("gpus")
    if part.empty:
        return None
    last = part.iloc[-1]
    share = f"{100 * last.p50:.0f} % of a step waits for communication at {int(last.gpus):,} GPUs"
    return f"{share} (modelled, {large_jobs.standing(rows)})"


def contention(source) -> str | None:
    """How much longer layers take while the next one's weights are gathered, by NCCL and by copy engines."""
    times = select(source.frame("topology"), metric="time_ms", scope="measured")
    base = times[times.subject == "step_no_gather"].groupby("case").p50.min()
    found = []
    for subject, name in (("step_nccl_gather", "NCCL"), ("step_copy_engine_gather", "copy engines")):
        more = 100 * (times[times.subject == subject].groupby("case").p50.min() / base - 1).dropna()
        if len(more):
            found.append(f"{more.min():.0f} to {more.max():.0f} % longer by {name}")
    return f"a step with its gathers takes {', '.join(found)} (two GPUs of one host)" if found else None


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
