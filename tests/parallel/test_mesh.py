"""Axes of a job: groups tile the ranks, and what does not fit is refused in one line."""

import pytest

from gem.parallel import mesh
from gem.parallel.mesh import Mesh

GROUPS = ("shard", "expert_shard", "replica", "expert", "model_parallel", "table_replica")


def test_the_source_s_example_of_16_by_2():
    plan = Mesh(32, shard=32, expert=2)
    assert plan.group("expert").ranks(5) == [4, 5]
    assert plan.group("expert_shard").size == 16
    assert plan.group("expert_shard").ranks(5) == list(range(1, 32, 2))


def test_replicas_of_a_table_shard_are_neighbours():
    plan = Mesh(64, shard=64, model_parallel=16)
    assert plan.group("table_replica").ranks(6) == [4, 5, 6, 7]
    assert plan.group("model_parallel").ranks(6) == list(range(2, 64, 4))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("plan", [Mesh(24, 8, 3, 2, 6), Mesh(16, 16), Mesh(1, 1), Mesh(64, 16, 4, 4, 32)])
def test_groups_tile_the_job(plan, name):
    group = plan.group(name)
    groups = {tuple(group.ranks(rank)) for rank in range(plan.gpus)}
    assert sorted(rank for members in groups for rank in members) == list(range(plan.gpus))
    assert all(rank in group.ranks(rank) and len(group.ranks(rank)) == group.size for rank in range(plan.gpus))


def test_an_axis_meets_another_in_one_rank():
    """Shard and replica groups cross in exactly one rank, as do those of one expert's shards and experts."""
    plan = Mesh(64, 16, 4, 4)
    for one, other in (("shard", "replica"), ("expert", "expert_shard")):
        for rank in range(64):
            assert set(plan.group(one).ranks(rank)) & set(plan.group(other).ranks(rank)) == {rank}


def test_plans_are_read_and_filled_up():
    assert mesh.parse("fsdp=128,ddp=32,ep=2", 4096) == Mesh(4096, 128, 32, 2)
    assert mesh.parse("shard=128,mp=512", 4096) == Mesh(4096, 128, 32, 1, 512)
    assert mesh.parse("ddp=4", 32) == Mesh(32, 8, 4)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fsdp=100", "divisor of 4096"),
        ("fsdp=128,ddp=16", "2048"),
        ("tp=2", "allowed: axis=size"),
        ("fsdp=two", "whole number"),
        ("fsdp=0", "at least 1"),
        ("fsdp=128,shard=128", "twice"),
        ("fsdp=128,ep=3", "divisor of shard"),
        ("fsdp=128,mp=100", "divisor of 4096"),
        ("ddp=3", "divisor of 4096"),
        ("", "allowed: axis=size"),
    ],
)
def test_impossible_plans_are_one_line(text, part):
    with pytest.raises(ValueError, match=r"^(plan|mesh): ") as error:
        mesh.parse(text, 4096)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_sizes_are_whole_numbers():
    for sizes in ((0, 1), (8, 8.0), (8, True)):
        with pytest.raises(ValueError, match="whole number"):
            Mesh(*sizes)
    with pytest.raises(ValueError, match="unknown"):
        Mesh(8, 8).group("tensor")
