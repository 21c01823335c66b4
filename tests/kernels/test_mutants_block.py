"""Code breaks of block attention and rotary, each with the check that catches it."""

from __future__ import annotations

import torch
from torch.autograd.gradcheck import GradcheckError

from kernels import flops
from kernels.block_attention import eager, reference
from kernels.rotary import reference as rotary
from kernels.testing import LENGTH_PATTERNS

from . import test_block_attention as checks
from . import test_rotary
from .mutants import Mutant, mutant_test

SKEWED = next(pattern for pattern in LENGTH_PATTERNS if pattern.name == "skewed")
EXACT = {"pattern": SKEWED, "dtype": torch.float32, "turned": False}
BORDERS = {"lengths": (70, 70)}
INSIDE = {"impl": "eager", "interleaved": True, "on": ("q", "k", "v")}


def anchored_on_the_stream(old):
    return lambda offsets, block_size: old(torch.stack([offsets[0], offsets[-1]]), block_size)


def not_on_v(old):
    return lambda x, name, tables: old(x, name, None if name == "v" else tables)


def other_pairing(old):
    return lambda x, cos, sin, interleaved: old(x, cos, sin, not interleaved)


def tables_in_bfloat16(old):
    def turn(x, cos, sin, interleaved):
        return old(x, cos.bfloat16().float(), sin.bfloat16().float(), interleaved)

    return turn


def every_key_is_real(old):
    return lambda index, q: torch.ones_like(old(index, q))


def without_scale(old):
    return lambda q, k, scale, valid: old(q, k, 1.0, valid)


MUTANTS = [
    Mutant(
        "blocks_anchored_on_the_stream",
        eager,
        "blocks",
        anchored_on_the_stream,
        checks.test_o16_blocks_restart_with_each_sequence,
        {"impl": "eager", **BORDERS},
        wraps=True,
    ),
    Mutant(
        "blocks_anchored_on_the_stream_in_the_reference",
        reference,
        "_blocks",
        anchored_on_the_stream,
        checks.test_o16_blocks_restart_with_each_sequence,
        {"impl": "reference", **BORDERS},
        wraps=True,
    ),
    Mutant(
        "no_blocks",
        reference,
        "_blocks",
        lambda old: lambda offsets, block_size: old(offsets, 1 << 30),
        checks.test_o16_blocks_restart_with_each_sequence,
        {"impl": "reference", **BORDERS},
        wraps=True,
    ),
    Mutant(
        "partial_block_without_a_mask",
        eager,
        "_real_keys",
        every_key_is_real,
        checks.test_eager_is_as_exact_as_the_reference,
        EXACT,
        wraps=True,
    ),
    Mutant(
        "scale_is_lost",
        eager,
        "_weights",
        without_scale,
        checks.test_eager_is_as_exact_as_the_reference,
        EXACT,
        wraps=True,
    ),
    Mutant(
        "row_sums_left_out_of_backward",
        torch,
        "_softmax_backward_data",
        lambda d_weights, weights, dim, dtype: d_weights * weights,
        checks.test_gradcheck,
        {"impl": "eager", "interleaved": None},
        raises=(GradcheckError,),
    ),
    Mutant(
        "rotary_not_on_v",
        eager,
        "turn",
        not_on_v,
        checks.test_rotary_inside_equals_rotary_outside,
        INSIDE,
        wraps=True,
    ),
    Mutant(
        "gradients_turned_forward",
        eager,
        "turn_back",
        reference.turn,
        checks.test_rotary_inside_equals_rotary_outside,
        INSIDE,
    ),
    Mutant(
        "gradients_left_in_the_turned_frame",
        eager,
        "turn_back",
        lambda x, name, tables: x,
        checks.test_rotary_inside_equals_rotary_outside,
        INSIDE,
    ),
    Mutant(
        "other_pairing_inside",
        reference,
        "rotate",
        other_pairing,
        checks.test_rotary_inside_equals_rotary_outside,
        INSIDE,
        wraps=True,
    ),
    Mutant(
        "rotation_in_bfloat16",
        reference,
        "rotate",
        tables_in_bfloat16,
        checks.test_rotation_is_done_in_float32,
        {"impl": "eager"},
        wraps=True,
    ),
    Mutant(
        "full_pairs_counted",
        flops,
        "block_pairs",
        lambda lengths, block_size=64: int((torch.as_tensor(lengths) ** 2).sum()),
        checks.test_o43_o45_the_flop_counter_sees_visible_pairs,
        {"impl": "eager"},
    ),
    Mutant(
        "rotary_alone_turns_gradients_forward",
        rotary,
        "rotate_back",
        rotary.rotate,
        test_rotary.test_gradcheck_once_and_twice,
        {"interleaved": True},
        raises=(GradcheckError,),
    ),
    Mutant(
        "rotary_alone_pairs_other_columns",
        rotary,
        "rotate",
        other_pairing,
        test_rotary.test_a_quarter_turn,
        {"interleaved": True, "want": [-2.0, 1, -4, 3]},
        wraps=True,
    ),
]
test_mutant = mutant_test(MUTANTS)
