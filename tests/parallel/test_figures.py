"""F15, F16 and F22 on records whose numbers are known, and what they say of calibration."""

import pandas as pd
import pytest

from figures import fig_15_topology, fig_16_dense_parallelism, fig_22_decomposition, large_jobs, style
from figures.load import NoDataError, Source
from tests.figures import synthetic

CPU = {"type": "cpu", "name": "Test CPU", "slug": "cpu", "count": 1}
PAIR = {"type": "cuda", "name": "NVIDIA H200", "slug": "h200x2", "count": 2}


@pytest.fixture
def source(tmp_path):
    style.setup()
    book = synthetic.Book(CPU)
    synthetic.jobs(book)
    book.write(tmp_path / "records")
    return Source(tmp_path / "records", tmp_path / "measured", tmp_path)


def title(figure) -> str:
    return figure.get_suptitle()


def test_tiers_and_axes(source):
    figure, table = fig_15_topology.draw(source)
    bars = table[(table.metric == "time_ms") & table.subject.str.startswith("axis_")].set_index("subject")
    assert bars.tier.to_dict() == {"axis_shard": "zone", "axis_expert": "host", "axis_replica": "cross_zone"}
    curve = table[(table.subject == "all_gather_zone")].set_index("mib").p50
    assert curve.to_dict() == pytest.approx({2**-4: 16.0, 16.0: 24.0, 1024.0: 30.0})
    assert title(figure) == "Modelled, not calibrated"


def test_pairs_are_drawn_beside_the_model(source, tmp_path):
    book = synthetic.Book(PAIR)
    for metric, value in (("comm_bytes", 2.0**20), ("time_ms", 0.5)):
        book.add("topology", "bytes1", "all_gather", "nccl", "step", metric, value)
        book.add("topology", "bytes1", "all_gather_fp8", "nccl", "step", metric, value / 2)  # quantising is in its time
    book.write(tmp_path / "measured" / "h200x2")
    _, table = fig_15_topology.draw(source)
    pair = table[table.scope == "measured"]
    alone = Source(tmp_path / "none", tmp_path / "measured", tmp_path)
    figure, own = fig_15_topology.draw(alone)
    assert own.p50.tolist() == [0.5] and title(figure).startswith("Measured on one host")
    assert pair.mib.tolist() == [2.0] and pair.p50.tolist() == [0.5] and pair.scope.tolist() == ["measured"]


def test_dense_parallelism_shows_exposed_time_and_what_experts_gain(source):
    figure, table = fig_16_dense_parallelism.draw(source)
    exposed = table[(table.metric == "exposed_ms") & table.factor.isna()].set_index(["subject", "gpus"]).p50
    assert exposed[("dense_1d", 4096)] == 4096 and exposed[("dense_2d_ep", 8)] == pytest.approx(8 / 3)
    gains = table[table.metric == "time_ms ratio"].set_index(["subject", "factor"]).p50
    assert gains.to_dict() == pytest.approx(
        {
            (f"dense_2d / dense_2d_ep@{c}", f): g
            for c in ("experts", "experts_fast_chip")
            for f, g in ((1, 1.0), (2, 4 / 3))
        }
    )
    assert title(figure) == "Modelled, not calibrated"


def test_the_decomposition_adds_up(source):
    _, table = fig_22_decomposition.draw(source)
    shares = table[table.metric == "time_share"]
    assert shares.groupby("gpus").p50.sum().to_dict() == pytest.approx({8: 1, 4096: 1})
    bars = table[(table.metric == "mfu") & (table.gpus == 4096)].set_index("subject").p50
    assert bars.to_dict() == pytest.approx({"full": 0.16, "without_ep": 0.2, "none": 0.24})


def test_measured_steps_stand_beside_the_model_or_alone(source, tmp_path):
    book = synthetic.Book(PAIR)
    book.add("step", "base", "full", "nccl", "step", "scaling_ratio", 0.96)
    book.write(tmp_path / "measured" / "h200x2")
    figure, table = fig_22_decomposition.draw(source)
    assert len(figure.axes) == 3 and 0.96 in table[table.scope == "measured"].p50.tolist()
    alone = Source(tmp_path / "none", tmp_path / "measured", tmp_path)
    figure, table = fig_22_decomposition.draw(alone)
    assert len(figure.axes) == 1 and table.p50.tolist() == [0.96]


def test_calibrated_rows_come_first_and_change_the_title(source, tmp_path):
    book = synthetic.Book(CPU)
    synthetic.jobs(book)
    for row in list(book.rows):
        book.rows.append(row | {"impl": "calibrated", "p50": repr(2 * float(row["p50"]))})
    book.write(tmp_path / "both")
    both = Source(tmp_path / "both", tmp_path / "measured", tmp_path)
    rows = large_jobs.rows_of(both)
    assert set(rows.impl) == {"calibrated"} and large_jobs.standing(rows) == "calibrated"
    figure, table = fig_15_topology.draw(both)
    assert title(figure) == "Modelled, calibrated"
    assert table[table.subject == "axis_shard"].p50.tolist() == [4.0, 6e9]


def test_without_records_nothing_is_drawn(tmp_path):
    empty = Source(tmp_path, tmp_path / "measured", tmp_path)
    for module in (fig_15_topology, fig_16_dense_parallelism, fig_22_decomposition):
        with pytest.raises(NoDataError):
            module.draw(empty)
    assert isinstance(large_jobs.standing(pd.DataFrame({"impl": []})), str)
