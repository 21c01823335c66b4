"""The benchmark of a step on several ranks, run on gloo: its check of the loss, and what its rows say."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gem import config as configuration
from gem.bench import ranks, scaling
from gem.bench.loop import Done
from gem.bench.timing import Timing
from gem.parallel import launch
from gem.record import metric_units
from tests.parallel import scaling_checks as checks


@pytest.fixture(scope="module")
def seen() -> list[dict]:
    return launch.spawn(2, checks.step, "gloo", arguments=("full_ep",), timeout_s=120)


def test_the_loss_of_the_job_is_that_of_single_ranks(seen):
    for rank in seen:
        assert rank["losses"][0] == pytest.approx(rank["wanted"], rel=1e-5)
        assert rank["losses"] == seen[0]["losses"] and rank["losses"][1] != pytest.approx(rank["losses"][0], rel=1e-3)


def test_rows_are_rates_and_ratios_of_what_was_timed(seen):
    rows = {(row["subject"], row["metric"]): row["p50"] for row in seen[0]["rows"]}
    assert {metric for _, metric in rows} <= set(metric_units())
    qps = [rank["one"].qps for rank in seen]
    assert rows["full_ep", "weak_scaling"] == pytest.approx(rows["full_ep", "qps"] / sum(qps))
    assert rows["full_ep@one_gpu", "qps"] == pytest.approx(sum(qps) / 2)
    local = sum(rank["one"].local_mfu for rank in seen) / 2
    assert rows["layers@full_ep", "mfu"] == pytest.approx(local)
    assert rows["full_ep", "scaling_ratio"] == pytest.approx(rows["full_ep", "mfu"] / local)
    assert rows["full_ep", "exposed_ms"] == 3.0 and rows["full_ep:communication", "time_ms"] == 9.0, "the slower rank"


def test_rates_are_those_of_the_median_step_of_the_job(seen):
    """A step takes what its slowest rank takes and does what both ranks do in it; a step of 160 ms moves no median."""
    rows = {(row["subject"], row["metric"]): row for row in seen[0]["rows"]}
    time, qps, mfu = (rows["full_ep", metric] for metric in ("time_ms", "qps", "mfu"))
    slowest = np.max(checks.TIMES, axis=0)
    assert slowest.tolist() == [30.0, 50.0, 160.0]
    assert time["p50"] == 50.0 and time["n"] == 3 and "slowest step 160 ms" in time["note"]

    def quantiles(amounts) -> list[float]:
        return np.quantile(amounts / slowest * 1e3, (0.5, 0.2, 0.8)).tolist()

    assert qps["p50"] == pytest.approx(2 * seen[0]["batch"] / 0.05)
    assert [qps[name] for name in ("p50", "p20", "p80")] == pytest.approx(quantiles(2.0 * seen[0]["batch"]))
    works = np.array([rank["works"] for rank in seen], float)
    assert (np.ptp(works, axis=1) > 0).all(), "steps differ in FLOPs"
    wanted = quantiles(works.sum(0) / (2 * seen[0]["peak"]))
    assert [mfu[name] for name in ("p50", "p20", "p80")] == pytest.approx(wanted)


def test_amounts_of_all_ranks_are_summed_step_by_step():
    """Sums 10, 3 and 5 have the median 5; the ranks' own medians, 2 and 2, are of different steps."""
    others = iter((9.0, 1.0, 2.0))
    job = SimpleNamespace(gathered=lambda value: [value, next(others)])
    done = Done(Timing.of([10.0] * 3, 1), (10.0,) * 3, ())
    assert scaling.joint_rate(job, done, [1.0, 2.0, 3.0])[0] == pytest.approx(500.0)


@pytest.mark.parametrize(("gdpa", "samples"), [("eager", 16), ("triton", 32)])
def test_a_draft_has_few_samples_where_gdpa_pads(gdpa, samples, monkeypatch):
    """Four times `draft` samples in place of the whole batch, as in gem.bench.step."""
    tier = copy.deepcopy(configuration.load_tier("smoke"))
    tier["step"] |= {"batch": 32, "draft": 4}
    tier["implementations"]["gdpa"]["tlx"] = gdpa
    monkeypatch.setattr(configuration, "load_tier", lambda *_: tier)
    rank = launch.Rank(0, 0, 2, torch.device("cpu"))
    case = scaling.Case(ranks.Job(rank, "smoke", "smoke", {}, 1e9, clock=object()), "full")
    assert case.config.implementations.gdpa == gdpa and case.draft.size == samples
