"""Rotary embedding of packed rows. See README.md."""

from .api import REGISTRY, Rotary, apply_rotary
from .packed import apply_rotary_qkv

__all__ = ["REGISTRY", "Rotary", "apply_rotary", "apply_rotary_qkv"]
