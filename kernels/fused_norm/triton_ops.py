"""The Triton norm kernels (triton_norm.py) as implementations of this package's ops.

norm and norm_rotary are one kernel each way. pffn (triton_pffn.py) is three: norm, any GDPA, and both additions with
the norm between them. The norms are not fused into GDPA's own tiles.
"""

from __future__ import annotations

from ..registry import Case, Implementation
from . import triton_norm, triton_pffn


def norm_forward(x, *, kind, eps):
    return triton_norm.norm_forward(x[:, None], kind=kind, eps=eps)[:, 0]


def norm_backward(dy, x, *, kind, eps):
    return triton_norm.norm_backward(dy[:, None], x[:, None], kind=kind, eps=eps)[:, 0]


def norm_rotary_forward(x, cos, sin, *, interleaved, kind, eps):
    return triton_norm.norm_forward(x, cos, sin, kind=kind, eps=eps, interleaved=interleaved)


def norm_rotary_backward(dy, x, cos, sin, *, interleaved, kind, eps):
    return triton_norm.norm_backward(dy, x, cos, sin, kind=kind, eps=eps, interleaved=interleaved)


def _norm_unsupported(case: Case) -> str | None:
    if case.head_dim % 2:
        return f"{case.head_dim} columns; allowed: even"
    return triton_norm.unsupported(case.device_type, case.dtype, case.head_dim)


def _pffn_unsupported(case: Case) -> str | None:
    return triton_norm.unsupported(case.device_type, case.dtype, case.head_dim)


IMPLEMENTATIONS = {
    "norm": Implementation("triton", norm_forward, norm_backward, _norm_unsupported),
    "norm_rotary": Implementation("triton", norm_rotary_forward, norm_rotary_backward, _norm_unsupported),
    "pffn": Implementation("triton", triton_pffn.forward, triton_pffn.backward, _pffn_unsupported),
}
