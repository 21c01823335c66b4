"""The norms as torch.library ops: what torch.compile, export, autograd and the FLOP counter see.

gem_kernels::{norm, norm_rotary, pffn} and their _backward serve every implementation: its resolved name is an argument.
Only pffn counts FLOPs, those of its two matrix products: the convention counts nothing else.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import flops
from ..gdpa.function import _implementation as gdpa_implementation
from ..validation import unit_last_stride


def _implementation(op: str, impl: str):
    from .api import REGISTRIES

    loaded = REGISTRIES[op].load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"{op}: impl {impl!r} {loaded}")
    return loaded


# norm


@torch.library.custom_op(
    "gem_kernels::norm", mutates_args=(), schema="(Tensor x, str kind, float eps, str impl) -> Tensor"
)
def norm_op(x, kind, eps, impl):
    return _implementation("norm", impl).forward(x, kind=kind, eps=eps).contiguous()


@torch.library.custom_op(
    "gem_kernels::norm_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, str kind, float eps, str impl) -> Tensor",
)
def norm_backward_op(dy, x, kind, eps, impl):
    return _implementation("norm", impl).backward(dy, x, kind=kind, eps=eps).contiguous()


def _norm_context(ctx, inputs, output):
    x, *ctx.settings = inputs
    ctx.save_for_backward(x)


def _norm_backward(ctx, dy):
    return norm_backward_op(unit_last_stride(dy), *ctx.saved_tensors, *ctx.settings), None, None, None


norm_op.register_autograd(_norm_backward, setup_context=_norm_context)


# norm_rotary


@torch.library.custom_op(
    "gem_kernels::norm_rotary",
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, bool interleaved, str kind, float eps, str impl) -> Tensor",
)
def norm_rotary_op(x, cos, sin, interleaved, kind, eps, impl):
    implementation = _implementation("norm_rotary", impl)
    return implementation.forward(x, cos, sin, interleaved=interleaved, kind=kind, eps=eps).contiguous()


@torch.library.custom_op(
    "gem_kernels::norm_rotary_backward",
    mutates_args=(),
    schema="(Tensor dy, Tensor x, Tensor cos, Tensor sin, bool interleaved, str kind, float eps, str impl) -> Tensor",
)
def norm_rotary_backward_op(dy, x, cos, sin, interleaved, kind, eps, impl):
    implementation = _implementation("norm_rotary", impl)
    return implementation.backward(dy, x, cos, sin, interleaved=interleaved, kind=kind, eps=eps).contiguous()


@norm_op.register_fake
@norm_backward_op.register_fake
@norm_rotary_op.register_fake
@norm_rotary_backward_op.register_fake
def _(x, *_):
    return x.new_empty(x.shape)


def _norm_rotary_context(ctx, inputs, output):
    x, cos, sin, *ctx.settings = inputs
    ctx.save_for_backward(x, cos, sin)


def _norm_rotary_backward(ctx, dy):
    return norm_rotary_backward_op(unit_last_stride(dy), *ctx.saved_tensors, *ctx.settings), *[None] * 6


norm_rotary_op.register_autograd(_norm_rotary_backward, setup_context=_norm_rotary_context)


# pffn

_PFFN = (
    "Tensor s, Tensor k, Tensor v, {saved}Tensor q_offsets, Tensor kv_offsets, str activation, float scale, float eps, "
    "int? max_q_len, int? max_kv_len, str gdpa_impl, str impl"
)


def _pffn_keywords(activation, scale, eps, max_q_len, max_kv_len, gdpa_impl) -> dict:
    return {
        "gdpa": gdpa_implementation(gdpa_impl),
        "activation": activation,
        "scale": scale,
        "eps": eps,
        "max_q_len": max_q_len,
        "max_kv_len": max_kv_len,
    }


# Implementations that keep q = layer(s) and 1 / sigma for the backward pass, and s not; for the others they are empty.
KEEP_QUERIES = ("triton",)


@torch.library.custom_op(
    "gem_kernels::pffn",
    mutates_args=(),
    schema=f"({_PFFN.format(saved='')}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def pffn_op(s, k, v, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    found = _implementation("pffn", impl).forward(s, k, v, q_offsets, kv_offsets, **_pffn_keywords(*settings))
    if impl not in KEEP_QUERIES:
        found = *found, s.new_empty(0), s.new_empty(0, dtype=torch.float32)
    out, o, q, inverse = (x.contiguous() for x in found)
    return out, o, q, inverse


@pffn_op.register_fake
def _(s, *settings):
    keeps = settings[-1] in KEEP_QUERIES
    q = s.new_empty(s.shape if keeps else (0,))
    return s.new_empty(s.shape), s.new_empty(s.shape), q, s.new_empty(s.shape[0] if keeps else 0, dtype=torch.float32)


@torch.library.custom_op(
    "gem_kernels::pffn_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {_PFFN.format(saved='Tensor o, Tensor inverse, ')}) -> (Tensor, Tensor, Tensor)",
)
def pffn_backward_op(dout, rows, k, v, o, inverse, q_offsets, kv_offsets, *settings):
    *settings, impl = settings
    implementation, keywords = _implementation("pffn", impl), _pffn_keywords(*settings)
    if impl in KEEP_QUERIES:
        keywords["inverse"] = inverse
    gradients = implementation.backward(dout, rows, k, v, o, q_offsets, kv_offsets, **keywords)
    ds, dk, dv = (gradient.contiguous() for gradient in gradients)
    return ds, dk, dv


@pffn_backward_op.register_fake
def _(dout, rows, k, v, *_):
    return rows.new_empty(rows.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _pffn_context(ctx, inputs, output):
    s, k, v, q_offsets, kv_offsets, *ctx.settings = inputs
    _, o, q, inverse = output
    rows = q if ctx.settings[-1] in KEEP_QUERIES else s
    ctx.save_for_backward(rows, k, v, o, inverse, q_offsets, kv_offsets)
    ctx.mark_non_differentiable(o, q, inverse)
    ctx.set_materialize_grads(False)  # else autograd fills zeros for the three that have no gradient


def _pffn_backward(ctx, dout, *_):
    if dout is None:  # nothing was made of the output
        return (None,) * 12
    return *pffn_backward_op(unit_last_stride(dout), *ctx.saved_tensors, *ctx.settings), *[None] * 9


pffn_op.register_autograd(_pffn_backward, setup_context=_pffn_context)


def _count(phase, s, q_offsets, kv_offsets, max_q_len, max_kv_len) -> int:
    lengths = flops.lengths_of_call(s, q_offsets, kv_offsets, max_q_len, max_kv_len)
    return flops.gdpa(*lengths, s.shape[1], s.shape[2], phase=phase)


@register_flop_formula(torch.ops.gem_kernels.pffn, get_raw=True)
def _forward_flops(s, k, v, q_offsets, kv_offsets, activation, scale, eps, max_q_len, max_kv_len, *_, **__) -> int:
    return _count("fwd", s, q_offsets, kv_offsets, max_q_len, max_kv_len)


@register_flop_formula(torch.ops.gem_kernels.pffn_backward, get_raw=True)
def _backward_flops(
    dout, rows, k, v, o, inverse, q_offsets, kv_offsets, activation, scale, eps, max_q_len, max_kv_len, *_, **__
) -> int:
    return _count("bwd", rows, q_offsets, kv_offsets, max_q_len, max_kv_len)


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
