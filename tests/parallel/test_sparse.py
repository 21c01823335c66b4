"""V1, V2 and V3 of sparse parallelism against one process, on gloo with 2 and 4 ranks, and on NCCL with two GPUs."""

import numpy as np
import pytest
import torch

from gem.parallel import launch
from gem.parallel.placement import ROW, Placement, place
from tests.parallel import sparse_checks as checks

GENERATIONS = ("v1", "v2", "v3")
_seen: dict[int, list[dict]] = {}


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request) -> list[dict]:
    """What every rank of a job saw; one job a world size."""
    world = request.param
    if world not in _seen:
        _seen[world] = launch.spawn(world, checks.everything, "gloo", timeout_s=150)
    return _seen[world]


def close(found: dict, wanted: dict, limit: float = 2e-6) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.isfinite(found[name]).all(), name
        assert float((found[name] - value).abs().max()) <= limit * max(1.0, float(value.abs().max())), name


@pytest.mark.parametrize("how", ["auto", "row", "table-uneven"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_embeddings_and_updates_are_those_of_one_process(ranks, generation, how):
    """Losses follow from the embeddings of every step, tables from the updates; SGD, so that averages are exact."""
    case = checks.cases(len(ranks))[f"{generation}-{how}"]
    wanted, losses = checks.one_process(case["sizes"], "sgd")
    for seen in ranks:
        close(seen[f"{generation}-{how}"]["tables"], wanted)
        assert seen[f"{generation}-{how}"]["losses"] == pytest.approx(losses, rel=1e-5)


def test_row_wise_adagrad(ranks):
    """V1 is exact. V2 and V3 are the same as each other; they average Adagrad's steps, which is another optimiser."""
    wanted, losses = checks.one_process([4] * len(ranks), "rowwise_adagrad")
    for seen in ranks:
        close(seen["v1-adagrad"]["tables"], wanted, 1e-5)
        assert seen["v1-adagrad"]["losses"] == pytest.approx(losses, rel=1e-5)
        for name, table in seen["v2-adagrad"]["tables"].items():
            assert torch.equal(table, seen["v3-adagrad"]["tables"][name]), name
        assert any((seen["v2-adagrad"]["tables"][name] - wanted[name]).abs().max() > 1e-3 for name in wanted)


def test_replicas_share_the_state_of_their_optimiser(ranks):
    """Neighbours hold the same shard: rank 0 and rank 1, which have looked up other rows."""
    for generation in ("v2", "v3"):
        for first in range(0, len(ranks), 2):
            one, other = (ranks[rank][f"{generation}-adagrad"]["states"] for rank in (first, first + 1))
            assert one and all(torch.equal(a, b) and a.max() > 0 for a, b in zip(one, other, strict=True)), generation


def test_all_ranks_see_the_same_tables(ranks):
    for generation in GENERATIONS:
        for name in ranks[0][f"{generation}-auto"]["tables"]:
            values = [seen[f"{generation}-auto"]["tables"][name] for seen in ranks]
            assert all(torch.equal(value, values[0]) for value in values), (generation, name)


def test_memory_of_a_rank(ranks):
    """V1 and V2 hold their shards all the time. V3 holds half of V2's between steps (two replicas), and for a lookup or
    an update the shard and its half."""
    world = len(ranks)
    whole = sum(size * checks.DIM * 4 for size in [n for n, _ in checks.BAGS.values()] + list(checks.ROWS.values()))
    for generation, copies in (("v1", 1), ("v2", 2)):
        memory = [seen[f"{generation}-row"]["memory"] for seen in ranks]
        assert all(step.tables == step.peak_tables for rank in memory for step in rank)
        assert sum(rank[0].tables for rank in memory) == copies * whole
        assert sum(ranks[0][f"{generation}-row"]["bytes"]) == whole
    for seen in ranks:
        shard = seen["v2-row"]["memory"][0].tables
        for step in seen["v3-row"]["memory"]:
            assert step.tables == pytest.approx(shard / 2, abs=64) and step.peak_tables == pytest.approx(
                1.5 * shard, abs=128
            )
    states = [seen["v1-adagrad"]["memory"][0].optimizer for seen in ranks]
    assert sum(states) == whole // checks.DIM, "row-wise: one float a row"
    assert ranks[0]["v1-row"]["memory"][0].optimizer == 0, "SGD has no state"
    assert world * max(seen["v1-auto"]["memory"][0].tables for seen in ranks) < 1.5 * whole, "balanced"


def test_evaluation_needs_no_backward(ranks):
    for seen in ranks:
        assert seen["eval"]["error"] <= 1e-6
        assert seen["eval"]["memory"].tables < 0.6 * 2 * seen["eval"]["whole"] / len(ranks)
        assert all(seen["stale"].values()), "a copy that was only read is never written back"


def test_gradients_are_averaged_over_ranks():
    """The worked case of the division: -0.3, not -0.6 (see gem/parallel/sparse.py on what a rank differentiates)."""
    rows = launch.spawn(2, checks.division, "gloo", timeout_s=60) if 2 not in _seen else [s["o39"] for s in _seen[2]]
    for table in rows:
        assert table[:, 0].tolist() == pytest.approx([-0.3, 0, -0.3, 0, -0.3, -0.3], abs=1e-7)


def test_bad_input_stops_before_any_collective(ranks):
    for rank, seen in enumerate(ranks):
        said = seen["refused"]
        world = len(ranks)
        assert "v4" in said["generation"]
        assert said["optimizer"] == "sparse: optimizer 'adam'; allowed: rowwise_adagrad, sgd"
        assert said["strategy"] == "sparse: strategy torchrec with v3 on cpu; allowed: v3 on cuda"
        assert said["scheme"] == "sparse: scheme 'column'; allowed: auto, row, table"
        assert said["copies"] == f"sparse: v1 with model_parallel {world // 2}; allowed: all {world} ranks (one copy)"
        assert f"a mesh of {2 * world} ranks in a process group of {world} ranks" in said["ranks"]
        assert "no tables" in said["tables"] and "itself a table collection" in said["root"]
        # an id equal to the table's size is looked up nowhere, in particular not in the next rank's rows
        bad = "table 't': id 10 at position 1 is out of range; allowed: 0..9"
        assert said["id"] == (bad if rank == 1 else "")
        assert "8 is not a multiple of 3 keys" in said["lengths"]


def test_placement():
    sizes = {"huge": 100, "b": 30, "c": 20, "d": 10}
    assert place(sizes, 2, "row") == dict.fromkeys(sizes, ROW)
    whole = place(sizes, 2, "table")
    assert whole["huge"] != whole["b"] == whole["c"] == whole["d"], "heaviest first, to the rank that has least"
    assert place(sizes, 2)["huge"] == ROW and place(sizes, 2)["b"] != place(sizes, 2)["c"]
    assert place(sizes, 2, means=frozenset({"d"}))["d"] != ROW, "a small mean stays whole beside a large sum"
    assert set(place(sizes, 2, means=frozenset({"huge"})).values()) == {ROW}
    assert set(place(sizes, 1).values()) == {0}
    uneven = Placement("t", 10, 4, ROW, 4)
    assert uneven.rows_by_rank() == {0: 3, 1: 3, 2: 3, 3: 1}
    assert uneven.ranks_of(np.arange(10)).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert Placement("t", 2, 4, ROW, 4).rows_by_rank() == {0: 1, 1: 1, 2: 0, 3: 0}
    assert Placement("t", 10, 4, 2, 4).ranks_of(np.arange(3)).tolist() == [2, 2, 2]


def test_the_benchmark_checks_and_counts():
    """Its check is small for every generation; tables that their shards draw are whole, alike on all ranks, and each id
    is looked up once."""
    if 2 not in _seen:
        _seen[2] = launch.spawn(2, checks.everything, "gloo", timeout_s=150)
    seen = [rank["bench"] for rank in _seen[2]]
    for rank in seen:
        assert all(error < 1e-4 for error in rank["errors"].values())
        for name, found in rank["drawn"].items():
            for table, value in found["tables"].items():
                assert value.isfinite().all() and value.std() > 0.001, (name, table)
                assert torch.equal(value, seen[0]["drawn"][name]["tables"][table]), (name, table)
    ids = {name: [rank["drawn"][name]["ids"] for rank in seen] for name in GENERATIONS}
    assert sum(ids["v1"]) == sum(ids["v2"]) and ids["v2"] == ids["v3"]
    memory = {name: [rank["drawn"][name]["memory"].tables for rank in seen] for name in GENERATIONS}
    assert sum(memory["v1"]) == memory["v2"][0] == memory["v2"][1] == 2 * memory["v3"][0]


@pytest.mark.parametrize("world", [1, 2], ids=["one_gpu", "two_gpus"])
def test_on_gpus(world):
    """On NCCL: V1 with SGD as one process, uneven batches included; all generations through gem.bench.sparse.check."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"NCCL needs {world} of {torch.cuda.device_count()} GPUs")
    seen = launch.spawn(world, checks.on_gpus, "nccl", timeout_s=150)
    for how, sizes in (("row", [5, 3][:world]), ("auto", [4] * world)):
        wanted, losses = checks.one_process(sizes, "sgd")
        for rank in seen:
            close(rank[how]["tables"], wanted, 1e-5)
            assert rank[how]["losses"] == pytest.approx(losses, rel=1e-5)
    for rank in seen:
        assert rank["errors"]["v1"] < 1e-4 and rank["errors"]["v2"] < 1e-4 and rank["errors"]["v3"] < 1e-4
        # TorchRec's own order is one step late where there are replicas, not wrong
        assert rank["errors"]["v3_torchrec"] < (1e-4 if world == 1 else 0.5)
