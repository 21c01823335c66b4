"""Rotary of a fused qkv buffer: three turned tensors out, and one packed gradient back.

Attention needs q, k and v on their own and gives three gradients; the projection before it has one output and wants one
gradient. Turning them separately and writing each gradient straight to its place saves the pass over memory that would
put the three together.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from ..selection import static
from ..validation import FLOAT_DTYPES, unit_last_stride
from .api import _select, check_tables
from .function import _TABLES, _implementation, _no_flops


@torch.library.custom_op(
    "gem_kernels::rotary_qkv", mutates_args=(), schema=f"(Tensor qkv, {_TABLES}) -> (Tensor, Tensor, Tensor)"
)
def rotary_qkv_op(qkv, cos, sin, interleaved, impl):
    forward = _implementation(impl).forward
    q, k, v = (forward(x, cos, sin, interleaved=interleaved).contiguous() for x in qkv.unbind(1))
    return q, k, v


@rotary_qkv_op.register_fake
def _(qkv, cos, sin, interleaved, impl):
    rows, _, heads, dim = qkv.shape
    return tuple(qkv.new_empty((rows, heads, dim)) for _ in range(3))


@torch.library.custom_op(
    "gem_kernels::rotary_qkv_backward",
    mutates_args=(),
    schema=f"(Tensor dq, Tensor dk, Tensor dv, {_TABLES}) -> Tensor",
)
def rotary_qkv_backward_op(dq, dk, dv, cos, sin, interleaved, impl):
    rows, heads, dim = dq.shape
    packed = dq.new_empty((rows, 3, heads, dim))
    backward = _implementation(impl).backward
    for given, place in zip((dq, dk, dv), packed.unbind(1), strict=True):
        backward(given, cos, sin, interleaved=interleaved, out=place)
    return packed


@rotary_qkv_backward_op.register_fake
def _(dq, dk, dv, cos, sin, interleaved, impl):
    rows, heads, dim = dq.shape
    return dq.new_empty((rows, 3, heads, dim))


def _setup_context(ctx, inputs, output):
    _, cos, sin, interleaved, impl = inputs
    ctx.save_for_backward(cos, sin)
    ctx.settings = interleaved, impl


def _backward(ctx, dq, dk, dv):
    gradients = (unit_last_stride(x) for x in (dq, dk, dv))
    return rotary_qkv_backward_op(*gradients, *ctx.saved_tensors, *ctx.settings), None, None, None, None


rotary_qkv_op.register_autograd(_backward, setup_context=_setup_context)
register_flop_formula([torch.ops.gem_kernels.rotary_qkv, torch.ops.gem_kernels.rotary_qkv_backward], get_raw=True)(
    _no_flops
)


def apply_rotary_qkv(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True, *, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """R(theta) q, R(theta) k, R(theta) v of a packed buffer qkv [T, 3, H, D]; see `apply_rotary` for the turn.

    The source turns q, k and v. bfloat16, float16, float32 or float64, D even, any strides. cos, sin float32 [T, D/2],
    constants. Returns q, k, v [T, H, D], dtype of qkv, contiguous; differentiable once, the gradient is one tensor like
    qkv. ValueError: another shape, or as in `apply_rotary`.
    """
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4 or qkv.shape[1] != 3 or qkv.dtype not in FLOAT_DTYPES:
        kind = f"{qkv.dtype} of shape {tuple(qkv.shape)}" if isinstance(qkv, torch.Tensor) else type(qkv).__name__
        raise ValueError(f"rotary: qkv is {kind}; allowed: a floating tensor [rows, 3, heads, head_dim]")
    check_tables("rotary", qkv[:, 0], cos, sin)
    return rotary_qkv_op(unit_last_stride(qkv), cos, sin, interleaved, _select(impl, *static(qkv), ("rotary",)))
