"""Rotary embedding of packed rows. See README.md."""

from .api import REGISTRY, Rotary, apply_rotary

__all__ = ["REGISTRY", "Rotary", "apply_rotary"]
