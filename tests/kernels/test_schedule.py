"""Tile schedules: every tile once, whatever the order; what zigzag buys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.jagged import sample_lengths
from kernels.schedule import ORDERS, flatten, restore, skew, tile_schedule

pairs = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=0, max_size=8)


def _lengths(pairs) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([q for q, _ in pairs], dtype=torch.int64), torch.tensor(
        [k for _, k in pairs], dtype=torch.int64
    )


@given(pairs=pairs, block_m=st.integers(1, 40), block_n=st.integers(1, 40), programs=st.integers(1, 9))
def test_every_order_deals_every_tile_once(pairs, block_m, block_n, programs):
    q, kv = _lengths(pairs)
    expected = sorted([b, t] for b, n in enumerate(q.tolist()) for t in range(-(-n // block_m)))
    for order in ORDERS:
        made = tile_schedule(q, kv, block_m, block_n, programs, order)
        assert sorted(made.tiles.tolist()) == expected, order
        assert made.tiles.dtype == made.program_offsets.dtype == torch.int32 and made.num_programs == programs
        starts = made.program_offsets.tolist()
        assert starts[0] == 0 and starts[-1] == len(expected) and starts == sorted(starts)
        for p in range(programs):
            own = made.tiles[starts[p] : starts[p + 1], 0].tolist()
            assert made.work[p].item() == sum(-(-int(kv[b]) // block_n) for b in own), order


@given(pairs=pairs, programs=st.integers(1, 9))
def test_zigzag_is_within_one_tile_of_even(pairs, programs):
    q, kv = _lengths(pairs)
    made = tile_schedule(q, kv, 16, 16, programs, "zigzag")
    heaviest = int((-(kv[q > 0] // -16)).max()) if bool((q > 0).any()) else 0
    assert int(made.work.max() - made.work.min()) <= heaviest
    counts = made.program_offsets.diff()
    assert int(counts.max() - counts.min()) <= 1


def test_programs_by_hand():
    """Three sequences of 2, 0 and 1 tiles on two programs."""
    q, kv = torch.tensor([2, 0, 1]), torch.tensor([1, 9, 3])
    grid = tile_schedule(q, kv, 1, 1, 2, "grid")  # slots (0,0) (0,1) | (1,-) (1,-) | (2,0) (2,-)
    assert grid.tiles.tolist() == [[0, 0], [2, 0], [0, 1]] and grid.work.tolist() == [4, 1]
    valid = tile_schedule(q, kv, 1, 1, 2, "valid")
    assert valid.tiles.tolist() == [[0, 0], [2, 0], [0, 1]] and valid.work.tolist() == [4, 1]
    zigzag = tile_schedule(q, kv, 1, 1, 2, "zigzag")  # by work: (2,0) (0,0) | (0,1)
    assert zigzag.tiles.tolist() == [[2, 0], [0, 0], [0, 1]] and zigzag.work.tolist() == [3, 2]


def test_zigzag_removes_the_skew_of_ragged_lengths():
    generator = torch.Generator().manual_seed(0)
    q = sample_lengths("longtail", 1152, 1024, None, generator)
    kv = sample_lengths("longtail", 1152, 1024, None, generator)
    grid, valid, zigzag = (skew(tile_schedule(q, kv, 128, 128, 132, order).work).max_over_mean for order in ORDERS)
    assert grid > 1.25 and valid > 1.1 and zigzag < 1.05


def test_skew():
    assert skew(torch.tensor([6, 1, 2, 3])) == (2.0, 6.0)
    assert skew(torch.tensor([5, 0])) == (2.0, float("inf"))
    assert skew(torch.tensor([0, 0])) == (1.0, 1.0) and skew(torch.tensor([], dtype=torch.int64)) == (1.0, 1.0)


def test_a_schedule_passes_through_an_op():
    made = tile_schedule(torch.tensor([70, 3]), torch.tensor([70, 3]), 64, 32, 2)
    back = restore(*flatten(made.to("cpu")))
    assert torch.equal(back.tiles, made.tiles) and torch.equal(back.program_offsets, made.program_offsets)
    assert (back.block_m, back.block_n, back.num_programs) == (64, 32, 2)
    assert restore(*flatten(None)) is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"order": "random"}, "order: 'random'; allowed: grid, valid, zigzag"),
        ({"block_m": 0}, "block_m: 0; allowed: >= 1"),
        ({"num_programs": 0}, "num_programs: 0; allowed: >= 1"),
        ({"kv_lengths": torch.tensor([1])}, r"shapes \(2,\), \(1,\); allowed: \(B,\) both"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    lengths = torch.tensor([3, 4])
    arguments = {"q_lengths": lengths, "kv_lengths": lengths, "block_m": 4, "block_n": 4, "num_programs": 2, **changes}
    with pytest.raises(ValueError, match=message):
        tile_schedule(**arguments)
