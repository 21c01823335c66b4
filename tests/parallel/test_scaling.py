"""The benchmark of a step on several ranks, run on gloo: its check of the loss, and what its rows say."""

import pytest

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
    batch = seen[0]["batch"]
    assert rows["full_ep", "time_ms"] == 40.0
    assert rows["full_ep", "qps"] == pytest.approx(2 * 2 * batch / 0.08), "two steps of two ranks in 80 ms"
    qps = [rank["one"].qps for rank in seen]
    assert rows["full_ep", "weak_scaling"] == pytest.approx(rows["full_ep", "qps"] / sum(qps))
    assert rows["full_ep@one_gpu", "qps"] == pytest.approx(sum(qps) / 2)
    local = sum(rank["one"].local_mfu for rank in seen) / 2
    assert rows["layers@full_ep", "mfu"] == pytest.approx(local)
    assert rows["full_ep", "scaling_ratio"] == pytest.approx(rows["full_ep", "mfu"] / local)
    assert rows["full_ep", "exposed_ms"] == 3.0 and rows["full_ep:communication", "time_ms"] == 9.0, "the slower rank"
    # both ranks' FLOPs over both ranks' peak: near one rank's own rate at this speed
    assert rows["full_ep", "mfu"] == pytest.approx(
        seen[0]["one"].mfu * rows["full_ep", "qps"] / 2 / seen[0]["one"].qps, rel=0.5
    )
