"""Generalised dot-product attention: an activation in place of softmax, over packed sequences. See README.md."""

from .activations import ACTIVATIONS
from .api import REGISTRY, gdpa

__all__ = ["ACTIVATIONS", "REGISTRY", "gdpa"]
