"""Batches made beside the step: by a process, by a thread, in one piece and taken apart."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gem import prefetch as module
from gem.dataset import Batch, Split
from gem.prefetch import from_process, from_thread, pack, prefetch, unpack
from tests.gem import tiny

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    return Split(tiny.dataset(tmp_path_factory.mktemp("data") / "d", rows=64), "train")


def batches(split: Split, count: int = 6):
    return (split.batch(np.arange(5 * i, 5 * i + 3 + i)) for i in range(count))


def assert_same(got: Batch, wanted: Batch) -> None:
    for name in ("sparse", "sequence"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert ours.keys() == theirs.keys() and ours.length_per_key() == theirs.length_per_key()
        assert torch.equal(ours.values(), theirs.values()) and torch.equal(ours.lengths(), theirs.lengths())
        assert ours.values().dtype == theirs.values().dtype
    assert torch.equal(got.dense, wanted.dense) and got.longest == wanted.longest
    for name in ("offsets", "ages", "lengths", "labels", "weights", "bayes"):
        ours, theirs = getattr(got, name), getattr(wanted, name)
        assert list(ours) == list(theirs)
        for key, item in theirs.items():
            assert torch.equal(ours[key], item) and ours[key].dtype == item.dtype, (name, key)


def test_a_parcel_holds_the_whole_batch(split):
    wanted = split.batch(np.arange(7))
    parcel = pack(wanted)
    got = unpack(parcel)
    assert_same(got, wanted)
    assert all(first % module.ALIGN == 0 for *_, first, _ in parcel.parts)
    parcel.data.zero_()  # what is kept for long must not hold the buffer
    assert all(torch.equal(got.lengths[name], item) for name, item in wanted.lengths.items())
    assert got.dense.eq(0).all(), "the rest are views of the buffer"


@pytest.mark.parametrize("way", [from_process, from_thread])
def test_batches_come_in_order_and_unchanged(split, way):
    got = list(way(batches(split), CPU, 2))
    assert len(got) == 6
    for ours, wanted in zip(got, batches(split), strict=True):
        assert_same(ours, wanted)


@pytest.mark.parametrize("way", [from_process, from_thread])
def test_what_fails_while_a_batch_is_made_is_raised_where_it_was_wanted(split, way):
    def broken():
        yield split.batch(np.arange(3))
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        list(way(broken(), CPU, 2))


def test_the_process_ends_with_its_reader(split):
    def endless():
        while True:
            yield split.batch(np.arange(3))

    before = set(multiprocessing.active_children())
    reader = from_process(endless(), CPU, 2)
    next(reader)
    (worker,) = set(multiprocessing.active_children()) - before
    reader.close()
    worker.join(20)
    assert not worker.is_alive()


def test_the_thread_ends_with_its_reader():
    class Fake:
        def __init__(self, size):
            self.size = size

        def to(self, device):
            assert device == META
            return self

    assert [item.size for item in prefetch(map(Fake, range(7)), META)] == list(range(7))
    half = prefetch(map(Fake, range(1000)), META)
    next(half)
    half.close()


def test_too_little_shared_memory_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(module, "_SAID", set())
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    assert not module._has_room() and not module._has_room()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "64 MiB" in said and "--shm-size" in said


def test_a_cpu_makes_them_in_turn(split):
    made = []

    def counted():
        for batch in batches(split):
            made.append(batch)
            yield batch

    reader = prefetch(counted(), CPU)
    assert next(reader) is made[0] and len(made) == 1
