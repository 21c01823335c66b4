"""Norms without affine parameters, fused with the rotary that follows: one pass over memory each way.

The source counts norms as about a fifth of a recommendation model's step, all of it memory traffic. Norm and rotary
together read x once and write y once; the backward pass reads dy and x, forms the statistics again and writes dx.
"""

from __future__ import annotations

import torch
import triton

from ..rotary.triton_kernels import rows_backward_kernel, rows_forward_kernel
from ..rotary.triton_rotary import Config, candidates, launch

__all__ = ["KINDS", "OVER", "Config", "candidates", "norm_backward", "norm_forward", "unsupported"]

KINDS = ("layer", "rms")
OVER = ("head", "token")


def _check(x, kind, over, cos):
    if kind not in KINDS:
        raise ValueError(f"norm: kind {kind!r}; allowed: {', '.join(KINDS)}")
    if over not in OVER:
        raise ValueError(f"norm: over {over!r}; allowed: {', '.join(OVER)}")
    if over == "token" and cos is not None:
        raise ValueError("norm: over 'token' with rotary; allowed: over 'head' with rotary")
    if x.shape[-1] % 2:
        raise ValueError(f"norm: head_dim {x.shape[-1]}; allowed: even")


def _view(x, over):
    """[T, H, D], or [T, 1, H D] when the norm spans all heads of a token."""
    return x if over == "head" else x.reshape(x.shape[0], 1, -1)


def norm_forward(x, cos=None, sin=None, *, kind, over="head", eps=1e-5, interleaved=True, config=None):
    """y = rotary(norm(x)) for x [T, H, D], bfloat16, float16 or float32, D even.

    kind "layer" (mean and variance) or "rms"; over "head" (each head's D columns) or "token" (all H D columns,
    without rotary). cos, sin: float32 [T, D/2], or None for the norm alone. Statistics and turn in float32, one
    rounding.
    """
    _check(x, kind, over, cos)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tensors = (_view(x, over), _view(y, over))
        turned = cos is not None and interleaved
        launch(rows_forward_kernel, config, tensors, cos, sin, interleaved=turned, eps=eps, NORM=kind, BACK=False)
    return y


def norm_backward(dy, x, cos=None, sin=None, *, kind, over="head", eps=1e-5, interleaved=True, config=None):
    """dx of `norm_forward` in x's type; the statistics are formed again from x."""
    _check(x, kind, over, cos)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        tensors = (_view(dy, over), _view(x, over), _view(dx, over))
        turned = cos is not None and interleaved
        launch(rows_backward_kernel, config, tensors, cos, sin, interleaved=turned, eps=eps, NORM=kind)
    return dx


def unsupported(device_type: str, dtype: torch.dtype, columns: int) -> str | None:
    """Why the kernels cannot run a norm over `columns` columns, or None."""
    if device_type != "cuda" and isinstance(rows_forward_kernel, triton.JITFunction):
        return f"needs a CUDA device, not {device_type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {dtype}; allowed: bfloat16, float16, float32"
    if columns > 8192:
        return f"{columns} columns; allowed: up to 8192"
    return None
