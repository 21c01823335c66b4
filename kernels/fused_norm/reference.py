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
    pffn         forward(s, k, v, q_offsets, kv_offsets, *, gdpa, eps, activation, scale, max_q_len, max_kv_len)
                     -> (out, o), both like s; o is GDPA's output, kept for the backward pass
                 backward(dout, s, k, v, o, q_offsets, kv_offsets, *, gdpa, eps, activation, scale, max_q_len,
                     max_kv_len) -> (ds, dk, dv)
                 one named in function.KEEP_QUERIES: forward -> (out, o, q, inverse) with q = layer(s) and inverse [T],
                     its 1 / sigma; backward takes q in place of s, and inverse= by name
                 gdpa: the Implementation of GDPA to run inside
"""

from __future__ import annotations

import torch
from torch import Tensor

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


def _entering(s: Tensor, q_offsets: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(rows of s [T, H * D], layer(rows), rows outside the sequences).

    Rows past the end are cleared where they enter, so that what they hold, NaN included, goes nowhere.
    """
    outside = ~_inside(q_offsets, s)
    rows = _wide(s).flatten(1).masked_fill(outside, 0.0)
    return rows, normalise(rows, "layer", eps), outside


def pffn_forward(s, k, v, q_offsets, kv_offsets, *, gdpa, eps, **settings):
    """The feed-forward tail around GDPA implementation `gdpa`; both norms over all H * D columns."""
    rows, normed, _ = _entering(s, q_offsets, eps)
    o = gdpa.forward(normed.view(s.shape), _wide(k), _wide(v), q_offsets, kv_offsets, **settings)
    out = normalise(o.flatten(1) + normed, "rms", eps) + rows
    return out.view(s.shape).to(s.dtype), o.to(s.dtype)


def pffn_backward(dout, s, k, v, o, q_offsets, kv_offsets, *, gdpa, eps, **settings):
    rows, normed, outside = _entering(s, q_offsets, eps)
    d_rows = _wide(dout).flatten(1).masked_fill(outside, 0.0)
    du = normalise_backward(d_rows, _wide(o).flatten(1) + normed, "rms", eps)
    arguments = du.view(s.shape), normed.view(s.shape), _wide(k), _wide(v), q_offsets, kv_offsets
    dq, dk, dv = gdpa.backward(*arguments, **settings)
    ds = normalise_backward(dq.flatten(1) + du, rows, "layer", eps) + d_rows
    return ds.view(s.shape).to(s.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATIONS = {
    "norm": Implementation("reference", norm_forward, norm_backward, _unsupported),
    "norm_rotary": Implementation("reference", norm_rotary_forward, norm_rotary_backward, _unsupported),
    "pffn": Implementation("reference", pffn_forward, pffn_backward, _unsupported),
}
