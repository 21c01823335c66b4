"""GDPA's activations and their derivatives as Triton functions.

FAST takes `tanh.approx.f32` (one special-function instruction, relative error about 2^-11, below the rounding of the
16-bit weight that follows); without it, forms that neither overflow nor cancel. All of them give 0 for a score of 0,
which is what rows filled with zeros yield; the derivative there need not be 0 (0.5 for GELU), the factor dO·V is.
"""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_taylor6", "silu", "relu", "relu2", "identity")


@triton.jit
def tanh_approx(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def activation(s, KIND: tl.constexpr, FAST: tl.constexpr):
    """act(s) elementwise in float32."""
    if KIND == "gelu_tanh":
        z = s * (0.7978845608028654 + 0.035677408136300125 * (s * s))
        if FAST:
            half = 0.5 * s
            return half * tanh_approx(z) + half
        else:
            return s / (1.0 + tl.exp(-2.0 * z))
    elif KIND == "gelu":
        return 0.5 * s * (1.0 + tl.erf(s * 0.7071067811865476))
    elif KIND == "gelu_taylor6":
        t = s * s
        return 0.5 * s + t * (0.3989422804014327 + t * (-0.06649038006690545 + t * 0.009973557010035818))
    elif KIND == "silu":
        if FAST:
            half = 0.5 * s
            return half * tanh_approx(half) + half
        else:
            return s / (1.0 + tl.exp(-s))
    elif KIND == "relu":
        return tl.maximum(s, 0.0)
    elif KIND == "relu2":
        r = tl.maximum(s, 0.0)
        return r * r
    else:
        tl.static_assert(KIND == "identity", "unknown activation")
        return s


@triton.jit
def activation_and_slope(s, KIND: tl.constexpr, FAST: tl.constexpr):
    """(act(s), act'(s)) elementwise in float32; what they share is computed once."""
    if KIND == "gelu_tanh":
        t = s * s
        z = s * (0.7978845608028654 + 0.035677408136300125 * t)
        if FAST:
            gate = 0.5 * tanh_approx(z) + 0.5
        else:
            gate = 1.0 / (1.0 + tl.exp(-2.0 * z))
        value = s * gate
        # z' = c0 + 3 c1 s^2; d gate / dz = 2 gate (1 - gate)
        return value, gate + (value - value * gate) * (1.5957691216057308 + 0.21406444881780075 * t)
    elif KIND == "gelu":
        gate = 0.5 * (1.0 + tl.erf(s * 0.7071067811865476))
        return s * gate, gate + s * 0.3989422804014327 * tl.exp(-0.5 * s * s)
    elif KIND == "gelu_taylor6":
        t = s * s
        value = 0.5 * s + t * (0.3989422804014327 + t * (-0.06649038006690545 + t * 0.009973557010035818))
        return value, 0.5 + s * (0.7978845608028654 + t * (-0.2659615202676218 + t * 0.059841342060214905))
    elif KIND == "silu":
        if FAST:
            gate = 0.5 * tanh_approx(0.5 * s) + 0.5
        else:
            gate = 1.0 / (1.0 + tl.exp(-s))
        value = s * gate
        return value, gate + (value - value * gate)
    elif KIND == "relu":
        return tl.maximum(s, 0.0), tl.where(s > 0.0, 1.0, 0.0)
    elif KIND == "relu2":
        r = tl.maximum(s, 0.0)
        return r * r, 2.0 * r
    else:
        tl.static_assert(KIND == "identity", "unknown activation")
        return s, tl.full(s.shape, 1.0, dtype=tl.float32)


@triton.jit
def activation_slope(s, KIND: tl.constexpr, FAST: tl.constexpr):
    """act'(s) elementwise in float32."""
    return activation_and_slope(s, KIND, FAST)[1]
