"""Rotary embedding on the GPU in stock Triton: each element is read and written once, in place on request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..registry import Case, Implementation
from .triton_kernels import rows_forward_kernel


@dataclass(frozen=True)
class Config:
    """rows of `heads` heads that one program takes; the tables of a row are read once for those heads."""

    rows: int
    heads: int
    num_warps: int


_CANDIDATES = [
    (32, 4, 4),
    (16, 4, 4),
    (64, 4, 8),
    (32, 2, 4),
    (64, 1, 4),
    (16, 4, 2),
    (8, 4, 1),
    (32, 4, 8),
    (16, 8, 4),
]


def candidates(phase: str = "fwd", head_dim: int = 128) -> list[Config]:
    """Configurations that a sweep tries; the phases share them."""
    return [Config(*values) for values in _CANDIDATES]


def default(head_dim: int, num_heads: int) -> Config:
    """About 4,096 elements of a head a program, so that a thread holds 32."""
    rows = max(1, min(64, 4096 // triton.next_power_of_2(head_dim)))
    return Config(rows, min(4, triton.next_power_of_2(num_heads)), 4)


def launch(kernel, config, tensors, cos, sin, *, interleaved, eps=0.0, **constants):
    """Run a row kernel over tensors [T, H, D]; cos None: no rotary."""
    x = tensors[0]
    rows, heads, head_dim = x.shape
    config = config or default(head_dim, heads)
    groups = triton.cdiv(heads, config.heads)
    rotary = cos is not None
    c, s = (cos, sin) if rotary else (x, x)
    strides = [step for t in tensors for step in t.stride()[:2]]
    kernel[(triton.cdiv(rows, config.rows) * groups,)](
        *tensors, c, s, *strides, c.stride(0), s.stride(0), rows, heads, groups, eps, ROTARY=rotary,
        INTERLEAVED=interleaved, HEAD_DIM=head_dim, HALF=triton.next_power_of_2(head_dim) // 2, ROWS=config.rows,
        HEADS=config.heads, num_warps=config.num_warps, **constants,
    )  # fmt: skip


def rotate_with(config, x, cos, sin, *, interleaved, back=False, out=None):
    """R(theta) x (back: R(-theta) x) of x [T, H, D]; `out` may be x itself. Returns out."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.numel():
        cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (cos, sin))
        launch(rows_forward_kernel, config, (x, out), cos, sin, interleaved=interleaved, NORM="none", BACK=back)
    return out


def forward(x, cos, sin, *, interleaved):
    """R(theta) x for x [T, H, D] bfloat16, float16 or float32, cos and sin float32 [T, D/2]; one rounding."""
    return rotate_with(None, x, cos, sin, interleaved=interleaved)


def backward(dy, cos, sin, *, interleaved, out=None):
    """dx = R(-theta) dy, written to `out` [T, H, D] (strided) if there is one."""
    return rotate_with(None, dy, cos, sin, interleaved=interleaved, back=True, out=out)


def unsupported(case: Case) -> str | None:
    """Why this implementation cannot run `case`, or None."""
    if case.device_type != "cuda" and isinstance(rows_forward_kernel, triton.JITFunction):
        return f"needs a CUDA device, not {case.device_type}"
    if case.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {case.dtype}; allowed: bfloat16, float16, float32"
    if case.head_dim > 1024:
        return f"head_dim {case.head_dim}; allowed: up to 1024"
    return None


IMPLEMENTATION = Implementation("triton", forward, backward, unsupported)
