"""FLOPs and bytes: exact integers over real lengths."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import flops

lengths_lists = st.lists(st.integers(0, 30), min_size=0, max_size=6)


def test_useful_pairs_only():
    """O42: lengths [3, 0, 5, 100]; the padded and the packed count would be 4.0 and 1.16 times as many."""
    lengths = (3, 0, 5, 100)
    assert flops.attention_pairs(lengths) == 10_034
    for phase, count in (("fwd", 10_274_816), ("bwd", 20_549_632), ("bwd_kernel", 25_687_040), ("step", 30_824_448)):
        assert flops.jagged_attention(lengths, None, 4, 64, phase=phase) == count
        assert flops.gdpa(lengths, lengths, 4, 64, phase=phase) == count
    assert flops.jagged_attention([100] * 4, None, 4, 64) == 40_960_000
    assert flops.jagged_attention([108], None, 4, 64) == 11_943_936


def test_heads_and_rows_are_not_swapped():
    """O44."""
    assert flops.jagged_attention([500] * 3, None, 6, 48) == 864_000_000


def test_blocks():
    """O45: blocks restart in each sequence; both products are counted."""
    assert flops.block_pairs([70, 70]) == 8264
    assert flops.block_attention([70, 70], 1, 64) == 2_115_584
    assert flops.jagged_attention([70, 70], None, 1, 64) == 2_508_800


@given(lengths=lengths_lists, window=st.integers(0, 35), block=st.integers(1, 12))
def test_pairs_by_enumeration(lengths, window, block):
    near = sum(abs(i - j) <= window for n in lengths for i in range(n) for j in range(n))
    assert flops.attention_pairs(lengths, window=window) == near
    same = sum(i // block == j // block for n in lengths for i in range(n) for j in range(n))
    assert flops.block_pairs(lengths, block) == same


@given(data=st.data(), q_lengths=lengths_lists)
def test_cross_attention_by_enumeration(data, q_lengths):
    kv_lengths = data.draw(st.lists(st.integers(0, 30), min_size=len(q_lengths), max_size=len(q_lengths)))
    expected = sum(m * n for m, n in zip(q_lengths, kv_lengths, strict=True))
    assert flops.attention_pairs(q_lengths, kv_lengths) == expected
    assert flops.gdpa(torch.tensor(q_lengths), torch.tensor(kv_lengths), 3, 5) == 4 * 3 * 5 * expected


def test_bytes():
    """Lengths [2, 3], one head of 4 two-byte elements: 8 bytes a row, 4 bytes of statistics a row."""
    assert flops.attention_bytes([2, 3], None, 1, 4) == 4 * 5 * 8 + 5 * 4
    assert flops.attention_bytes([2, 3], None, 1, 4, phase="bwd") == 8 * 5 * 8 + 5 * 4
    assert flops.attention_bytes([2, 3], [1, 1], 1, 4, lse=False) == (2 * 5 + 2 * 2) * 8
    assert flops.attention_bytes([2, 3], [1, 1], 1, 4, lse=False, phase="bwd_kernel") == (3 * 5 + 4 * 2) * 8
    assert flops.attention_bytes([2, 2, 2], [1, 1, 1], 1, 4, lse=False, shared_q=True) == (2 + 6 + 2 * 3) * 8
    assert flops.attention_bytes([], [], 1, 4, shared_q=True, phase="step") == 0
    assert flops.block_attention_bytes([2, 3], 1, 4) == 4 * 40
    assert flops.block_attention_bytes([2, 3], 1, 4, phase="bwd") == 7 * 40


def test_offsets_without_values_give_an_estimate_and_say_so():
    with FakeTensorMode():
        q, offsets = torch.empty(100, 2, 8), torch.empty(4, dtype=torch.int64)
        with pytest.warns(UserWarning, match="an estimate, not a count"):
            hinted = flops.lengths_of_call(q, offsets, offsets, 30, 20)
            mean = flops.lengths_of_call(q, offsets, offsets)
        assert (hinted, mean) == (([30] * 3, [20] * 3), ([34] * 3, [34] * 3))
        assert flops.attention_pairs(*hinted) == 3 * 30 * 20 and flops.block_pairs(mean[0], 32) == 3 * (32**2 + 2**2)


def test_a_counter_over_fake_tensors_gets_a_number():
    """torch.compile's partitioner asks so for the cost of an op under a memory budget."""
    from torch.utils.flop_counter import FlopCounterMode

    from kernels import jagged_attention

    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q, offsets = torch.empty(100, 2, 8), torch.empty(5, dtype=torch.int64)
        with FlopCounterMode(display=False) as counter:
            jagged_attention(q, q, q, offsets)
    assert counter.get_total_flops() == 4 * 2 * 8 * 4 * 25**2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: flops.jagged_attention([3], None, 1, 1, phase="back"), "phase: 'back'; allowed: fwd, bwd"),
        (lambda: flops.jagged_attention([3], [3, 4], 1, 1), "kv_lengths: 2 sequences; allowed: 1"),
        (lambda: flops.jagged_attention([3], [4], 1, 1, window=2), "allowed: self-attention only"),
        (lambda: flops.gdpa([-3], None, 1, 1), r"q_lengths: .*allowed: \(B,\), all >= 0"),
        (lambda: flops.block_attention([3], 1, 1, block_size=0), "block_size: 0; allowed: >= 1"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
