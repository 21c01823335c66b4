"""Ranks start, answer and end together; a rank that is lost is named, and nothing hangs."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from gem.parallel import launch


def ranks_meet(rank, offset):
    total = torch.tensor([float(rank.rank + offset)])
    dist.all_reduce(total)
    return rank.rank, rank.world_size, total


def second_raises(rank):
    if rank.rank == 1:
        raise ValueError("no such table")
    dist.barrier()  # the others wait for it and lose their peer


def second_is_killed(rank):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def second_leaves(rank):
    if rank.rank == 1:
        os._exit(7)
    dist.barrier()


def first_sleeps(rank):
    if rank.rank == 0:
        time.sleep(60)


@pytest.mark.timeout(120)
def test_results_come_in_rank_order():
    answers = launch.spawn(2, ranks_meet, arguments=(10,))
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    assert all(answer[2].item() == 21 for answer in answers)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (second_raises, "ValueError: no such table"),
        (second_is_killed, "was ended by SIGKILL"),
        (second_leaves, "left with exit code 7"),
    ],
)
def test_a_lost_rank_is_named_and_ends_the_job(fn, text):
    start = time.monotonic()
    with pytest.raises(launch.RankError, match=text) as error:
        launch.spawn(2, fn, timeout_s=60)
    assert error.value.rank == 1 and str(error.value).startswith("rank 1 of 2")
    assert time.monotonic() - start < 30  # long before any timeout


def test_a_rank_that_hangs_is_named():
    with pytest.raises(TimeoutError, match="rank 0 of 2 had not ended after 1 s"):
        launch.spawn(2, first_sleeps, timeout_s=1)


def test_bad_requests_are_one_line(monkeypatch):
    with pytest.raises(ValueError, match="allowed: at least 1"):
        launch.spawn(0, ranks_meet)
    with pytest.raises(ValueError, match="allowed: gloo, nccl"):
        launch.spawn(2, ranks_meet, "mpi")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        launch.start("gloo")
