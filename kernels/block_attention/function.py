"""block_attention as torch.library ops: what torch.compile, export, autograd and the FLOP counter see.

Two ops, gem_kernels::block_attention and gem_kernels::block_attention_backward, serve every implementation: its
resolved name is an argument, and the FLOP formula depends on the mathematics alone. Arguments are validated before
they come here (api.py). A Rotary travels as its tables, its pairing and a string of the tensors that it is on.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import flops
from ..rotary.api import Rotary
from ..validation import unit_last_stride

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {saved}Tensor offsets, int block_size, float scale, "
    "Tensor? cos, Tensor? sin, bool interleaved, str rotary_on, str impl"
)


def _implementation(impl: str):
    from .api import REGISTRY

    loaded = REGISTRY.load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"block_attention: impl {impl!r} {loaded}")
    return loaded


def _keywords(block_size, scale, cos, sin, interleaved, rotary_on) -> dict:
    rotary = None if cos is None else Rotary(cos, sin, interleaved, tuple(rotary_on))
    return {"block_size": block_size, "scale": scale, "rotary": rotary}


@torch.library.custom_op(
    "gem_kernels::block_attention", mutates_args=(), schema=f"({_ARGUMENTS.format(saved='')}) -> Tensor"
)
def block_attention_op(q, k, v, offsets, *settings):
    *settings, impl = settings
    return _implementation(impl).forward(q, k, v, offsets, **_keywords(*settings)).contiguous()


@block_attention_op.register_fake
def _(q, k, v, offsets, *settings):
    return q.new_empty(q.shape)


@torch.library.custom_op(
    "gem_kernels::block_attention_backward",
    mutates_args=(),
    schema=f"(Tensor do, {_ARGUMENTS.format(saved='Tensor o, ')}) -> (Tensor, Tensor, Tensor)",
)
def block_attention_backward_op(do, q, k, v, o, offsets, *settings):
    *settings, impl = settings
    gradients = _implementation(impl).backward(do, q, k, v, o, offsets, **_keywords(*settings))
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv


@block_attention_backward_op.register_fake
def _(do, q, k, v, *settings):
    # Gradients are packed even where the inputs are views of a wider buffer.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, offsets, block_size, scale, cos, sin, interleaved, rotary_on, impl = inputs
    ctx.save_for_backward(q, k, v, output, offsets, cos, sin)
    ctx.settings = (block_size, scale), (interleaved, rotary_on, impl)


def _backward(ctx, do):
    *saved, cos, sin = ctx.saved_tensors
    sizes, rest = ctx.settings
    gradients = block_attention_backward_op(unit_last_stride(do), *saved, *sizes, cos, sin, *rest)
    return *gradients, *[None] * 8


block_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _count(phase, q, offsets, block_size) -> int:
    lengths, _ = flops.lengths_of_call(q, offsets, offsets)
    return flops.block_attention(lengths, q.shape[1], q.shape[2], block_size=block_size, phase=phase)


@register_flop_formula(torch.ops.gem_kernels.block_attention, get_raw=True)
def _forward_flops(q, k, v, offsets, block_size, *_, **__) -> int:
    return _count("fwd", q, offsets, block_size)


@register_flop_formula(torch.ops.gem_kernels.block_attention_backward, get_raw=True)
def _backward_flops(do, q, k, v, o, offsets, block_size, *_, **__) -> int:
    return _count("bwd", q, offsets, block_size)
