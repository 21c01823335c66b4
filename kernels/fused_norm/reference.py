"""Norms and their fusions in plain torch: the specification of the fused kernels.

    layer   y = (x - mean(x)) * rstd,  rstd = (mean((x - mean(x))^2) + eps)^-1/2
    rms     y = x * rstd,              rstd = (mean(x^2) + eps)^-1/2

over the last dimension. Neither has weights: the source leaves them out. Backward, with y as above:

    dx = rstd * (dy - y * mean(dy * y) [- mean(dy) for layer])

Float32 for float32, bfloat16 and float16 inputs (one rounding per stored tensor), float64 for float64. Nothing is
kept for the backward pass but the input: its statistics cost less to form again than to store and read.

An implementation module of this package exposes IMPLEMENTATIONS: op name -> Implementation, with the signatures
below.

    norm         forward(x [R, N], *, kind, eps) -> y
                 backward(dy, x, *, kind, eps) -> dx
    norm_rotary  forward(x [T, H, D], cos, sin, *, interleaved, kind, eps) -> y
                 backward(dy, x, cos, sin, *, interleaved, kind, eps) -> dx
    pffn         forward(s, k, v, q_offsets, kv_offsets, *, activation, scale, eps, max_q_len, max_kv_len)
                     -> (out, u), both like s
                 backward(dout, s, k, v, u, q_offsets, kv_offsets, *, activation, scale, eps, max_q_len, max_kv_len)
                     -> (ds, dk, dv)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..gdpa import reference as gdpa_reference
from ..registry import Case, Implementation
from ..rotary.reference import rotate, rotate_back
from ..validation import accumulation_dtype


def _wide(x: Tensor) -> Tensor:
    return x.to(accumulation_dtype(x.dtype))


def _standardise(x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """(y, rstd) of x [..., N] in its own dtype; rstd [..., 1]."""
    centred = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    return centred * rstd, rstd


def normalise(x: Tensor, kind: str, eps: float) -> Tensor:
    """y of x [..., N], in x's dtype."""
    return _standardise(x, kind, eps)[0]


def normalise_backward(dy: Tensor, x: Tensor, kind: str, eps: float) -> Tensor:
    """dx, in the dtype of dy and x."""
    y, rstd = _standardise(x, kind, eps)
    inner = dy - y * (dy * y).mean(-1, keepdim=True)
    if kind == "layer":
        inner = inner - dy.mean(-1, keepdim=True)
    return inner * rstd


def norm_forward(x, *, kind, eps):
    return normalise(_wide(x), kind, eps).to(x.dtype)


def norm_backward(dy, x, *, kind, eps):
    return normalise_backward(_wide(dy), _wide(x), kind, eps).to(x.dtype)


def norm_rotary_forward(x, cos, sin, *, interleaved, kind, eps):
    return rotate(normalise(_wide(x), kind, eps), cos, sin, interleaved).to(x.dtype)


def norm_rotary_backward(dy, x, cos, sin, *, interleaved, kind, eps):
    turned_back = rotate_back(_wide(dy), cos, sin, interleaved)
    return normalise_backward(turned_back, _wide(x), kind, eps).to(x.dtype)


def _inside(offsets: Tensor, rows: Tensor) -> Tensor:
    """bool [T, 1]: rows that belong to a sequence."""
    return (torch.arange(rows.shape[0], device=rows.device) < offsets[-1])[:, None]


def pffn_with(gdpa_forward: Callable, gdpa_backward: Callable) -> tuple[Callable, Callable]:
    """Forward and backward of the feed-forward tail around an implementation of GDPA.

    Rows are normalised over all H * D columns. Rows past the end are cleared where they enter, so that what they
    hold, NaN included, goes nowhere; their outputs and gradients are zeros.
    """

    def forward(s, k, v, q_offsets, kv_offsets, *, eps, **settings):
        shape, inside = s.shape, _inside(q_offsets, s)
        rows = _wide(s).flatten(1).masked_fill(~inside, 0.0)
        normed = normalise(rows, "layer", eps)
        o = gdpa_forward(normed.view(shape), _wide(k), _wide(v), q_offsets, kv_offsets, **settings)
        u = o.flatten(1) + normed
        out = normalise(u, "rms", eps) + rows
        return out.view(shape).to(s.dtype), u.view(shape).to(s.dtype)

    def backward(dout, s, k, v, u, q_offsets, kv_offsets, *, eps, **settings):
        shape, inside = s.shape, _inside(q_offsets, s)
        rows = _wide(s).flatten(1).masked_fill(~inside, 0.0)
        d_rows = _wide(dout).flatten(1).masked_fill(~inside, 0.0)
        du = normalise_backward(d_rows, _wide(u).flatten(1), "rms", eps)
        normed = normalise(rows, "layer", eps).view(shape)
        dq, dk, dv = gdpa_backward(du.view(shape), normed, _wide(k), _wide(v), q_offsets, kv_offsets, **settings)
        ds = normalise_backward(dq.flatten(1) + du, rows, "layer", eps) + d_rows
        return ds.view(shape).to(s.dtype), dk.to(k.dtype), dv.to(v.dtype)

    return forward, backward


pffn_forward, pffn_backward = pffn_with(gdpa_reference.forward, gdpa_reference.backward)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATIONS = {
    "norm": Implementation("reference", norm_forward, norm_backward, _unsupported),
    "norm_rotary": Implementation("reference", norm_rotary_forward, norm_rotary_backward, _unsupported),
    "pffn": Implementation("reference", pffn_forward, pffn_backward, _unsupported),
}
