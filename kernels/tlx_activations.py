"""Value and slope of the activations in the form the TLX backward kernels want: per score, few instructions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def value_and_slope(s, scale, factor, ACTIVATION: tl.constexpr):
    """(act(x) / value_factor(scale), factor * act'(x)) at x = scale * s; the factor costs nothing per score."""
    if ACTIVATION == "relu":
        x = s * scale
        return tl.maximum(x, 0.0), tl.where(x > 0.0, factor, 0.0)
    elif ACTIVATION == "gelu_taylor6":
        square = scale * scale
        c2 = 0.3989422804014327 * scale
        c4 = -0.06649038006690545 * scale * square
        c6 = 0.009973557010035818 * scale * square * square
        y = s * s
        value = tl.fma(tl.fma(tl.fma(y, 2.0 * c6, 2.0 * c4), y, 2.0 * c2), y, s)
        slope = tl.fma(tl.fma(tl.fma(y, 6.0 * c6 * factor, 4.0 * c4 * factor), y, 2.0 * c2 * factor), s, 0.5 * factor)
        return value, slope
    elif ACTIVATION == "silu":
        u = s * (0.5 * scale)
        t = _tanh(u)
        return tl.fma(s, t, s), tl.fma(t, 0.5 * factor, 0.5 * factor) * tl.fma(u, 1.0 - t, 1.0)
    else:  # gelu_tanh
        a = 0.7978845608028654 * scale
        y = s * s
        t = _tanh(s * tl.fma(y, a * 0.044715 * scale * scale, a))
        half = 0.5 * factor
        g = tl.fma(y, half * a * 0.134145 * scale * scale, half * a)
        return tl.fma(s, t, s), tl.fma(s * g, tl.fma(-t, t, 1.0), tl.fma(t, half, half))


@triton.jit
def value_factor(scale, ACTIVATION: tl.constexpr):
    """What value_and_slope leaves out of the value; dV is linear in it."""
    if ACTIVATION == "relu" or ACTIVATION == "softmax":
        return 1.0
    else:
        return 0.5 * scale
