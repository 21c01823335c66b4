"""Dense parallelism on real process groups (gloo): every mesh follows the curve of one process, to summation order.

One spawn a world size runs all checks inside (tests/parallel/dense_checks.py); the tests here look at what it saw.
"""

import shutil

import pytest
import torch

from gem.parallel import checkpoint, dense, launch, low_gather, train
from gem.parallel.experts import ExpertParallel
from gem.parallel.mesh import Mesh
from tests.gem import tiny
from tests.parallel import dense_checks as checks

EXACT_2 = ("fsdp", "replica", "expert", "all_to_all", "uneven", "no_rows", "checkpointed", "together")
EXACT_4 = ("fsdp", "2d", "expert", "2d_expert", "four_experts", "no_rows", "together")
TIMEOUT_S = 150.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("dense") / "data", rows=68)  # eight batches of 8, and four rows more


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("dense_out")


@pytest.fixture(scope="module")
def wanted(folder):
    return checks.reference(folder), checks.reference(folder, checks.config(checks.FOUR_EXPERTS))


@pytest.fixture(scope="module")
def two(folder, out, wanted):
    return launch.spawn(2, checks.small_world, arguments=(folder, out, *wanted), timeout_s=TIMEOUT_S)


def checkpoints(out, name: str):
    """A folder with copies of what two ranks saved, for others to go on from."""
    for saved, copy in (("run", "run"), ("run", "again"), ("sharded", "sharded")):
        shutil.copytree(out / saved, out / name / copy)
    return out / name


@pytest.fixture(scope="module")
def four(folder, out, wanted, two):
    """After `two`, from whose last but one checkpoint it goes on."""
    copy = checkpoints(out, "four")
    return launch.spawn(4, checks.larger_world, arguments=(folder, copy, *wanted), timeout_s=TIMEOUT_S)


def is_exact(found: dict) -> None:
    """To summation order: float32 sums of a few thousand terms, and Adam's division where a gradient is all noise (the
    bias of keys has none in exact arithmetic)."""
    assert found["loss"][0] < 1e-6, found["loss"]
    assert found["norm"][0] < 2e-6, found["norm"]
    assert found["grads"][0] < 2e-5, found["grads"]
    assert found["params"][0] < 1e-3, found["params"]


@pytest.mark.parametrize("name", EXACT_2)
def test_two_ranks_follow_one_process(two, name):
    for found in two:
        is_exact(found[name])
    assert two[0][name]["scores"] == two[1][name]["scores"]
    assert two[0][name]["scores"]["ne_ctr"] == pytest.approx(two[0]["fsdp"]["scores"]["ne_ctr"], rel=1e-6)


@pytest.mark.parametrize("name", EXACT_4)
def test_four_ranks_follow_one_process(four, name):
    for found in four:
        is_exact(found[name])
    if name != "four_experts":
        assert four[0][name]["scores"]["ne_ctr"] == pytest.approx(four[0]["fsdp"]["scores"]["ne_ctr"], rel=1e-6)


def test_all_five_dimensions_at_once(four):
    """Shards, replicas, experts, and tables in groups with copies, whole (V2) or split (V3). Forward and gradients are
    those of one process; a copy's Adagrad sees its own group's gradients, so that its steps are near, not equal, and
    those of V2 and V3 the same."""
    for found in four:
        for generation, result in found["five"].items():
            assert result["grads"][0] < 2e-5 and result["loss"][0] < 2e-3, generation
        assert found["five"]["v2"]["loss"] == found["five"]["v3"]["loss"]
        assert found["five"]["v2"]["scores"] == pytest.approx(found["five"]["v3"]["scores"], rel=1e-6)


@pytest.mark.slow
def test_eight_ranks_follow_one_process(folder, out, wanted, two):
    copy = checkpoints(out, "eight")
    world = launch.spawn(8, checks.larger_world, arguments=(folder, copy, *wanted), timeout_s=2 * TIMEOUT_S)
    for found in world:
        for name in EXACT_4:
            is_exact(found[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_layers_follow_one_process(folder, wanted):
    for found in launch.spawn(2, checks.compiled, arguments=(folder, wanted[0]), timeout_s=600):
        is_exact(found["fsdp"])
        is_exact(found["expert"])


def whole_bytes(wanted: dict) -> tuple[int, int]:
    """(experts, the other dense parameters) of one process in bytes, padding of shards aside."""
    sizes = {name: value.nbytes for name, value in wanted["params"].items() if ".tables." not in name}
    experts = sum(size for name, size in sizes.items() if ".experts.experts." in name)
    return experts, sum(sizes.values()) - experts


def test_experts_exist_on_their_ranks_only(two, four, wanted):
    experts, rest = whole_bytes(wanted[0])
    each = experts / 2
    tables = sum(value.nbytes for name, value in wanted[0]["params"].items() if ".tables." in name)
    for rank, found in enumerate(two):
        assert found["expert"]["local_experts"] == [rank] * 8  # eight parameters an expert
        assert found["expert"]["held"]["experts"] == each
        assert found["replica"]["held"] == {"experts": experts, "dense": rest, "tables": tables}
    for rank, found in enumerate(four):
        assert found["expert"]["local_experts"] == [rank % 2] * 8
        assert found["four_experts"]["local_experts"] == [rank] * 8
    # over all ranks every shard exists once a replica
    for name, replicas in (("fsdp", 1), ("expert", 1), ("2d", 2), ("2d_expert", 2)):
        assert sum(found[name]["held"]["experts"] for found in four) == replicas * experts
        assert sum(found[name]["held"]["dense"] for found in four) == replicas * rest


SOURCE = [
    ("all_gather", "parameters"),
    ("all_gather", "activations"),
    ("reduce_scatter", "outputs"),
    ("all_gather", "parameters"),
    ("all_gather", "output gradients"),
    ("reduce_scatter", "input gradients"),
    ("reduce_scatter", "gradients"),
]


def test_a_profile_shows_the_source_s_sequence(four):
    """The source: forward gathers the expert's parameters, gathers activations, reduce-scatters outputs; backward
    gathers parameters and output gradients, reduce-scatters input gradients, then parameter gradients. 2 x 2 ranks."""
    for found in four:
        unit = "layers.1.interaction.experts.experts"
        of_experts = [item for item in found["flow"] if item.unit == unit or (item.what and not item.unit)]
        start = next(index for index, item in enumerate(of_experts) if item.unit == unit)
        # layer 0 does the same before and, backward, after it
        assert [(item.kind, item.what) for item in of_experts[start : start + 7]] == SOURCE
        assert {item.ranks for item in of_experts[start : start + 7]} == {2}


def test_replicas_reduce_a_shard_alone(four):
    flow = four[0]["flow_2d"]
    for kind, what in (("reduce_scatter", "gradients"), ("all_reduce", "gradient shards")):
        assert {item.unit for item in flow if (item.kind, item.what) == (kind, what)} == {
            "root", "features", "layers.0", "layers.1", "heads",
        }  # fmt: skip
    order = [(item.kind, item.unit) for item in flow if item.what in ("gradients", "gradient shards")]
    for place, (kind, unit) in enumerate(order):
        if kind == "reduce_scatter":
            assert order[place + 1] == ("all_reduce", unit)
    assert {item.ranks for item in flow if item.kind == "reduce_scatter"} == {2}  # the shard group, not the world


@pytest.mark.parametrize("what", ["values", "gradient", "asked", "lengths"])
def test_rows_may_differ_between_ranks(two, what):
    assert all(found["jagged"][what] for found in two)


def test_rows_that_disagree_are_refused(two):
    assert "5 rows here, the group expects 6" in two[0]["jagged"]["refused"]


def test_low_gathers_send_fewer_bytes(two):
    """64 x 96 weights in float32 over two ranks; a rank sends 32 rows. Elements are bytes where payloads are uint8."""
    found = two[0]["low"]
    assert found["plain"]["elements"] == 32 * 96 and found["plain"]["changed"] == []
    assert found["float8"]["elements"] == 32 * (96 + 4)
    assert found["mx"]["elements"] == 32 * (96 + 3)
    assert found["float8"]["changed"] == found["mx"]["changed"] == ["0.weight"]


def test_low_gathers_keep_the_error_of_their_format(two):
    for rank in two:
        plain, float8, mx = (rank["low"][name]["errors"] for name in dense.GATHERS)
        assert plain == [0, 0, 0]
        assert max(mx) < 0.04 and max(float8) < 0.04  # three bits of mantissa
        # elements that share a scale with the outlier, and elements that do not
        assert rank["low"]["float8"]["beside"] > 2 * rank["low"]["mx"]["beside"]
    assert all(rank["low"][name]["grad"] < 1e-5 for rank in two for name in dense.GATHERS)


@pytest.mark.parametrize("name", ["float8", "mx"])
def test_training_with_low_gathers_stays_near(two, name):
    found = two[0][name]
    assert 1e-7 < found["loss"][0] < 2e-3 and found["norm"][0] < 0.1
    assert any(kept is None for _, kept in found["changes"])
    assert found["fresh"] and all(found["fresh"]), "what the next gather sends is what the optimiser has written"
    assert any(kept and "fewer than 32" in kept for _, kept in found["changes"])


def test_another_mesh_goes_on_from_a_checkpoint(two, four, out):
    """Six steps on two ranks, saved after two and four; four ranks of another mesh go on from the fourth."""
    run = checkpoint.read_run(checkpoint.last(out / "run" / "checkpoints"), {"variant": "tiny"})
    assert run["step"] == 4 and "expert 2" in run["mesh"]
    for rank in range(4):
        assert four[rank]["resumed"]["loss"] == pytest.approx(two[0]["run"]["loss"], rel=2e-6)
        assert four[rank]["resumed"]["ne_ctr"] == pytest.approx(two[0]["run"]["ne_ctr"], rel=1e-5)
    assert four[0]["resumed"]["ranks"] == 4
    assert two[0]["run_sharded"]["loss"] == pytest.approx(two[0]["run"]["loss"], rel=2e-6)
    for name in ("resumed_sharded", "resumed_replicated"):
        assert four[0][name]["loss"] == pytest.approx(two[0]["run"]["loss"], rel=2e-6)
    assert four[0]["resumed_sharded"]["tables"] == "v1" and four[0]["resumed_replicated"]["tables"] == "replicated"
    with pytest.raises(ValueError, match="seed is 0, this run has 1"):
        checkpoint.read_run(checkpoint.last(out / "run" / "checkpoints"), {"seed": 1})


def test_a_checkpoint_renews_what_gathers_send(two):
    for found in two:
        assert any(found["restored"]["changed"]) and all(found["restored"]["fresh"])


def test_a_short_last_batch_ends_on_every_rank(two, out):
    """68 rows in batches of 8 are eight steps and one of four rows."""
    assert two[0]["last"] == two[1]["last"] or two[0]["last"]["loss"] == two[1]["last"]["loss"]
    lines = (out / "last" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 9


def test_a_bad_loss_stops_all_ranks_and_names_its_own(two):
    for found in two:
        assert "step 7: loss nan" in found["diverged"] and "bad loss on rank 1" in found["diverged"]
        assert found["diverged"].endswith("parameters kept")


def test_what_cannot_be_sharded_is_refused_on_every_rank(two):
    for found in two:
        parts = (
            "divisor of 3",
            "checkpointing region",
            "a mesh of 4 ranks in a process group of 2",
            "float32, bfloat16",
        )
        assert len(found["refused"]) == len(parts)
        for text, part in zip(found["refused"], parts, strict=True):
            assert part in text and text.startswith("dense: ") and "allowed" in text and "\n" not in text


def test_bad_requests_are_one_line():
    for options in ({"prefetch": -1}, {"gather": "int4"}, {"combine": "sum"}, {"tables": "hashed"}):
        with pytest.raises(ValueError, match=r"^dense: .*; allowed: "):
            dense.Options(**options)
    with pytest.raises(ValueError, match="in a process group of no ranks"):
        dense.shard(None, Mesh(2, 2), torch.device("cpu"))
    with pytest.raises(ValueError, match="allowed: float8, mx"):
        low_gather.wrap(torch.nn.Linear(32, 32), "int4", 2)
    with pytest.raises(ValueError, match="allowed: reduce_scatter, all_to_all"):
        ExpertParallel(torch.nn.ModuleList(), None, "sum")


def test_rows_are_dealt_evenly_and_steps_agreed():
    assert [len(part) for part in train.deal(torch.arange(5).numpy(), 3)] == [2, 2, 1]
    assert train.sizes_of(train.deal(torch.arange(1).numpy(), 3)) == [1, 1, 1]
