"""MX (E4M3 / E5M2 elements, E8M0 scales) numerics, emulated exactly in float32. See README.md in this folder."""

from .attention import block_attention_mx, gdpa_mx, jagged_attention_mx
from .formats import Hadamard, saturating_cast, scales_from_tiles, scales_to_tiles
from .linear import linear
from .quantize import MXTensor, quantize, round_to_mx
from .recipe import RECIPES, Recipe, get_recipe

__all__ = [
    "RECIPES",
    "Hadamard",
    "MXTensor",
    "Recipe",
    "block_attention_mx",
    "gdpa_mx",
    "get_recipe",
    "jagged_attention_mx",
    "linear",
    "quantize",
    "round_to_mx",
    "saturating_cast",
    "scales_from_tiles",
    "scales_to_tiles",
]
