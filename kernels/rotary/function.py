"""apply_rotary as torch.library ops: what torch.compile, export and autograd see.

gem_kernels::rotary and gem_kernels::rotary_backward serve every implementation: its resolved name is an argument.
Neither counts FLOPs: a rotation is no matrix product, and the convention counts those alone.
"""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from ..validation import unit_last_stride

_TABLES = "Tensor cos, Tensor sin, bool interleaved, str impl"


def _implementation(impl: str):
    from .api import REGISTRY

    loaded = REGISTRY.load(impl)
    if isinstance(loaded, str):
        raise ValueError(f"rotary: impl {impl!r} {loaded}")
    return loaded


@torch.library.custom_op("gem_kernels::rotary", mutates_args=(), schema=f"(Tensor x, {_TABLES}) -> Tensor")
def rotary_op(x, cos, sin, interleaved, impl):
    return _implementation(impl).forward(x, cos, sin, interleaved=interleaved).contiguous()


@torch.library.custom_op("gem_kernels::rotary_backward", mutates_args=(), schema=f"(Tensor dy, {_TABLES}) -> Tensor")
def rotary_backward_op(dy, cos, sin, interleaved, impl):
    return _implementation(impl).backward(dy, cos, sin, interleaved=interleaved).contiguous()


@rotary_op.register_fake
@rotary_backward_op.register_fake
def _(x, cos, sin, interleaved, impl):
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output):
    _, cos, sin, interleaved, impl = inputs
    ctx.save_for_backward(cos, sin)
    ctx.settings = interleaved, impl


def _backward(ctx, dy):
    return rotary_backward_op(unit_last_stride(dy), *ctx.saved_tensors, *ctx.settings), None, None, None, None


def _twice(ctx, dx):
    # The backward pass is linear in dy, so its own gradient is the forward rotation.
    return rotary_op(unit_last_stride(dx), *ctx.saved_tensors, *ctx.settings), None, None, None, None


rotary_op.register_autograd(_backward, setup_context=_setup_context)
rotary_backward_op.register_autograd(_twice, setup_context=_setup_context)


@register_flop_formula([torch.ops.gem_kernels.rotary, torch.ops.gem_kernels.rotary_backward], get_raw=True)
def _no_flops(*_, **__) -> int:
    return 0
