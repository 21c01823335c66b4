"""Base-batch shuffling in the reader and the trainer: sub-batches of 128 stay whole, the heaviest goes with the
lightest, and what trains are the merged batches."""

import numpy as np
import pytest
import torch

from gem import train
from gem.balance import SUB_BATCH
from gem.dataset import Split
from gem.sampler import POOL_BATCHES, SUB_BATCHES, batch_rows
from tests.gem import tiny

BATCH = SUB_BATCH * SUB_BATCHES


@pytest.fixture(scope="module")
def lengths():
    return np.random.default_rng(1).lognormal(5, 1.0, 2 * POOL_BATCHES * BATCH).astype(np.int64)


def sub_batches(lengths, batch_size):
    """Per batch of bbs: numbers of its sub-batches in the order in which the reader emits them, [batches, 8]."""
    emitted = batch_rows(lengths, batch_size, 7, 2).reshape(-1)  # the shuffle that the reader delivers
    place = np.empty(len(lengths), np.int64)
    place[emitted] = np.arange(len(emitted))
    size = batch_size // SUB_BATCHES
    places = place[batch_rows(lengths, batch_size, 7, 2, "bbs")].reshape(-1, SUB_BATCHES, size)
    assert (np.diff(places, axis=-1) == 1).all() and (places[..., 0] % size == 0).all(), "a sub-batch was torn"
    return places[..., 0] // size, lengths[emitted].reshape(-1, size).sum(1)


def test_a_batch_of_1024_is_eight_whole_sub_batches_of_128(lengths):
    assert (BATCH, SUB_BATCH) == (1024, 128)
    numbers, loads = sub_batches(lengths, BATCH)
    assert sorted(numbers.reshape(-1)) == list(range(len(loads)))  # each trains once


def test_heaviest_and_lightest_of_a_pool_train_together(lengths):
    numbers, loads = sub_batches(lengths, BATCH)
    pools = numbers.reshape(-1, POOL_BATCHES, SUB_BATCHES)
    width = POOL_BATCHES * SUB_BATCHES
    for index, pool in enumerate(pools):
        assert set(pool.reshape(-1)) == set(range(index * width, (index + 1) * width))  # nothing leaves its pool
        order = np.argsort(-loads[index * width : (index + 1) * width], kind="stable") + index * width
        where = {number: batch for batch, members in enumerate(pool) for number in members}
        pairs = [(order[rank], order[-1 - rank]) for rank in range(width // 2)]
        assert all(where[heavy] == where[light] for heavy, light in pairs)
    assert loads[numbers].sum(1).std() < 0.5 * loads.reshape(-1, SUB_BATCHES).sum(1).std()


def test_the_trainer_trains_what_was_merged(tmp_path, monkeypatch):
    """Rows of every step of balance=bbs, caught where the batch is made, are the sampler's merged batches."""
    data = train.Data.open(tiny.dataset(tmp_path / "d", rows=96))
    seen = []
    made = Split.batch

    def caught(self, rows):
        if self is data.train:
            seen.append(np.array(rows))
        return made(self, rows)

    monkeypatch.setattr(Split, "batch", caught)
    for balance in ("bbs", "none"):
        seen.clear()
        config = tiny.config(16, balance=balance)
        train.train_seed(config, data, 3, tmp_path / balance, torch.device("cpu"), steps=6, quiet=True)
        wanted = batch_rows(data.train.sequence_lengths(), 16, 3, 0, balance)
        # other readers of the split (a preview of lengths, say) may come between, in no order of training
        training = [rows for rows in seen if len(rows) == 16]
        assert len(training) >= 6 and np.array_equal(training[-6:], wanted)
    plain, merged = (batch_rows(data.train.sequence_lengths(), 16, 3, 0, name) for name in ("none", "bbs"))
    assert not np.array_equal(plain, merged)


@pytest.mark.parametrize("batches", [11, 13, 17])
@pytest.mark.parametrize("balance", ["local", "bbs"])
def test_a_prime_number_of_batches_is_balanced_too(balance, batches):
    """Pools of eight batches and a smaller one for the rest: no row is lost, and the heaviest batch gets lighter."""
    lengths = np.random.default_rng(0).lognormal(4, 1.2, batches * 64).astype(np.int64) + 1
    plain = batch_rows(lengths, 64, 1, 0)
    dealt = batch_rows(lengths, 64, 1, 0, balance)
    assert sorted(dealt.ravel().tolist()) == sorted(plain.ravel().tolist())
    assert lengths[dealt].sum(1).max() < lengths[plain].sum(1).max()
