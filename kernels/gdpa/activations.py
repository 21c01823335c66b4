"""Activations of GDPA: value, derivative and pullback, one definition for every implementation.

The source replaces softmax by an elementwise activation between the two matrix products. Because nothing normalises the
scores, an activation must stay finite far out: every formula here holds for |s| up to 1e4 in float32.

    gelu           s Phi(s), the erf form
    gelu_tanh      0.5 s (1 + tanh(sqrt(2/pi) (s + 0.044715 s^3)))
    gelu_taylor6   0.5 s + C2 s^2 + C4 s^4 + C6 s^6, the expansion of `gelu` at 0. VALID FOR |s| <= 1 ONLY: its error
                   against `gelu` is 4.5e-6 at 0.5, 1.1e-3 at 1, 0.22 at 2 and 4 at 3. It needs no transcendental unit,
                   which is why the source uses it where normalised q and k bound the scores. Nothing clamps: outside
                   it is just a polynomial.
    silu           s sigmoid(s)
    relu, relu2    max(s, 0) and its square; derivative 0 at s = 0
    identity       s (linear attention without normalisation)

All have value 0 at s = 0, so zero-filled queries and keys add nothing to an output. Their DERIVATIVE at 0 is 0.5 for
the GELU family and SiLU: a masked pair must be cleared in the backward pass too. A mask is applied after the
activation, never as -inf before it: silu(-inf) is -inf * 0 = NaN.

Inputs of any floating dtype; bfloat16 and float16 are computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715
TAYLOR_C2 = 1 / math.sqrt(2 * math.pi)
TAYLOR_C4 = -TAYLOR_C2 / 6
TAYLOR_C6 = TAYLOR_C2 / 40
_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """value(s) and derivative(s) elementwise; pullback(g, s) = g * derivative(s) in few passes over memory.

    valid_to: largest |s| for which the formula approximates what its name says (inf = everywhere). one_kernel: value
    and pullback are each one kernel of torch that computes in float32 and rounds once.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]
    pullback: Callable[[Tensor, Tensor], Tensor]
    valid_to: float = math.inf
    one_kernel: bool = False


def _gelu_derivative(s: Tensor) -> Tensor:
    density = torch.exp(-0.5 * s * s) * TAYLOR_C2
    return 0.5 * torch.erfc(s * -math.sqrt(0.5)) + s * density


def _gelu_tanh_derivative(s: Tensor) -> Tensor:
    # 0.5 (1 + tanh u) = sigmoid(2u), so no difference of nearly equal numbers in the tails and no inf/inf.
    square = s * s
    slope = 2 * SQRT_2_OVER_PI * (1 + 3 * TANH_CUBIC * square)
    gate = torch.sigmoid(2 * SQRT_2_OVER_PI * s * (1 + TANH_CUBIC * square))
    return gate + s * gate * (1 - gate) * slope


def _taylor6(s: Tensor) -> Tensor:
    square = s * s
    return s * 0.5 + square * (TAYLOR_C2 + square * (TAYLOR_C4 + square * TAYLOR_C6))


def _taylor6_derivative(s: Tensor) -> Tensor:
    square = s * s
    return 0.5 + s * (2 * TAYLOR_C2 + square * (4 * TAYLOR_C4 + square * (6 * TAYLOR_C6)))


def _silu_derivative(s: Tensor) -> Tensor:
    gate = torch.sigmoid(s)
    return gate + s * gate * (1 - gate)


_TABLE = {
    a.name: a
    for a in (
        Activation("gelu", F.gelu, _gelu_derivative, lambda g, s: _aten.gelu_backward(g, s), one_kernel=True),
        Activation(
            "gelu_tanh",
            lambda s: F.gelu(s, approximate="tanh"),
            _gelu_tanh_derivative,
            lambda g, s: _aten.gelu_backward(g, s, approximate="tanh"),
            one_kernel=True,
        ),
        Activation(
            "gelu_taylor6", _taylor6, _taylor6_derivative, lambda g, s: g * _taylor6_derivative(s), valid_to=1.0
        ),
        Activation("silu", F.silu, _silu_derivative, lambda g, s: _aten.silu_backward(g, s), one_kernel=True),
        Activation("relu", F.relu, lambda s: (s > 0).to(s.dtype), lambda g, s: _aten.threshold_backward(g, s, 0)),
        Activation("relu2", lambda s: F.relu(s).square(), lambda s: 2 * F.relu(s), lambda g, s: g * F.relu(s) * 2),
        Activation("identity", lambda s: s, torch.ones_like, lambda g, s: g),
    )
}
ACTIVATIONS: tuple[str, ...] = tuple(_TABLE)
"""Names that `gdpa(activation=...)` accepts."""


def get(name: str) -> Activation:
    """The activation called `name`; ValueError lists the names that exist."""
    if name not in _TABLE:
        raise ValueError(f"activation: unknown name {name!r}; allowed: {', '.join(ACTIVATIONS)}")
    return _TABLE[name]


def _wide(name: str, s: Tensor) -> Tensor:
    """s in float32 or wider, except on a GPU where torch's kernel widens in registers."""
    if s.is_cuda and get(name).one_kernel:
        return s
    return s.float() if s.dtype in (torch.bfloat16, torch.float16) else s


def value(name: str, s: Tensor) -> Tensor:
    """act(s), same shape and dtype as s."""
    return get(name).value(_wide(name, s)).to(s.dtype)


def derivative(name: str, s: Tensor) -> Tensor:
    """act'(s), same shape and dtype as s."""
    return get(name).derivative(s.float() if s.dtype in (torch.bfloat16, torch.float16) else s).to(s.dtype)


def pullback(name: str, grad: Tensor, s: Tensor) -> Tensor:
    """grad * act'(s): the gradient of a loss with respect to s, given the one with respect to act(s)."""
    return get(name).pullback(_wide(name, grad), _wide(name, s)).to(s.dtype)


def masked_value(name: str, s: Tensor, valid: Tensor | None) -> Tensor:
    """act(s) where `valid` (bool, broadcastable to s), exactly 0 elsewhere, NaN and inf in s included."""
    out = value(name, s)
    return out if valid is None else torch.where(valid, out, out.new_zeros(()))


def masked_pullback(name: str, grad: Tensor, s: Tensor, valid: Tensor | None) -> Tensor:
    """grad * act'(s) where `valid`, exactly 0 elsewhere, whatever grad and s hold there."""
    out = pullback(name, grad, s)
    return out if valid is None else torch.where(valid, out, out.new_zeros(()))
