"""Block attention of a fused qkv buffer: one packed gradient back, written where it belongs.

The projection before attention has one output and wants one gradient. Where an implementation can write dq, dk and dv
to given places (backward(..., out=)), the pass over memory that would put the three together is saved.
"""

from __future__ import annotations

import inspect

import torch
from torch.utils.flop_counter import register_flop_formula

from ..rotary.api import Rotary
from ..selection import static
from ..validation import unit_last_stride
from .api import _check, _select
from .function import _count, _implementation, _keywords

_ARGUMENTS = (
    "Tensor qkv, {saved}Tensor offsets, int block_size, float scale, Tensor? cos, Tensor? sin, bool interleaved, "
    "str rotary_on, str impl"
)


@torch.library.custom_op(
    "gem_kernels::block_attention_qkv", mutates_args=(), schema=f"({_ARGUMENTS.format(saved='')}) -> Tensor"
)
def block_attention_qkv_op(qkv, offsets, *settings):
    *settings, impl = settings
    return _implementation(impl).forward(*qkv.unbind(1), offsets, **_keywords(*settings)).contiguous()


@block_attention_qkv_op.register_fake
def _(qkv, offsets, *settings):
    rows, _, heads, dim = qkv.shape
    return qkv.new_empty((rows, heads, dim))


@torch.library.custom_op(
    "gem_kernels::block_attention_qkv_backward",
    mutates_args=(),
    schema=f"(Tensor do, {_ARGUMENTS.format(saved='Tensor o, ')}) -> Tensor",
)
def block_attention_qkv_backward_op(do, qkv, o, offsets, *settings):
    *settings, impl = settings
    backward = _implementation(impl).backward
    packed = qkv.new_empty(qkv.shape)
    if "out" in inspect.signature(backward).parameters:
        backward(do, *qkv.unbind(1), o, offsets, **_keywords(*settings), out=packed.unbind(1))
    else:
        torch.stack(backward(do, *qkv.unbind(1), o, offsets, **_keywords(*settings)), 1, out=packed)
    return packed


@block_attention_qkv_backward_op.register_fake
def _(do, qkv, *settings):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, offsets, block_size, scale, cos, sin, interleaved, rotary_on, impl = inputs
    ctx.save_for_backward(qkv, output, offsets, cos, sin)
    ctx.settings = (block_size, scale), (interleaved, rotary_on, impl)


def _backward(ctx, do):
    *saved, cos, sin = ctx.saved_tensors
    sizes, rest = ctx.settings
    return block_attention_qkv_backward_op(unit_last_stride(do), *saved, *sizes, cos, sin, *rest), *[None] * 8


block_attention_qkv_op.register_autograd(_backward, setup_context=_setup_context)


def block_attention_qkv(
    qkv: torch.Tensor,
    offsets: torch.Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """`block_attention` of q, k, v = qkv.unbind(1), as one op in the packed buffer qkv [T, 3, H, D].

    Source, arguments, results and errors as there; the gradient is one contiguous tensor like qkv, zeros in the rows
    past offsets[-1]. Returns o [T, H, D]. ValueError: also a qkv of another shape.
    """
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4 or qkv.shape[1] != 3:
        kind = f"of shape {tuple(qkv.shape)}" if isinstance(qkv, torch.Tensor) else type(qkv).__name__
        raise ValueError(f"block_attention: qkv is {kind}; allowed: a floating tensor [rows, 3, heads, head_dim]")
    scale, features = _check(*qkv.unbind(1), offsets, block_size, scale, rotary)
    tables = (None, None, True, "")
    if rotary is not None:
        tables = rotary.cos, rotary.sin, rotary.interleaved, "".join(rotary.on)
    name = _select(impl, *static(qkv), features)
    return block_attention_qkv_op(unit_last_stride(qkv), offsets, block_size, scale, *tables, name)


@register_flop_formula(torch.ops.gem_kernels.block_attention_qkv, get_raw=True)
def _forward_flops(qkv, offsets, block_size, *_, **__) -> int:
    return _count("fwd", qkv[:, 0], offsets, block_size)


@register_flop_formula(torch.ops.gem_kernels.block_attention_qkv_backward, get_raw=True)
def _backward_flops(do, qkv, o, offsets, block_size, *_, **__) -> int:
    return _count("bwd", qkv[:, 0], offsets, block_size)
