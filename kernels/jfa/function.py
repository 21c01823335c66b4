"""jagged_attention as torch.library ops: what torch.compile, export, autograd and the FLOP counter see.

Two ops, gem_kernels::jagged_attention and gem_kernels::jagged_attention_backward, serve every implementation: its
resolved name is an argument, and the FLOP formula depends on the mathematics alone. Arguments are validated before
they come here (api.py).
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import flops
from ..schedule import restore
from ..validation import unit_last_stride
from .bias import Bias

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, {saved}Tensor? q_offsets, Tensor kv_offsets, "
    "Tensor? bias_table, Tensor? bias_times, float scale, int? window, int? max_q_len, int? max_kv_len, "
    "Tensor? tiles, Tensor? program_offsets, int[] blocks, str impl"
)


def _implementation(impl: str):
    from .api import REGISTRY

    loaded = REGISTRY.load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"jagged_attention: impl {impl!r} {loaded}")
    return loaded


def _keywords(bias_table, bias_times, scale, window, max_q_len, max_kv_len, tiles, program_offsets, blocks) -> dict:
    return {
        "scale": scale,
        "window": window,
        "bias": Bias.of(bias_table, bias_times),
        "max_q_len": max_q_len,
        "max_kv_len": max_kv_len,
        "schedule": restore(tiles, program_offsets, blocks),
    }


@torch.library.custom_op(
    "gem_kernels::jagged_attention",
    mutates_args=(),
    schema=f"({_ARGUMENTS.format(saved='')}) -> (Tensor, Tensor)",
)
def jagged_attention_op(q, k, v, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    o, lse = _implementation(impl).forward(q, k, v, q_offsets, kv_offsets, **_keywords(*settings))
    return o.contiguous(), lse.contiguous()


@jagged_attention_op.register_fake
def _(q, k, v, q_offsets, kv_offsets, *settings):
    # Shared queries [Lq, H, D] give one output per sequence; otherwise the output looks like q.
    shape = q.shape if q_offsets is not None else (kv_offsets.shape[0] - 1, *q.shape)
    rows = q.shape[0] if q_offsets is not None else shape[0] * shape[1]
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(shape), q.new_empty((q.shape[1], rows), dtype=lse_dtype)


@torch.library.custom_op(
    "gem_kernels::jagged_attention_backward",
    mutates_args=(),
    schema=f"(Tensor do, {_ARGUMENTS.format(saved='Tensor o, Tensor lse, ')}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def jagged_attention_backward_op(do, q, k, v, o, lse, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    gradients = _implementation(impl).backward(do, q, k, v, o, lse, q_offsets, kv_offsets, **_keywords(*settings))
    # An op's outputs are tensors, so that without a bias the fourth is an empty one.
    dq, dk, dv, dtable = gradients
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), q.new_empty(0) if dtable is None else dtable


@jagged_attention_backward_op.register_fake
def _(do, q, k, v, o, lse, q_offsets, kv_offsets, bias_table, *settings):
    # Gradients are packed even where the inputs are views of a wider buffer.
    dtable = q.new_empty(0) if bias_table is None else bias_table.new_empty(bias_table.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dtable


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, bias_table, bias_times, *settings = inputs
    *settings, tiles, program_offsets, blocks, impl = settings
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, q_offsets, kv_offsets, bias_table, bias_times, tiles, program_offsets)
    ctx.settings, ctx.blocks, ctx.impl = settings, blocks, impl
    ctx.mark_non_differentiable(lse)


def _backward(ctx, do, _):
    *saved, tiles, program_offsets = ctx.saved_tensors
    do = unit_last_stride(do)
    dq, dk, dv, dtable = jagged_attention_backward_op(
        do, *saved, *ctx.settings, tiles, program_offsets, ctx.blocks, ctx.impl
    )
    has_table = saved[7] is not None
    return dq, dk, dv, None, None, dtable if has_table else None, *[None] * 9


jagged_attention_op.register_autograd(_backward, setup_context=_setup_context)


def _count(phase, q, q_offsets, kv_offsets, window, max_q_len, max_kv_len) -> int:
    q_lengths, kv_lengths = flops.lengths_of_call(q, q_offsets, kv_offsets, max_q_len, max_kv_len)
    return flops.jagged_attention(q_lengths, kv_lengths, q.shape[1], q.shape[2], window=window, phase=phase)


@register_flop_formula(torch.ops.gem_kernels.jagged_attention, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, table, times, scale, window, max_q_len, max_kv_len, *_, **__) -> int:
    return _count("fwd", q, q_offsets, kv_offsets, window, max_q_len, max_kv_len)


@register_flop_formula(torch.ops.gem_kernels.jagged_attention_backward, get_raw=True)
def _backward_flops(
    do, q, k, v, o, lse, q_offsets, kv_offsets, table, times, scale, window, max_q_len, max_kv_len, *_, **__
) -> int:
    return _count("bwd", q, q_offsets, kv_offsets, window, max_q_len, max_kv_len)
