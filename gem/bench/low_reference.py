"""Products in 8-bit blocks of format `hopper` in plain torch, wherever they run: what real ones are held against.

Under `Plainly` the ops of a model in 8 bits compute their operands' values block by block in torch and multiply them in
float32; attention goes to its plain form on the CPU. No kernel of `kernels.mxfp8` and no 8-bit unit takes part.
"""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.mxfp8 import Recipe, hopper, hopper_function
from kernels.mxfp8.formats import Hadamard
from kernels.validation import strict_float32

ROWS, TILES = (1, hopper.SLAB), (hopper.SLAB, hopper.SLAB)


class Plainly(TorchDispatchMode):
    """Inside of it, ops in format `hopper` run as plain torch, forward and backward. Not for compiled modules."""

    def __enter__(self):
        # what the kernels cannot run (float32, say) is no limit of their plain forms
        self.limits = mock.patch.object(hopper_function, "why_not", lambda q: None)
        self.limits.start()
        return super().__enter__()

    def __exit__(self, *raised):
        self.limits.stop()
        return super().__exit__(*raised)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        ops = torch.ops.gem_kernels
        if op is ops.mx_linear.default and _recipe(args[2]).fprop:
            return _fprop(*args[:2], _recipe(args[2]))
        if op is ops.mx_linear_backward.default:
            dy, x, weight, text, need_x, need_weight = args
            recipe = _recipe(text)
            # what stays high, or is not asked for, is the op's own affair
            dx, dw = op(dy, x, weight, text, need_x and not recipe.dgrad, need_weight and not recipe.wgrad)
            dx = _dgrad(dy, weight, recipe) if need_x and recipe.dgrad else dx
            return dx, _wgrad(dy, x, recipe, weight.dtype) if need_weight and recipe.wgrad else dw
        if op in (ops.hopper_attention.default, ops.hopper_attention_backward.default):
            device = args[0].device
            found = op(*(value.cpu() if isinstance(value, Tensor) else value for value in args))
            return tuple(value.to(device) for value in found)
        return op(*args, **(kwargs or {}))


def _recipe(text: str) -> Recipe:
    recipe = Recipe.decode(text)
    if recipe.format != "hopper":
        raise ValueError(f"recipe: format {recipe.format!r}; allowed: hopper, whose products are real on a GPU")
    return recipe


def _values(x: Tensor, group: tuple[int, int], operand: str, recipe: Recipe) -> Tensor:
    """float32 values of x [M, K] in 8-bit blocks of `group` rows and columns, rotated along K if the recipe says so."""
    x = x.float()
    if recipe.hadamard is not None:
        x = Hadamard(recipe.hadamard).rotate(x)
    noise = torch.rand_like(x) if recipe.rounds_stochastically(operand) else None
    return hopper.values(hopper.blocks_plainly(x, group, recipe.dtype(operand), recipe.scale_mode, noise))


@strict_float32()
def _fprop(x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return (_values(x, ROWS, "input", recipe) @ _values(weight, TILES, "weight", recipe).T).to(x.dtype)


@strict_float32()
def _dgrad(dy: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
    return (_values(dy, ROWS, "gradient", recipe) @ _values(weight.T, TILES, "weight", recipe).T).to(dy.dtype)


@strict_float32()
def _wgrad(dy: Tensor, x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    return (_values(dy.T, ROWS, "gradient", recipe) @ _values(x.T, ROWS, "input", recipe).T).to(dtype)
