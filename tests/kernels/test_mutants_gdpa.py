"""Code breaks of GDPA and its activations, each with the check that catches it."""

from __future__ import annotations

import torch

from kernels import flops
from kernels.gdpa import activations, eager, reference
from kernels.testing import LENGTH_PATTERNS

from . import test_activations, test_gdpa, test_gdpa_cases
from .mutants import Mutant, mutant_test

SKEWED = next(pattern for pattern in LENGTH_PATTERNS if pattern.name == "skewed")
EXACT = {"pattern": SKEWED, "dtype": torch.float32, "shared": None}
TAILS = {"name": "gelu_tanh"}


def erf_slope_for_tanh(old):
    return lambda name, *rest: old("gelu" if name == "gelu_tanh" else name, *rest)


def tanh_by_exponentials(old):
    def value(name, s):
        if name != "gelu_tanh":
            return old(name, s)
        power = torch.exp(2 * activations.SQRT_2_OVER_PI * (s + activations.TANH_CUBIC * s**3))
        return 0.5 * s * (1 + (power - 1) / (power + 1))

    return value


def mask_before_the_activation(old):
    def value(name, s, valid):
        return activations.value(name, s if valid is None else s.masked_fill(~valid, float("-inf")))

    return value


def slope_without_a_mask(old):
    return lambda name, grad, s, valid: activations.pullback(name, grad, s)


def score_multiplied_by_mask(old):
    return lambda name, s, valid: old(name, s, None) * (1.0 if valid is None else valid)


def rows_past_the_end(old):
    """Read a whole tile, whoever's rows it covers."""

    def index(starts, lengths, size, batch, x, total=None):
        rows = x.shape[0] if total is None else total
        return old(starts, (rows - starts).clamp(max=size), size, batch, x, total)

    return index


def lengths_of_the_neighbour(old):
    def spans(offsets):
        starts, lengths = old(offsets)
        return starts, lengths.roll(1)

    return spans


def unwritten_rows(old):
    return lambda num_rows, x, dtype: torch.full_like(old(num_rows, x, dtype), float("nan"))


def padded_lengths(old):
    def lengths(*arguments):
        q, kv = old(*arguments)
        return q.clamp(min=int(q.max())), kv.clamp(min=int(kv.max()))

    return lengths


def without_scale(old):
    return lambda q, k, scale: old(q, k, 1.0)


def scale_after_the_activation(old):
    """What the public kernel library does with its own scale."""
    return lambda name, s, valid: 2 * old(name, s * 2, valid)


def one_sequence_of_each_group(old):
    def groups(q, k, q_offsets, kv_offsets):
        for group in old(q, k, q_offsets, kv_offsets):
            yield type(group)(*(None if field is None else field[:1] for field in group))

    return groups


POISON = {"impl": "eager", "activation": "silu", "poison": float("nan"), "lengths": (65, 1, 64)}
MUTANTS = [
    Mutant(
        "another_gelus_slope_in_backward",
        activations,
        "pullback",
        erf_slope_for_tanh,
        test_gdpa_cases.test_o22_the_chosen_gelu_is_the_same_in_both_passes,
        {"impl": "eager"},
        wraps=True,
    ),
    Mutant(
        "another_gelus_slope_in_the_reference",
        activations,
        "derivative",
        erf_slope_for_tanh,
        test_gdpa_cases.test_o22_the_chosen_gelu_is_the_same_in_both_passes,
        {"impl": "reference"},
        wraps=True,
    ),
    Mutant(
        "another_gelu_in_forward",
        activations,
        "value",
        erf_slope_for_tanh,
        test_gdpa_cases.test_o22_the_chosen_gelu_is_the_same_in_both_passes,
        {"impl": "reference"},
        wraps=True,
    ),
    Mutant(
        "tanh_written_with_exp",
        activations,
        "value",
        tanh_by_exponentials,
        test_activations.test_o21_tails_stay_finite,
        TAILS,
        wraps=True,
    ),
    Mutant(
        "taylor_coefficient_with_the_wrong_sign",
        activations,
        "TAYLOR_C4",
        -activations.TAYLOR_C4,
        test_activations.test_taylor_error_is_the_documented_one,
        {"s": 1.0, "error": 1.1e-3},
    ),
    Mutant(
        "mask_before_the_activation",
        activations,
        "masked_value",
        mask_before_the_activation,
        test_gdpa.test_eager_is_as_exact_as_the_reference,
        EXACT,
        wraps=True,
    ),
    Mutant(
        "mask_multiplied_onto_a_nan",
        activations,
        "masked_value",
        score_multiplied_by_mask,
        test_activations.test_o19_masked_scores_contribute_nothing,
        {"name": "silu", "hidden": float("nan")},
        wraps=True,
    ),
    Mutant(
        "slope_without_a_mask",
        activations,
        "masked_pullback",
        slope_without_a_mask,
        test_activations.test_o19_masked_scores_contribute_nothing,
        {"name": "silu", "hidden": 0.0},
        wraps=True,
    ),
    Mutant(
        "tile_reads_the_next_sequence",
        eager,
        "row_index",
        rows_past_the_end,
        test_gdpa_cases.test_o10_neighbours_are_never_read,
        POISON,
        wraps=True,
    ),
    Mutant(
        "lengths_of_the_neighbour",
        eager,
        "_starts_lengths",
        lengths_of_the_neighbour,
        test_gdpa_cases.test_o17_cross_attention_uses_its_own_keys,
        {"impl": "eager"},
        wraps=True,
        raises=(RuntimeError, IndexError),
    ),
    Mutant(
        "rows_without_keys_unwritten",
        eager,
        "empty_table",
        unwritten_rows,
        test_gdpa_cases.test_o02_queries_without_keys,
        {"impl": "eager"},
        wraps=True,
    ),
    Mutant(
        "groups_not_filled_to_whole_vectors",
        eager,
        "whole_vectors",
        lambda count, unit, device: count,
        test_gdpa_cases.test_o07_twins_are_equal_across_thread_borders,
        {"activation": "gelu_tanh"},
    ),
    Mutant(
        "scale_is_lost",
        eager,
        "_scores",
        without_scale,
        test_gdpa.test_scale_comes_before_the_activation,
        {"impl": "eager"},
        wraps=True,
    ),
    Mutant(
        "scale_after_the_activation",
        activations,
        "masked_value",
        scale_after_the_activation,
        test_gdpa.test_scale_comes_before_the_activation,
        {"impl": "eager"},
        wraps=True,
    ),
    Mutant(
        "shared_queries_meet_one_sequence_of_a_group",
        eager,
        "_groups",
        one_sequence_of_each_group,
        test_gdpa.test_eager_is_as_exact_as_the_reference,
        {"pattern": LENGTH_PATTERNS[6], "dtype": torch.float32, "shared": 5},
        wraps=True,
    ),
    Mutant(
        "reference_forgets_its_spare_rows",
        reference,
        "_packed",
        lambda parts, like: torch.cat(parts).to(like.dtype),
        test_gdpa_cases.test_o05_spare_rows_past_the_end,
        {"impl": "reference"},
        raises=(RuntimeError,),
    ),
    Mutant(
        "flops_of_padded_lengths",
        flops,
        "lengths_of_call",
        padded_lengths,
        test_gdpa_cases.test_o42_o43_o44_the_flop_counter_sees_useful_pairs,
        {"impl": "eager", "lengths": (3, 0, 5, 100)},
        wraps=True,
    ),
]
test_mutant = mutant_test(MUTANTS)
