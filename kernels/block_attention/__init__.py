"""Block attention: softmax inside fixed blocks counted from each sequence's own start. See README.md."""

from ..rotary.api import Rotary
from .api import REGISTRY, block_attention
from .packed import block_attention_qkv

__all__ = ["REGISTRY", "Rotary", "block_attention", "block_attention_qkv"]
