"""Norms and their fusions in plain torch: the specification of the fused kernels.

    layer   y = (x - mean(x)) * rstd,  rstd = (mean((x - mean(x))^2) + eps)^-1/2
    rms     y = x * rstd,              rstd = (mean(x^2) + eps)^-1/2

over the last dimension. Neither has weights: the source leaves them out. Backward, with y as above:

    dx = rstd * (dy - y * mean(dy * y) [- mean(dy) for layer])

Float32 for float32, bfloat16 and float16 inputs (one rounding per stored tensor), float64 for float64. Statistics are
stored in that arithmetic's dtype.

An implementation module of this package exposes IMPLEMENTATIONS: op name -> Implementation, with the signatures below.

    norm         forward(x [R, N], *, kind, eps) -> (y, mean [R], rstd [R])       (mean: zeros for rms)
                 backward(dy, x, mean, rstd, *, kind) -> dx
    norm_rotary  forward(x [T, H, D], cos, sin, *, interleaved, kind, eps) -> (y, mean [T, H], rstd [T, H])
                 backward(dy, x, mean, rstd, cos, sin, *, interleaved, kind) -> dx
    pffn         forward(s, k, v, q_offsets, kv_offsets, *, activation, scale, eps, max_q_len, max_kv_len)
                     -> (out, u [T, H, D], mean [T], rstd [T], rstd_u [T])
                 backward(dout, s, k, v, u, mean, rstd, rstd_u, q_offsets, kv_offsets, *, activation, scale, max_q_len,
                     max_kv_len) -> (ds, dk, dv)
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


def normalise(x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of x [..., N] in its own dtype; mean and rstd [...]."""
    mean = x.mean(-1) if kind == "layer" else torch.zeros_like(x[..., 0])
    centred = x - mean[..., None] if kind == "layer" else x
    rstd = torch.rsqrt((centred * centred).mean(-1) + eps)
    return centred * rstd[..., None], mean, rstd


def normalise_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, kind: str) -> Tensor:
    """dx in the dtype of dy and x, from the saved statistics."""
    y = (x - mean[..., None]) * rstd[..., None] if kind == "layer" else x * rstd[..., None]
    inner = dy - y * (dy * y).mean(-1, keepdim=True)
    if kind == "layer":
        inner = inner - dy.mean(-1, keepdim=True)
    return inner * rstd[..., None]


def norm_forward(x, *, kind, eps):
    y, mean, rstd = normalise(_wide(x), kind, eps)
    return y.to(x.dtype), mean, rstd


def norm_backward(dy, x, mean, rstd, *, kind):
    return normalise_backward(_wide(dy), _wide(x), mean, rstd, kind).to(x.dtype)


def norm_rotary_forward(x, cos, sin, *, interleaved, kind, eps):
    y, mean, rstd = normalise(_wide(x), kind, eps)
    return rotate(y, cos, sin, interleaved).to(x.dtype), mean, rstd


def norm_rotary_backward(dy, x, mean, rstd, cos, sin, *, interleaved, kind):
    turned_back = rotate_back(_wide(dy), cos, sin, interleaved)
    return normalise_backward(turned_back, _wide(x), mean, rstd, kind).to(x.dtype)


def _inside(offsets: Tensor, rows: Tensor) -> Tensor:
    """bool [T, 1]: rows that belong to a sequence."""
    return (torch.arange(rows.shape[0], device=rows.device) < offsets[-1])[:, None]


def pffn_with(gdpa_forward: Callable, gdpa_backward: Callable) -> tuple[Callable, Callable]:
    """Forward and backward of the feed-forward tail around an implementation of GDPA.

    Rows are normalised over all H * D columns. Rows past the end are cleared where they enter, so that what they
    hold, NaN included, goes nowhere; their outputs and gradients are zeros.
    """

    def forward(s, k, v, q_offsets, kv_offsets, *, activation, scale, eps, max_q_len=None, max_kv_len=None):
        shape, inside = s.shape, _inside(q_offsets, s)
        rows = _wide(s).flatten(1).masked_fill(~inside, 0.0)
        normed, mean, rstd = normalise(rows, "layer", eps)
        o = gdpa_forward(
            normed.view(shape),
            _wide(k),
            _wide(v),
            q_offsets,
            kv_offsets,
            activation=activation,
            scale=scale,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )
        u = o.flatten(1) + normed
        y, _, rstd_u = normalise(u, "rms", eps)
        return (y + rows).view(shape).to(s.dtype), u.view(shape).to(s.dtype), mean, rstd, rstd_u

    def backward(
        dout,
        s,
        k,
        v,
        u,
        mean,
        rstd,
        rstd_u,
        q_offsets,
        kv_offsets,
        *,
        activation,
        scale,
        max_q_len=None,
        max_kv_len=None,
    ):
        shape, inside = s.shape, _inside(q_offsets, s)
        rows = _wide(s).flatten(1).masked_fill(~inside, 0.0)
        d_rows = _wide(dout).flatten(1).masked_fill(~inside, 0.0)
        du = normalise_backward(d_rows, _wide(u).flatten(1), torch.zeros_like(rstd_u), rstd_u, "rms")
        normed = (rows - mean[:, None]) * rstd[:, None]
        dq, dk, dv = gdpa_backward(
            du.view(shape),
            normed.view(shape),
            _wide(k),
            _wide(v),
            q_offsets,
            kv_offsets,
            activation=activation,
            scale=scale,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
        )
        ds = normalise_backward(dq.flatten(1) + du, rows, mean, rstd, "layer") + d_rows
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
