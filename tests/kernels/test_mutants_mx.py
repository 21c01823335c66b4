"""Named breaks of the MX code and of the bounds, each of which a named test must catch.

A mutant is one function with one piece of its source replaced, for the duration of one check. A test that passes on a
mutant tests nothing, so it fails here.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from gem import precision
from kernels import bounds, mxfp8
from tests.gem import test_precision as on_precision
from tests.kernels import test_bounds as on_bounds
from tests.kernels import test_mxfp8 as on_mx
from tests.kernels import test_mxfp8_attention as on_attention
from tests.kernels import test_mxfp8_hopper as on_hopper
from tests.kernels import test_mxfp8_linear as on_linear

formats, quantize, linear, attention, hopper, operands = (
    sys.modules[f"kernels.mxfp8.{name}"]
    for name in ("formats", "quantize", "linear", "attention", "hopper", "hopper_attention")
)
RCEIL, SQUARE = mxfp8.RECIPES["rceil"], mxfp8.Recipe(attention_block=(32, 32))


@dataclass(frozen=True)
class Mutant:
    """In `owner` (a module or a class), function `function` with `old` replaced by `new`; `check` must then fail."""

    name: str
    owner: object
    function: str
    old: str
    new: str
    check: Callable[[], None]


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Swap the code object, so that every reference to the function, imported by name or wrapped, runs the mutant."""
    attribute = getattr(mutant.owner, mutant.function)
    function = inspect.unwrap(attribute)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name}: the code no longer holds {mutant.old!r} once"
    flags = __future__.annotations.compiler_flag
    code = compile(source.replace(mutant.old, mutant.new), f"<mutant {mutant.name}>", "exec", flags, dont_inherit=True)
    names: dict = {}
    exec(code, function.__globals__, names)
    caches = (getattr(attribute, "cache_clear", lambda: None), attention._groups_of.cache_clear)
    original, function.__code__ = function.__code__, inspect.unwrap(names[mutant.function]).__code__
    for forget in caches:
        forget()
    try:
        yield
    finally:
        function.__code__ = original
        for forget in caches:
            forget()


MUTANTS = [
    Mutant(
        "rceil_reads_floor", formats, "scale_codes", 'mode == "rceil"', 'mode == "never"',
        lambda: on_mx.test_scale_codes_of_the_three_modes(449.0, "rceil"),
    ),
    Mutant(
        "rceil_rounds_448_up", formats, "scale_codes", "mantissa > fmt.max_mantissa_bits",
        "mantissa >= fmt.max_mantissa_bits",
        lambda: on_mx.test_scale_codes_of_the_three_modes(448.0, "rceil"),
    ),
    Mutant(
        "ceil_of_a_power_of_two", formats, "scale_codes", "(mantissa > 0).int()", "1",
        lambda: on_mx.test_scale_codes_of_the_three_modes(512.0, "ceil"),
    ),
    Mutant(
        "infinity_hidden", formats, "scale_codes", "exponent == 255, SCALE_NAN", "exponent == 255, SCALE_NAN - 1",
        lambda: on_mx.test_bad_values_stay_visible_in_their_block_alone(float("inf"), torch.float8_e4m3fn),
    ),
    Mutant(
        "code_below_zero_wraps", formats, "scale_codes", "codes.clamp(0, SCALE_NAN - 1)", "codes",
        on_mx.test_extreme_magnitudes,
    ),
    Mutant(
        "cast_shows_no_infinity", formats, "saturating_cast", "x.isinf(), infinite", "x.isnan(), infinite",
        on_mx.test_cast_saturates_finite_values_and_shows_the_rest,
    ),
    Mutant(
        "smallest_power_of_two_lost", formats, "power_of_two", ".clamp_(min=1 << 22)", "",
        on_mx.test_extreme_magnitudes,
    ),
    Mutant(
        "stochastic_always_down", formats, "round_stochastically", ".sub_(uniform).ceil_()", ".sub_(1.0).ceil_()",
        lambda: on_mx.test_stochastic_rounding_is_unbiased_between_neighbours(torch.float8_e4m3fn),
    ),
    Mutant(
        "stochastic_ignores_denormals", formats, "round_stochastically", "(fmt.min_exponent + 127) << 23", "1 << 23",
        lambda: on_mx.test_stochastic_rounding_is_unbiased_between_neighbours(torch.float8_e4m3fn),
    ),
    Mutant(
        "hadamard_not_normalised", formats, "_butterfly", "here.mul_(BLOCK**-0.5)", "here",
        on_mx.test_hadamard_is_orthogonal_and_undone,
    ),
    Mutant(
        "scale_tiles_not_zeroed", formats, "scales_to_tiles", "torch.zeros(", "255 + torch.zeros(",
        on_mx.test_scale_tiles_round_trip_and_ignore_padding,
    ),
    Mutant(
        "scale_tiles_in_row_order", formats, "scales_to_tiles", "permute(0, 3, 2, 1, 4)", "permute(0, 3, 1, 2, 4)",
        on_mx.test_scale_tiles_round_trip_and_ignore_padding,
    ),
    Mutant(
        "blocks_cross_sequences", quantize, "_token_layout", "starts = offsets.long()",
        "starts = torch.stack([offsets[0], offsets[-1]]).long()\n    offsets = starts",
        on_mx.test_blocks_stop_at_sequence_ends,
    ),
    Mutant(
        "rows_past_the_end_kept", quantize, "quantize", "values[layout.target.shape[0] :] = 0", "pass",
        lambda: quantized_tail(),
    ),
    Mutant(
        "wgrad_blocks_along_features", linear, "_wgrad", "_low_gemm(dy.T, x.T,",
        "(lambda a, b, *r: _mx_values(a.T, 'gradient', recipe).T @ _mx_values(b.T, 'input', recipe))(dy.T, x.T,",
        lambda: on_linear.test_each_gemm_multiplies_the_quantised_values((1, 32), "rceil"),
    ),
    Mutant(
        "dgrad_reuses_row_scales", linear, "_dgrad", '_low_gemm(dy, weight.T, "gradient", "weight", recipe)',
        '(_mx_values(dy, "gradient", recipe) @ _mx_values(weight, "weight", recipe))',
        lambda: on_linear.test_each_gemm_multiplies_the_quantised_values((1, 32), "rceil"),
    ),
    Mutant(
        "wgrad_switch_ignored", linear, "_wgrad", "if recipe.wgrad:", "if True:",
        lambda: on_linear.test_a_gemm_left_high_is_exact("wgrad"),
    ),
    Mutant(
        "gradients_rounded_to_nearest", linear, "_mx_values", "stochastic=recipe.rounds_stochastically(operand)",
        "stochastic=False",
        on_linear.test_stochastic_gradients_are_unbiased_and_seeded,
    ),
    Mutant(
        "p_not_quantised", attention, "_forward", 'use.along(p, "p", -1)', "p",
        lambda: on_attention.test_each_operand_is_quantised_only_when_named("p"),
    ),
    Mutant(
        "ds_blocks_along_keys_for_dk", attention, "_backward", 'use.along(ds, "ds", -2).mT',
        'use.along(ds, "ds", -1).mT',
        lambda: on_attention.test_equals_the_written_out_loop("self", "gelu_tanh", mxfp8.RECIPES["naive"]),
    ),
    Mutant(
        "denominator_after_quantising", attention, "_forward", "total = p.sum(-1, keepdim=True)",
        'total = use.along(p, "p", -1).sum(-1, keepdim=True)',
        lambda: on_attention.test_each_operand_is_quantised_only_when_named("p"),
    ),
    Mutant(
        "masked_pairs_keep_gradient", attention, "_backward",
        "activations.masked_pullback(activation, dp, scores, pairs)",
        "activations.masked_pullback(activation, dp, scores, None) + 0.5",
        lambda: on_attention.test_equals_the_written_out_loop("self", "silu", RCEIL),
    ),
    Mutant(
        "window_one_too_wide", attention._Group, "pairs", ".abs() <= window", ".abs() <= window + 1",
        lambda: on_attention.test_window(5),
    ),
    Mutant(
        "hadamard_not_turned_back", attention._Operands, "scatter",
        "rotate(values, self.rotation, back=True)", "values",
        lambda: on_attention.test_hadamard_leaves_the_function_alone("softmax", 64),
    ),
    Mutant(
        "square_blocks_are_rows", attention._Operands, "along", "(-2, -1)", "(dim,)",
        lambda: on_attention.test_blocks_lie_where_the_recipe_says("softmax"),
    ),
    Mutant(
        "blocks_anchored_on_the_stream", attention, "_block_offsets",
        "counts = (starts.diff() + block_size - 1) // block_size",
        "starts = torch.stack([starts[0], starts[-1]]); counts = (starts.diff() + block_size - 1) // block_size",
        lambda: on_attention.test_block_attention(False),
    ),
    Mutant(
        "skip_last_ignored", precision, "_late_layers", "if count == 0:", "if True:",
        lambda: on_precision.test_the_row_says_what_changes("mx_full", "late_bf16", 2, 2),
    ),
    Mutant(
        "hopper_padding_not_zero", hopper, "_quantize", "pad(values, (0, 0, 0, data.shape[0] - x.shape[0]))",
        "pad(values, (0, 0, 0, data.shape[0] - x.shape[0]), value=1.0)",
        on_hopper.test_layouts_are_what_the_product_reads,
    ),
    Mutant(
        "hopper_seed_ignored", hopper, "dgrad", "seed=_seed(recipe, dy)", "seed=None",
        on_hopper.test_stochastic_gradients_are_unbiased_and_follow_the_seed,
    ),
    Mutant(
        "keys_in_plain_order", operands, "key_order", ".permute(0, 2, 1, 3)", "",
        on_hopper.test_operands_follow_sequences,
    ),
    Mutant(
        "shift_of_a_tile_not_taken_back", operands, "forward_plainly", ".float() / up\n",
        ".float() / 2.0**SOFTMAX_SHIFT\n",
        lambda: on_hopper.test_scales_of_a_tile_lose_nothing_where_tiles_differ("softmax"),
    ),
    Mutant(
        "p_not_shifted_up", operands, "forward_plainly", "2.0**SOFTMAX_SHIFT * shift", "2.0**-6 * shift",
        lambda: on_hopper.test_attention_against_float64("softmax"),
    ),
    Mutant(
        "sparse_peak", bounds, "peak_flops", "else found.bf16", "else 2 * found.bf16",
        on_bounds.test_mfu_of_the_worked_case,
    ),
    Mutant(
        "lse_left_out", bounds, "_attention_bytes", "4.0 * heads * rows", "0.0 * heads * rows",
        on_bounds.test_backward_counts_and_schemes,
    ),
    Mutant(
        "block_reads_o_back", bounds, "_attention_bytes", '(2.0 * read_q if op == "jagged_attention" else 0.0)',
        "2.0 * read_q",
        lambda: on_bounds.test_block_attention_of_the_source("bwd", 2.72, 7),
    ),
    Mutant(
        "shared_queries_counted_per_sequence", bounds, "_attention_bytes", "q_once = float(q[0]) * width if shared_q",
        "q_once = read_q if shared_q",
        lambda: on_bounds.test_pooled_attention_is_bound_by_the_copy_rate("gdpa", True, 132),
    ),
    Mutant(
        "split_counted_as_five", bounds, "_attention_work", '"split": 7', '"split": 5',
        on_bounds.test_two_kernels_need_more_than_the_gemm_ceiling,
    ),
]  # fmt: skip


def quantized_tail():
    x = torch.full((6, 32), float("nan"))
    x[:4] = 1.0
    assert torch.equal(mxfp8.quantize(x, offsets=torch.tensor([0, 1, 4])).dequantize()[4:], torch.zeros(2, 32))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_test_catches(mutant):
    mutant.check()
    with mutated(mutant), pytest.raises(AssertionError):
        mutant.check()
    mutant.check()
