"""`Recipe`: what runs in MX precision and how. `RECIPES`: the named ones that the stability study ranks.

The source keeps low-precision training stable with four measures: a random Hadamard transform before quantising,
stochastic rounding, WGrad skipped or in higher precision, and low precision only for large GEMMs with later layers
left in bf16. Each is one field here. `rceil` adds the non-clipping scale rule to `naive`; `hadamard`, `stochastic`,
`wgrad_high` and `late_bf16` each add one measure to `rceil`; `full` has all of them, and square blocks in attention.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import lru_cache

import torch

from . import formats
from .quantize import BLOCKS

FORMATS = ("mx", "hopper")
ATTENTION_OPERANDS = ("q", "k", "v", "p", "ds", "do")
_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Recipe:
    """One choice of low-precision training. Immutable, hashable; `encode` gives the string that an op's schema takes.

    format: "mx" (blocks of 32, emulated everywhere) or "hopper" (blocks of 128 and rows, real 8-bit products on Hopper;
    `block` and `attention_block` say nothing there). fprop, dgrad, wgrad: which of a linear layer's three GEMMs run in
    8 bits; the others run in the dtype of the input. input, weight, gradient: element format of x, W and dy ("e4m3" or
    "e5m2"); in attention, `input` is that of q, k, v and P and `gradient` that of dS and dO. block: of linear layers,
    attention_block: of attention, each (1, 32) or (32, 32). scale_mode: "floor", "ceil", "rceil". hadamard: seed of the
    rotation along every low GEMM's reduction axis (in attention: along the head dimension), or None. stochastic: round
    gradients (dy, dS, dO) stochastically. attention: operands of attention that are low, of q, k, v, p, ds, do; empty =
    attention untouched; format hopper has kernels for q, k, v, p alone. skip_last: this many of the last layers keep
    their precision (applied by gem/precision.py).
    """

    name: str = "custom"
    format: str = "mx"
    fprop: bool = True
    dgrad: bool = True
    wgrad: bool = True
    input: str = "e4m3"
    weight: str = "e4m3"
    gradient: str = "e4m3"
    block: tuple[int, int] = (1, 32)
    attention_block: tuple[int, int] = (1, 32)
    scale_mode: str = "rceil"
    hadamard: int | None = None
    stochastic: bool = False
    attention: tuple[str, ...] = ATTENTION_OPERANDS
    skip_last: int = 0

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"Recipe.format: {self.format!r}; allowed: {', '.join(FORMATS)}")
        for field in ("input", "weight", "gradient"):
            if getattr(self, field) not in _DTYPES:
                raise ValueError(f"Recipe.{field}: {getattr(self, field)!r}; allowed: {', '.join(_DTYPES)}")
        for field in ("block", "attention_block"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
            if getattr(self, field) not in BLOCKS:
                raise ValueError(f"Recipe.{field}: {getattr(self, field)}; allowed: (1, 32), (32, 32)")
        if self.scale_mode not in formats.SCALE_MODES:
            raise ValueError(f"Recipe.scale_mode: {self.scale_mode!r}; allowed: {', '.join(formats.SCALE_MODES)}")
        object.__setattr__(self, "attention", tuple(self.attention))
        unknown = [operand for operand in self.attention if operand not in ATTENTION_OPERANDS]
        if unknown:
            raise ValueError(f"Recipe.attention: {unknown}; allowed: {', '.join(ATTENTION_OPERANDS)}")
        if self.skip_last < 0:
            raise ValueError(f"Recipe.skip_last: {self.skip_last}; allowed: >= 0")
        # Written once here, so that a layer under torch.compile reads a constant.
        object.__setattr__(self, "_text", json.dumps(asdict(self), sort_keys=True))

    def dtype(self, operand: str) -> torch.dtype:
        """Element dtype of an operand: "input", "weight", "gradient", or one of attention's."""
        kind = {"ds": "gradient", "do": "gradient"}.get(operand, "input" if operand in ATTENTION_OPERANDS else operand)
        return _DTYPES[getattr(self, kind)]

    def rounds_stochastically(self, operand: str) -> bool:
        """Whether the operand is a gradient that this recipe rounds stochastically."""
        return self.stochastic and operand in ("gradient", "ds", "do")

    def on_hopper(self) -> Recipe:
        """This recipe in format `hopper`: the same GEMMs of linear layers, rounding and late layers; of attention the
        operands of the forward pass. The rotation is that of linear layers alone."""
        return replace(self, name=f"{self.name}_hopper", format="hopper", attention=("q", "k", "v", "p"))

    def encode(self) -> str:
        """JSON that `decode` turns back into an equal Recipe."""
        return self._text

    @staticmethod
    def decode(text: str) -> Recipe:
        """The Recipe that `encode` wrote."""
        return _decode(text)


@lru_cache(maxsize=256)
def _decode(text: str) -> Recipe:
    return Recipe(**json.loads(text))


_RCEIL = Recipe(name="rceil")
RECIPES = {
    recipe.name: recipe
    for recipe in (
        replace(_RCEIL, name="naive", scale_mode="floor"),
        _RCEIL,
        replace(_RCEIL, name="hadamard", hadamard=1),
        replace(_RCEIL, name="stochastic", stochastic=True),
        replace(_RCEIL, name="wgrad_high", wgrad=False),
        replace(_RCEIL, name="late_bf16", skip_last=1),
        Recipe(name="full", wgrad=False, attention_block=(32, 32), hadamard=1, stochastic=True, skip_last=1),
    )
}


def get_recipe(name: str) -> Recipe:
    """The recipe called `name`; ValueError lists the names that exist."""
    if name not in RECIPES:
        raise ValueError(f"recipe: unknown name {name!r}; allowed: {', '.join(RECIPES)}")
    return RECIPES[name]
