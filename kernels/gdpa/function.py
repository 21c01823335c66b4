"""gdpa as torch.library ops: what torch.compile, export, autograd and the FLOP counter see.

Two ops, gem_kernels::gdpa and gem_kernels::gdpa_backward, serve every implementation: its resolved name is an
argument, and the FLOP formula depends on the mathematics alone. Arguments are validated before they come here
(api.py).
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import flops
from ..schedule import restore
from ..validation import unit_last_stride

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_offsets, Tensor kv_offsets, str activation, float scale, "
    "int? max_q_len, int? max_kv_len, Tensor? tiles, Tensor? program_offsets, int[] blocks, str impl"
)


def _implementation(impl: str):
    from .api import REGISTRY

    loaded = REGISTRY.load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"gdpa: impl {impl!r} {loaded}")
    return loaded


def _keywords(activation, scale, max_q_len, max_kv_len, tiles, program_offsets, blocks) -> dict:
    return {
        "activation": activation,
        "scale": scale,
        "max_q_len": max_q_len,
        "max_kv_len": max_kv_len,
        "schedule": restore(tiles, program_offsets, blocks),
    }


@torch.library.custom_op("gem_kernels::gdpa", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor")
def gdpa_op(q, k, v, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    return _implementation(impl).forward(q, k, v, q_offsets, kv_offsets, **_keywords(*settings)).contiguous()


@gdpa_op.register_fake
def _(q, k, v, q_offsets, kv_offsets, *settings):
    # Shared queries [Lq, H, D] give one output per sequence; otherwise the output looks like q.
    return q.new_empty(q.shape if q_offsets is not None else (kv_offsets.shape[0] - 1, *q.shape))


@torch.library.custom_op(
    "gem_kernels::gdpa_backward", mutates_args=(), schema=f"(Tensor do, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)"
)
def gdpa_backward_op(do, q, k, v, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    gradients = _implementation(impl).backward(do, q, k, v, q_offsets, kv_offsets, **_keywords(*settings))
    dq, dk, dv = (gradient.contiguous() for gradient in gradients)
    return dq, dk, dv


@gdpa_backward_op.register_fake
def _(do, q, k, v, *settings):
    # Gradients are packed even where the inputs are views of a wider buffer.
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, *settings, tiles, program_offsets, blocks, impl = inputs
    ctx.save_for_backward(q, k, v, q_offsets, kv_offsets, tiles, program_offsets)
    ctx.settings, ctx.blocks, ctx.impl = settings, blocks, impl


def _backward(ctx, do):
    *saved, tiles, program_offsets = ctx.saved_tensors
    gradients = gdpa_backward_op(
        unit_last_stride(do), *saved, *ctx.settings, tiles, program_offsets, ctx.blocks, ctx.impl
    )
    return *gradients, *[None] * 10


gdpa_op.register_autograd(_backward, setup_context=_setup_context)


def _count(phase, q, q_offsets, kv_offsets, max_q_len, max_kv_len) -> int:
    lengths = flops.lengths_of_call(q, q_offsets, kv_offsets, max_q_len, max_kv_len)
    return flops.gdpa(*lengths, q.shape[1], q.shape[2], phase=phase)


@register_flop_formula(torch.ops.gem_kernels.gdpa, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, activation, scale, max_q_len, max_kv_len, *_, **__) -> int:
    return _count("fwd", q, q_offsets, kv_offsets, max_q_len, max_kv_len)


@register_flop_formula(torch.ops.gem_kernels.gdpa_backward, get_raw=True)
def _backward_flops(do, q, k, v, q_offsets, kv_offsets, activation, scale, max_q_len, max_kv_len, *_, **__) -> int:
    return _count("bwd", q, q_offsets, kv_offsets, max_q_len, max_kv_len)
