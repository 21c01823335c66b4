"""Linear layer in 8-bit blocks. Format `mx`, emulated: every GEMM multiplies values that MX hardware would multiply,
and adds them in float32. Format `hopper`: real 8-bit products on an H100 or H200 (hopper.py), emulated on a CPU.

    fprop   y  = x W^T    blocks of x and W along the features in
    dgrad   dx = dy W     blocks of dy and W along the features out
    wgrad   dW = dy^T x   blocks of dy and x along the tokens

Scales must lie along each GEMM's reduction axis (source). So each operand is quantised for each GEMM from its
high-precision values: scales of the other axis cannot be reused, and quantising quantised values would add error. Any
sizes: a reduction axis that is no multiple of 32 is zero-padded inside, which changes no value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..validation import strict_float32
from . import hopper
from .formats import Hadamard
from .quantize import pad_dims, rotate, round_to_mx
from .recipe import Recipe


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe) -> Tensor:
    """y = x weight^T + bias with the GEMMs that `recipe` names in MX precision, forward and backward.

    x [..., K], weight [N, K], bias [N] or None, of float32, bfloat16 or float16 (x and weight may differ). y [..., N]
    has x's dtype, under autocast the autocast dtype. Gradients have their inputs' dtypes. GEMMs that stay high run in
    the dtype of y. Differentiable once. ValueError for shapes or a recipe that do not fit.
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe: {type(recipe).__name__}; allowed: mxfp8.Recipe")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x, weight: shapes {tuple(x.shape)}, {tuple(weight.shape)}; allowed: [..., K] and [N, K] with one K"
        )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    y = torch.ops.gem_kernels.mx_linear(x.flatten(0, -2) if x.dim() > 1 else x[None], weight, recipe.encode())
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(y.dtype)


@strict_float32()
def _low_gemm(a: Tensor, b: Tensor, a_operand: str, b_operand: str, recipe: Recipe) -> Tensor:
    """a [M, K] b[N, K]^T in float32 from MX values of both along K."""
    return _mx_values(a, a_operand, recipe) @ _mx_values(b, b_operand, recipe).T


def _mx_values(x: Tensor, operand: str, recipe: Recipe) -> Tensor:
    """float32 values of x [M, K] quantised along K, rotated along K if the recipe says so (both operands are)."""
    x = x.float()
    if recipe.hadamard is not None:
        x = rotate(pad_dims(x, (1,)), Hadamard(recipe.hadamard))
    return round_to_mx(
        x,
        (1,) if recipe.block == (1, 32) else (0, 1),
        dtype=recipe.dtype(operand),
        scale_mode=recipe.scale_mode,
        stochastic=recipe.rounds_stochastically(operand),
    )


def _fprop(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    if recipe.fprop and recipe.format == "hopper":
        return hopper.fprop(x, weight, recipe)
    if recipe.fprop:
        return _low_gemm(x, weight, "input", "weight", recipe).to(x.dtype)
    return x @ weight.to(x.dtype).T


def _dgrad(dy: Tensor, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    if recipe.dgrad and recipe.format == "hopper":
        return hopper.dgrad(dy, weight, recipe)
    if recipe.dgrad:
        return _low_gemm(dy, weight.T, "gradient", "weight", recipe).to(x.dtype)
    return dy @ weight.to(dy.dtype)


def _wgrad(dy: Tensor, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    if recipe.wgrad and recipe.format == "hopper":
        return hopper.wgrad(dy, x, recipe, weight.dtype)
    if recipe.wgrad:
        return _low_gemm(dy.T, x.T, "gradient", "input", recipe).to(weight.dtype)
    return (dy.T @ x).to(weight.dtype)


@torch.library.custom_op("gem_kernels::mx_linear", mutates_args=())
def _mx_linear(x: Tensor, weight: Tensor, recipe: str) -> Tensor:
    return _fprop(x, weight, Recipe.decode(recipe))


@_mx_linear.register_fake
def _(x, weight, recipe):
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("gem_kernels::mx_linear_backward", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _mx_linear_backward(
    dy: Tensor, x: Tensor, weight: Tensor, recipe: str, need_x: bool, need_weight: bool
) -> tuple[Tensor, Tensor]:
    decoded = Recipe.decode(recipe)
    dx = _dgrad(dy, x, weight, decoded) if need_x else x.new_empty(0)
    dw = _wgrad(dy, x, weight, decoded) if need_weight else weight.new_empty(0)
    return dx, dw


@_mx_linear_backward.register_fake
def _(dy, x, weight, recipe, need_x, need_weight):
    dx = x.new_empty(x.shape) if need_x else x.new_empty(0)
    return dx, weight.new_empty(weight.shape) if need_weight else weight.new_empty(0)


def _setup_context(ctx, inputs, output):
    x, weight, ctx.recipe = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dy):
    x, weight = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    dx, dw = torch.ops.gem_kernels.mx_linear_backward(dy, x, weight, ctx.recipe, need_x, need_weight)
    return dx if need_x else None, dw if need_weight else None, None


_mx_linear.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.gem_kernels.mx_linear)
def _forward_flops(x_shape, weight_shape, *args, **kwargs) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0]


@register_flop_formula(torch.ops.gem_kernels.mx_linear_backward)
def _backward_flops(dy_shape, x_shape, weight_shape, recipe, need_x, need_weight, *args, **kwargs) -> int:
    return 2 * x_shape[0] * x_shape[1] * weight_shape[0] * (int(need_x) + int(need_weight))
