"""Block attention: softmax inside fixed blocks counted from each sequence's own start. See README.md."""

from ..rotary.api import Rotary
from .api import REGISTRY, block_attention

__all__ = ["REGISTRY", "Rotary", "block_attention"]
