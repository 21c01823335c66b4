"""Normalisation without affine, alone and fused with its neighbours: rotary, and the tail of the GDPA feed-forward."""

from .api import REGISTRIES, norm, norm_quantize, norm_rotary, pffn

__all__ = ["REGISTRIES", "norm", "norm_quantize", "norm_rotary", "pffn"]
