"""Jagged attention: softmax attention over packed sequences. See README.md."""

from .api import REGISTRY, jagged_attention
from .bias import Bias

__all__ = ["REGISTRY", "Bias", "jagged_attention"]
