"""What two ranks run for tests/parallel/test_scaling.py: the benchmark of a step, on gloo, with a clock of its own."""

from __future__ import annotations

from gem import hardware
from gem.bench import model_work, ranks, scaling

# Milliseconds of the steps of each rank. The slower rank changes: a step of the job takes 30, 50 and 160, so that the
# median is 50 by step, the mean 80, and each rank's own median 30 and 20.
TIMES = ((30.0, 10.0, 160.0), (20.0, 50.0, 15.0))


class Rows:
    """A run that keeps its rows."""

    def __init__(self):
        self.rows: list[dict] = []

    def add(self, **row) -> None:
        self.rows.append(row)


def step(rank, name: str) -> dict:
    """One GPU's part, the loss of two steps of the job, and the rows for steps that took TIMES."""
    job = ranks.Job(rank, "smoke", "smoke", {"bench": {}}, 1e9, clock=object())
    case = scaling.Case(job, name)
    case.settings = case.settings | {"repeat_ms": 1.0, "part_ms": 1.0, "warmup": 1}
    one = scaling.alone(case, scaling.prepare(case))
    wanted = scaling.expected_loss(case, one.sums)
    together = scaling.Together(case)
    together.one()
    together.one()
    losses = [float(found[0]) for found in together.found]

    def times() -> list[float]:
        for _ in TIMES[rank.rank]:
            together.one()
        return list(TIMES[rank.rank])

    case.warmup, together.times = 1, times
    together.profiled = lambda: (8.0 + rank.rank, 2.0 + rank.rank)
    run = Rows()
    scaling.record(job, run, {"case": "smoke", "subject": name, "impl": "x", "phase": "step"}, case, one, together)
    together.close()
    works = [model_work.of_steps(together.trainer.model, case.config, [item]).model for item in together.seen]
    peak, batch = hardware.peak(case.device).flops, case.settings["batch"]
    found = {"wanted": wanted, "losses": losses, "one": one, "rows": run.rows}
    return found | {"batch": batch, "works": works, "peak": peak}
