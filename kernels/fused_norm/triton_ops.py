"""The Triton norm kernels (triton_norm.py) as implementations of this package's ops.

norm and norm_rotary are one kernel each way. pffn is three: norm, GDPA, norm, with the two additions in torch; it is
the composition to beat, not a fusion of the norms into GDPA's own tiles.
"""

from __future__ import annotations

import torch

from ..gdpa import triton_gdpa
from ..jagged import zero_tail_
from ..registry import Case, Implementation
from . import triton_norm


def norm_forward(x, *, kind, eps):
    return triton_norm.norm_forward(x[:, None], kind=kind, eps=eps)[:, 0]


def norm_backward(dy, x, *, kind, eps):
    return triton_norm.norm_backward(dy[:, None], x[:, None], kind=kind, eps=eps)[:, 0]


def norm_rotary_forward(x, cos, sin, *, interleaved, kind, eps):
    return triton_norm.norm_forward(x, cos, sin, kind=kind, eps=eps, interleaved=interleaved)


def norm_rotary_backward(dy, x, cos, sin, *, interleaved, kind, eps):
    return triton_norm.norm_backward(dy, x, cos, sin, kind=kind, eps=eps, interleaved=interleaved)


def _normed(s, q_offsets, eps):
    """layer(s) over all heads, zeros past the end."""
    return zero_tail_(triton_norm.norm_forward(s.contiguous(), kind="layer", over="token", eps=eps), q_offsets)


def pffn_forward(s, k, v, q_offsets, kv_offsets, *, eps, **settings):
    normed = _normed(s, q_offsets, eps)
    u = triton_gdpa.forward(normed, k, v, q_offsets, kv_offsets, **settings) + normed
    out = triton_norm.norm_forward(u, kind="rms", over="token", eps=eps) + s
    return zero_tail_(out, q_offsets), u


def pffn_backward(dout, s, k, v, u, q_offsets, kv_offsets, *, eps, **settings):
    dout = zero_tail_(dout.clone(memory_format=torch.contiguous_format), q_offsets)
    du = triton_norm.norm_backward(dout, u, kind="rms", over="token", eps=eps)
    normed = _normed(s, q_offsets, eps)
    dq, dk, dv = triton_gdpa.backward(du, normed, k, v, q_offsets, kv_offsets, **settings)
    ds = triton_norm.norm_backward(dq + du, s.contiguous(), kind="layer", over="token", eps=eps) + dout
    return zero_tail_(ds, q_offsets), dk, dv


def _norm_unsupported(case: Case) -> str | None:
    if case.head_dim % 2:
        return f"{case.head_dim} columns; allowed: even"
    return triton_norm.unsupported(case.device_type, case.dtype, case.head_dim)


IMPLEMENTATIONS = {
    "norm": Implementation("triton", norm_forward, norm_backward, _norm_unsupported),
    "norm_rotary": Implementation("triton", norm_rotary_forward, norm_rotary_backward, _norm_unsupported),
    "pffn": Implementation(
        "triton", pffn_forward, pffn_backward, lambda case: _norm_unsupported(case) or triton_gdpa.unsupported(case)
    ),
}
