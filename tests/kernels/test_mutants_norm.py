"""Code breaks of the norms and their fusions, each with the check that catches it."""

from __future__ import annotations

import torch
from torch.autograd.gradcheck import GradcheckError

from kernels.fused_norm import REGISTRIES, reference
from kernels.gdpa import eager as gdpa_eager
from kernels.registry import Implementation

from . import test_fused_norm as checks
from .mutants import Mutant, mutant_test

GRADCHECK = (GradcheckError,)
EXACT = {"dtype": torch.float32}
EQUATIONS = {"impl": "eager", "activation": "silu"}


def mean_is_always_subtracted(old):
    return lambda x, kind, eps: old(x, "layer", eps)


def without_eps(old):
    return lambda x, kind, eps: old(x, kind, 0.0)


def sample_variance(old):
    def standardise(x, kind, eps):
        y, rstd = old(x, kind, eps)
        factor = ((x.shape[-1] - 1) / x.shape[-1]) ** 0.5
        return y * factor, rstd * factor

    return standardise


def without_the_mean_of_dy(old):
    def backward(dy, x, kind, eps):
        y, rstd = reference._standardise(x, kind, eps)
        return (dy - y * (dy * y).mean(-1, keepdim=True)) * rstd

    return backward


def per_head(old):
    """RMSNorm over each head's columns in place of all of them (two heads in the check)."""

    def normalise(x, kind, eps):
        return old(x.unflatten(-1, (2, -1)), kind, eps).flatten(-2) if kind == "rms" else old(x, kind, eps)

    return normalise


def pffn_of(forward, backward):
    """The registry's table with a broken eager pffn."""
    inner = Implementation("eager", forward, backward, lambda case: None)

    def around(function):
        return lambda *tensors, gdpa, **settings: function(*tensors, gdpa=inner, **settings)

    sides = around(reference.pffn_forward), around(reference.pffn_backward)
    return lambda loaded: {**loaded, "eager": Implementation("eager", *sides, lambda case: None)}


def no_residual(q, *rest, **settings):
    return gdpa_eager.forward(q, *rest, **settings) - q


def no_gradient_of_the_queries(do, q, *rest, **settings):
    dq, dk, dv = gdpa_eager.backward(do, q, *rest, **settings)
    return torch.zeros_like(dq), dk, dv


MUTANTS = [
    Mutant(
        "mean_subtracted_in_rms",
        reference,
        "_standardise",
        mean_is_always_subtracted,
        checks.test_norm_is_as_exact_as_torchs,
        {"kind": "rms", **EXACT},
        wraps=True,
    ),
    Mutant(
        "eps_is_lost",
        reference,
        "_standardise",
        without_eps,
        checks.test_constant_and_zero_rows_stay_finite,
        {"kind": "layer"},
        wraps=True,
    ),
    Mutant(
        "sample_variance",
        reference,
        "_standardise",
        sample_variance,
        checks.test_norm_is_as_exact_as_torchs,
        {"kind": "layer", **EXACT},
        wraps=True,
    ),
    Mutant(
        "mean_of_dy_left_out",
        reference,
        "normalise_backward",
        without_the_mean_of_dy,
        checks.test_gradcheck_norms,
        {"kind": "layer"},
        wraps=True,
        raises=GRADCHECK,
    ),
    Mutant(
        "norm_rotary_turns_gradients_forward",
        reference,
        "rotate_back",
        reference.rotate,
        checks.test_norm_rotary_is_norm_then_rotary,
        {"kind": "rms", "interleaved": True},
    ),
    Mutant(
        "rms_over_each_head",
        reference,
        "normalise",
        per_head,
        checks.test_pffn_is_its_equations,
        EQUATIONS,
        wraps=True,
    ),
    Mutant(
        "normalised_input_not_added",
        REGISTRIES["pffn"],
        "_loaded",
        pffn_of(no_residual, gdpa_eager.backward),
        checks.test_pffn_is_its_equations,
        EQUATIONS,
        wraps=True,
    ),
    Mutant(
        "gradient_through_the_queries_lost",
        REGISTRIES["pffn"],
        "_loaded",
        pffn_of(gdpa_eager.forward, no_gradient_of_the_queries),
        checks.test_gradcheck_pffn,
        {"impl": "eager"},
        wraps=True,
        raises=GRADCHECK,
    ),
    Mutant(
        "spare_rows_enter",
        reference,
        "_inside",
        lambda offsets, rows: torch.ones(rows.shape[0], 1, dtype=torch.bool),
        checks.test_pffn_spare_rows_and_sequences_without_keys,
        {"impl": "eager"},
    ),
]
test_mutant = mutant_test(MUTANTS)
