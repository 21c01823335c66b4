"""Rotary embedding in plain torch: pairs of columns turned by an angle per row.

    y_a = x_a cos - x_b sin,   y_b = x_b cos + x_a sin

interleaved: pair p is columns (2p, 2p + 1). half: pair p is columns (p, p + D/2). The turn is orthogonal, so the
gradient is turned back by the negative angle: the same formula with -sin. Float32 for float32, bfloat16 and float16
(one rounding at the end); float64 for float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..registry import Case, Implementation


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """R(theta) x for x [T, H, D] and cos, sin [T, D/2], in float32 (float64 for float64 x): the caller rounds."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, cos, sin = x.to(wide), cos.to(wide)[:, None], sin.to(wide)[:, None]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """R(-theta) x: the inverse of `rotate`, and its backward pass."""
    return rotate(x, cos, -sin, interleaved)


def forward(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """R(theta) x, like x and contiguous. Differentiable by autograd."""
    return rotate(x, cos, sin, interleaved).to(x.dtype)


def backward(dy: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, out: Tensor | None = None) -> Tensor:
    """dx = R(-theta) dy, like dy and contiguous, or written to `out`."""
    dx = rotate_back(dy, cos, sin, interleaved).to(dy.dtype)
    return dx if out is None else out.copy_(dx)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATION = Implementation("reference", forward, backward, _unsupported)
