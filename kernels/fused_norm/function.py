"""The norms as torch.library ops: what torch.compile, export, autograd and the FLOP counter see.

gem_kernels::{norm, norm_rotary, pffn} and their _backward serve every implementation: its resolved name is an argument.
Only pffn counts FLOPs, those of its two matrix products: the convention counts nothing else.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import flops
from ..validation import accumulation_dtype, unit_last_stride


def _implementation(op: str, impl: str):
    from .api import REGISTRIES

    loaded = REGISTRIES[op].load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"{op}: impl {impl!r} {loaded}")
    return loaded


def _packed(tensors):
    return tuple(x.contiguous() for x in tensors)


def _statistics(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return x.new_empty(shape, dtype=accumulation_dtype(x.dtype))


# norm


@torch.library.custom_op(
    "gem_kernels::norm",
    mutates_args=(),
    schema="(Tensor x, str kind, float eps, str impl) -> (Tensor, Tensor, Tensor)",
)
def norm_op(x, kind, eps, impl):
    return _packed(_implementation("norm", impl).forward(x, kind=kind, eps=eps))


@norm_op.register_fake
def _(x, kind, eps, impl):
    return x.new_empty(x.shape), _statistics(x, x.shape[0]), _statistics(x, x.shape[0])


@torch.library.custom_op(
    "gem_kernels::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor mean, Tensor rstd, str kind, str impl) -> Tensor",
)
def norm_backward_op(dy, x, mean, rstd, kind, impl):
    return _implementation("norm", impl).backward(dy, x, mean, rstd, kind=kind).contiguous()


@norm_backward_op.register_fake
def _(dy, x, *_):
    return x.new_empty(x.shape)


def _norm_context(ctx, inputs, output):
    x, kind, _, impl = inputs
    ctx.save_for_backward(x, *output[1:])
    ctx.settings = kind, impl
    ctx.mark_non_differentiable(*output[1:])


def _norm_backward(ctx, dy, *_):
    return norm_backward_op(unit_last_stride(dy), *ctx.saved_tensors, *ctx.settings), None, None, None


norm_op.register_autograd(_norm_backward, setup_context=_norm_context)


# norm_rotary


@torch.library.custom_op(
    "gem_kernels::norm_rotary",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved, str kind, float eps, str impl)"
    " -> (Tensor, Tensor, Tensor)",
)
def norm_rotary_op(x, cos, sin, interleaved, kind, eps, impl):
    implementation = _implementation("norm_rotary", impl)
    return _packed(implementation.forward(x, cos, sin, interleaved=interleaved, kind=kind, eps=eps))


@norm_rotary_op.register_fake
def _(x, *_):
    return x.new_empty(x.shape), _statistics(x, *x.shape[:2]), _statistics(x, *x.shape[:2])


@torch.library.custom_op(
    "gem_kernels::norm_rotary_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor cos, Tensor sin, bool interleaved, "
    "str kind, str impl) -> Tensor",
)
def norm_rotary_backward_op(dy, x, mean, rstd, cos, sin, interleaved, kind, impl):
    implementation = _implementation("norm_rotary", impl)
    return implementation.backward(dy, x, mean, rstd, cos, sin, interleaved=interleaved, kind=kind).contiguous()


@norm_rotary_backward_op.register_fake
def _(dy, x, *_):
    return x.new_empty(x.shape)


def _norm_rotary_context(ctx, inputs, output):
    x, cos, sin, interleaved, kind, _, impl = inputs
    ctx.save_for_backward(x, *output[1:], cos, sin)
    ctx.settings = interleaved, kind, impl
    ctx.mark_non_differentiable(*output[1:])


def _norm_rotary_backward(ctx, dy, *_):
    return norm_rotary_backward_op(unit_last_stride(dy), *ctx.saved_tensors, *ctx.settings), *[None] * 6


norm_rotary_op.register_autograd(_norm_rotary_backward, setup_context=_norm_rotary_context)


# pffn


@torch.library.custom_op(
    "gem_kernels::pffn",
    mutates_args=(),
    schema="(Tensor s, Tensor k, Tensor v, Tensor q_offsets, Tensor kv_offsets, str activation, float scale, "
    "float eps, int? max_q_len, int? max_kv_len, str impl) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def pffn_op(s, k, v, q_offsets, kv_offsets, activation, scale, eps, max_q_len, max_kv_len, impl):
    outputs = _implementation("pffn", impl).forward(
        s,
        k,
        v,
        q_offsets,
        kv_offsets,
        activation=activation,
        scale=scale,
        eps=eps,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )
    return _packed(outputs)


@pffn_op.register_fake
def _(s, *_):
    return s.new_empty(s.shape), s.new_empty(s.shape), *(_statistics(s, s.shape[0]) for _ in range(3))


@torch.library.custom_op(
    "gem_kernels::pffn_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor s, Tensor k, Tensor v, Tensor u, Tensor mean, Tensor rstd, Tensor rstd_u, "
    "Tensor q_offsets, Tensor kv_offsets, str activation, float scale, int? max_q_len, int? max_kv_len, str impl)"
    " -> (Tensor, Tensor, Tensor)",
)
def pffn_backward_op(
    dout, s, k, v, u, mean, rstd, rstd_u, q_offsets, kv_offsets, activation, scale, max_q_len, max_kv_len, impl
):
    gradients = _implementation("pffn", impl).backward(
        dout,
        s,
        k,
        v,
        u,
        mean,
        rstd,
        rstd_u,
        q_offsets,
        kv_offsets,
        activation=activation,
        scale=scale,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
    )
    return _packed(gradients)


@pffn_backward_op.register_fake
def _(dout, s, k, v, *_):
    return s.new_empty(s.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _pffn_context(ctx, inputs, output):
    s, k, v, q_offsets, kv_offsets, activation, scale, _, *rest = inputs
    ctx.save_for_backward(s, k, v, *output[1:], q_offsets, kv_offsets)
    ctx.settings = activation, scale, *rest
    ctx.mark_non_differentiable(*output[1:])


def _pffn_backward(ctx, dout, *_):
    return *pffn_backward_op(unit_last_stride(dout), *ctx.saved_tensors, *ctx.settings), *[None] * 8


pffn_op.register_autograd(_pffn_backward, setup_context=_pffn_context)


def _count(phase, s, q_offsets, kv_offsets, max_q_len, max_kv_len) -> int:
    lengths = flops.lengths_of_call(s, q_offsets, kv_offsets, max_q_len, max_kv_len)
    return flops.gdpa(*lengths, s.shape[1], s.shape[2], phase=phase)


@register_flop_formula(torch.ops.gem_kernels.pffn, get_raw=True)
def _forward_flops(s, k, v, q_offsets, kv_offsets, activation, scale, eps, max_q_len, max_kv_len, *_, **__) -> int:
    return _count("fwd", s, q_offsets, kv_offsets, max_q_len, max_kv_len)


@register_flop_formula(torch.ops.gem_kernels.pffn_backward, get_raw=True)
def _backward_flops(
    dout, s, k, v, u, mean, rstd, rstd_u, q_offsets, kv_offsets, activation, scale, max_q_len, max_kv_len, *_, **__
) -> int:
    return _count("bwd", s, q_offsets, kv_offsets, max_q_len, max_kv_len)


@register_flop_formula(
    [
        torch.ops.gem_kernels.norm,
        torch.ops.gem_kernels.norm_backward,
        torch.ops.gem_kernels.norm_rotary,
        torch.ops.gem_kernels.norm_rotary_backward,
    ],
    get_raw=True,
)
def _no_flops(*_, **__) -> int:
    return 0
