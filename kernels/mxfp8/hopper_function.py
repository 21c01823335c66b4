"""Attention and GDPA in format `hopper` as a `torch.library` op: forward in 8 bits, backward in the inputs' precision.

The forward pass runs on the 8-bit tensor cores of an H100 or H200 (attention_tlx.py) and in plain torch on a CPU. The
backward pass is that of `jagged_attention` and `gdpa` for the same tensors, with the output and row sums of the 8-bit
forward: a recipe of this format leaves dS and dO high.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..registry import Case
from ..selection import static
from . import hopper_attention

SOFTMAX = "softmax"
OPERANDS = ("q", "k", "v", "p")
ACTIVATIONS = ("gelu_tanh", "gelu_taylor6", "silu", "relu")  # |act(s)| <= |s| where they are meant to be used


def attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, *, activation: str, scale: float, recipe
) -> Tensor:
    """o [Tq, H, D] of q [Tq, H, D], k, v [Tkv, H, D]; checked tensors. activation: "softmax" or one of GDPA.

    ValueError: a recipe whose operands are not q, k, v and p, an activation without a bound, and on a GPU anything that
    `why_not` names.
    """
    if set(recipe.attention) != set(OPERANDS):
        raise ValueError(
            f"Recipe.attention: {', '.join(recipe.attention)}; allowed in format hopper: {', '.join(OPERANDS)} (the "
            "backward pass runs in the precision of its inputs)"
        )
    if activation != SOFTMAX and activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r}; allowed in format hopper: {', '.join(ACTIVATIONS)}")
    why = why_not(q)
    if why is not None:
        raise ValueError(f"mxfp8, format hopper: {why}")
    return torch.ops.gem_kernels.hopper_attention(q, k, v, q_offsets, kv_offsets, activation, float(scale))[0]


def why_not(q: Tensor) -> str | None:
    """Why the 8-bit kernels cannot run these tensors, or None. On a CPU the numbers are emulated."""
    return _why_not(*static(q))


@torch.compiler.assume_constant_result
def _why_not(device_type: str, index: int | None, dtype: torch.dtype, head_dim: int) -> str | None:
    if device_type == "cpu":
        return None
    capability = torch.cuda.get_device_capability(index)
    if capability != (9, 0):
        return f"needs compute capability (9, 0), not {capability}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {dtype}"
    if head_dim != 128:
        return f"needs head_dim 128, not {head_dim}"
    try:
        importlib.import_module(".attention_tlx", __package__)
    except ImportError as error:
        return f"needs TLX (fbtriton): {error}"
    return None


@torch.library.custom_op("gem_kernels::hopper_attention", mutates_args=())
def _attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, kv_offsets: Tensor, activation: str, scale: float
) -> tuple[Tensor, Tensor]:
    if activation == SOFTMAX and scale < 0:  # the maximum of scaled scores is the scaled maximum for a positive scale
        q, scale = -q, -scale
    operands = hopper_attention.quantize(q, k, v, kv_offsets, scales=hopper_attention.scales_for(activation))
    keywords = {"activation": activation, "scale": scale, "dtype": q.dtype}
    if not q.is_cuda:
        return hopper_attention.forward_plainly(operands, q_offsets, kv_offsets, **keywords)
    from . import attention_tlx

    return attention_tlx.forward_with(attention_tlx.Config(), operands, q_offsets, kv_offsets, **keywords)


@_attention.register_fake
def _(q, k, v, q_offsets, kv_offsets, activation, scale):
    rows = q.shape[0] if activation == SOFTMAX else 0
    return q.new_empty(q.shape), q.new_empty(q.shape[1], rows, dtype=torch.float32)


@torch.library.custom_op("gem_kernels::hopper_attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    kv_offsets: Tensor,
    activation: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    softmax = activation == SOFTMAX
    registry = importlib.import_module("..jfa.api" if softmax else "..gdpa.api", __package__).REGISTRY
    case = Case.of(q, features=frozenset({"cross"}), activation=None if softmax else activation)
    backward = registry.select("auto", case).backward
    saved, own = ((o, lse), {"window": None, "bias": None}) if softmax else ((), {"activation": activation})
    own |= {"scale": scale, "max_q_len": None, "max_kv_len": None, "schedule": None}
    return backward(do, q, k, v, *saved, q_offsets, kv_offsets, **own)[:3]


@_attention_backward.register_fake
def _(do, q, k, v, o, lse, q_offsets, kv_offsets, activation, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, q_offsets, kv_offsets, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, q_offsets, kv_offsets)


def _autograd_backward(ctx, do, _):
    grads = torch.ops.gem_kernels.hopper_attention_backward(do, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * 4


_attention.register_autograd(_autograd_backward, setup_context=_setup_context)


def _pairs(q_offsets: Tensor, kv_offsets: Tensor) -> int:
    return int((q_offsets.long().diff() * kv_offsets.long().diff()).sum())


@register_flop_formula(torch.ops.gem_kernels.hopper_attention, get_raw=True)
def _forward_flops(q, k, v, q_offsets, kv_offsets, *args, out_val=None, **kwargs) -> int:
    return 4 * q.shape[1] * q.shape[2] * _pairs(q_offsets, kv_offsets)


@register_flop_formula(torch.ops.gem_kernels.hopper_attention_backward, get_raw=True)
def _backward_flops(do, q, k, v, o, lse, q_offsets, kv_offsets, *args, out_val=None, **kwargs) -> int:
    return 8 * q.shape[1] * q.shape[2] * _pairs(q_offsets, kv_offsets)
