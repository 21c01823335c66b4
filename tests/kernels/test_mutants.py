"""Code breaks of jagged attention, its conventions and its counts, each with the check that catches it."""

from __future__ import annotations

import contextlib

import pytest
import torch

from kernels import flops, jagged, jagged_attention, schedule, validation
from kernels.jfa import bias, eager, function, padded
from kernels.testing import make_inputs

from . import jfa_checks as checks
from .mutants import Mutant, mutant_test


def pairs_of_the_toy() -> None:
    """O42 and the window's closed form."""
    assert flops.jagged_attention((3, 0, 5, 100), None, 4, 64) == 10_274_816
    assert flops.attention_pairs((5, 9), window=2) == 19 + 39


def decreasing_offsets_are_refused() -> None:
    """O08."""
    q = torch.randn(16, 2, 8)
    with pytest.raises(ValueError, match="q_offsets"):
        jagged_attention(q, q, q, torch.tensor([0, 8, 8, 16]) + torch.tensor([0, 4, 0, 0]))


def positions_restart() -> None:
    """Positions count from each sequence's own start."""
    assert jagged.positions(torch.tensor([0, 2, 5]), 5).tolist() == [0, 1, 0, 1, 2]


def zigzag_is_even() -> None:
    """Work 4, 3, 2, 1 on two programs: 4 + 1 and 3 + 2."""
    made = schedule.tile_schedule(torch.full((4,), 64), torch.tensor([256, 192, 128, 64]), 64, 64, 2, "zigzag")
    assert made.work.tolist() == [5, 5]


def bias_and_window() -> None:
    checks.bias_has_its_gradient("eager")


def eager_matches() -> None:
    checks.against_reference("eager", make_inputs("jagged_attention", (3, 0, 5, 100)))


def _without_mask(groups):
    return lambda *arguments: (group._replace(hidden=None) for group in groups(*arguments))


def _neighbours_length(spans):
    def wrong(offsets):
        starts, lengths = spans(offsets)
        return starts, lengths.roll(1)

    return wrong


def _scale_is_lost(scores):
    return lambda group, q, k, scale, *rest: scores(group, q, k, 1.0, *rest)


def _rounded_operands(product):
    """What TF32 does: ten bits of mantissa."""

    def cut(x: torch.Tensor) -> torch.Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    return lambda a, b, dtype: product(cut(a.contiguous()), cut(b.contiguous()), dtype)


def _unwritten(empty_table):
    return lambda rows, x, dtype: x.new_empty(rows * x.shape[1] + 1, x.shape[2], dtype=dtype)


def _neighbour_for_missing(table):
    def wrong(x, dtype):
        rows = table(x, dtype)
        if len(rows) > 1:
            rows[-1] = rows[len(rows) // 2]
        return rows

    return wrong


def _size_of_longest(length_class):
    return lambda lengths: length_class(lengths).max().expand_as(lengths) if len(lengths) else lengths


def _reinterpreted(host_offsets):
    def wrong(offsets):
        offsets = host_offsets(offsets)
        return offsets.contiguous().view(torch.int32)[: len(offsets)] if offsets.dtype == torch.int64 else offsets

    return wrong


def _unmasked(batch):
    class Unmasked(batch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.mask = torch.zeros_like(self.mask)

    return Unmasked


_EAGER, _PADDED = {"impl": "eager"}, {"impl": "padded"}
MUTANTS = [
    Mutant("drop_the_tail_mask", eager, "_groups", _without_mask, checks.empty_sequence_in_the_middle, _EAGER, True),
    Mutant("neighbours_length", eager, "_spans", _neighbours_length, checks.own_keys_only, _EAGER, True),
    Mutant(
        "window_on_one_side",
        eager,
        "_outside",
        lambda i, j, window: (i[:, None] - j) > window,
        checks.window_is_symmetric,
        _EAGER,
    ),
    Mutant(
        "window_one_too_wide",
        eager,
        "_outside",
        lambda i, j, window: (i[:, None] - j).abs() > window + 1,
        checks.window_is_symmetric,
        _EAGER,
    ),
    Mutant("scale_is_lost", eager, "_scores", _scale_is_lost, eager_matches, wraps=True),
    Mutant("operands_in_tf32", eager, "_product", _rounded_operands, checks.strict_products, _EAGER, True),
    Mutant("output_rows_unwritten", eager, "empty_table", _unwritten, checks.queries_without_keys, _EAGER, True),
    Mutant(
        "zero_times_neighbour",
        eager,
        "table",
        _neighbour_for_missing,
        checks.neighbours_do_not_matter,
        _EAGER,
        True,
    ),
    Mutant(
        "tile_by_the_longest", eager, "length_class", _size_of_longest, checks.any_company_does_not_matter, _EAGER, True
    ),
    Mutant("int64_offsets_as_int32", eager, "host_offsets", _reinterpreted, checks.offsets_of_any_kind, _EAGER, True),
    Mutant("bias_table_without_gradient", eager, "_add_to_table", lambda *_: None, bias_and_window),
    Mutant(
        "bias_bucket_mirrored",
        bias.Bias,
        "relative_bucket",
        lambda old: lambda self, i, j: self.buckets - 1 - old(self, i, j),
        lambda: checks.bias_by_hand("eager"),
        wraps=True,
    ),
    Mutant("padded_without_a_mask", padded, "_Batch", _unmasked, checks.empty_sequence_in_the_middle, _PADDED, True),
    Mutant(
        "pairs_of_the_maximum",
        flops,
        "attention_pairs",
        lambda q, kv=None, *, window=None: len(q) * max(q) ** 2,
        pairs_of_the_toy,
    ),
    Mutant(
        "pairs_of_the_packed_sum",
        flops,
        "attention_pairs",
        lambda q, kv=None, *, window=None: sum(q) ** 2,
        pairs_of_the_toy,
    ),
    Mutant("one_gemm_counted", flops, "GEMMS", {"fwd": 1, "bwd": 2, "bwd_kernel": 2.5, "step": 3}, pairs_of_the_toy),
    Mutant(
        "offsets_unchecked",
        validation,
        "check_offsets",
        lambda *_, **__: None,
        decreasing_offsets_are_refused,
        raises=(pytest.fail.Exception, RuntimeError, IndexError),
    ),
    Mutant("stream_positions", jagged, "positions", lambda offsets, total: torch.arange(total), positions_restart),
    Mutant("zigzag_without_its_turn", schedule.torch, "where", lambda condition, a, b: a, zigzag_is_even),
    Mutant("tf32_allowed", eager, "strict_float32", contextlib.nullcontext, checks.precision_is_strict, _EAGER),
]

test_mutant = mutant_test(MUTANTS)


def test_the_framework_reports_a_survivor(monkeypatch):
    """A break that changes nothing must not count as killed."""
    harmless = Mutant("harmless", function, "unit_last_stride", lambda old: old, eager_matches, wraps=True)
    with pytest.raises(AssertionError, match="mutant 'harmless' survives eager_matches"):
        harmless.kill(monkeypatch)
