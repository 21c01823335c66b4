"""What two ranks run for tests/parallel/test_scaling.py: the benchmark of a step, on gloo, with a clock of its own."""

from __future__ import annotations

from gem.bench import ranks, scaling
from gem.bench.timing import Timing


class Rows:
    """A run that keeps its rows."""

    def __init__(self):
        self.rows: list[dict] = []

    def add(self, **row) -> None:
        self.rows.append(row)


def step(rank, name: str) -> dict:
    """One GPU's part, the loss of two steps of the job, and the rows for steps that took 30 and 50 ms."""
    job = ranks.Job(rank, "smoke", "smoke", {"bench": {}}, 1e9, clock=object())
    case = scaling.Case(job, name)
    case.settings = case.settings | {"repeat_ms": 1.0, "part_ms": 1.0, "warmup": 1}
    one = scaling.alone(case, scaling.prepare(case))
    wanted = scaling.expected_loss(case, one.sums)
    together = scaling.Together(case)
    together.one()
    together.one()
    losses = [float(found[0]) for found in together.found]
    together.timed = lambda: (Timing.of([30.0, 50.0], 1), 0.08, together.seen)
    together.profiled = lambda: (8.0 + rank.rank, 2.0 + rank.rank)
    run = Rows()
    scaling.record(job, run, {"case": "smoke", "subject": name, "impl": "x", "phase": "step"}, case, one, together)
    together.close()
    own = [dict(zip(("subject", "metric"), (row["subject"], row["metric"]), strict=True)) | row for row in run.rows]
    return {"wanted": wanted, "losses": losses, "one": one, "rows": own, "batch": case.settings["batch"]}
