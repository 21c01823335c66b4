"""Activation checkpointing, put on from outside: which activations of the forward are kept for the backward."""

from __future__ import annotations

from functools import partial

from torch.utils.checkpoint import checkpoint

from gem.config import Checkpointing
from gem.model import GEM


def apply(model: GEM, mode: Checkpointing) -> GEM:
    """none: keep all. uniform: keep each layer's inputs only and run the layer again in the backward.

    A budget per region is not built: that mode raises NotImplementedError rather than running as something else.
    """
    if mode is Checkpointing.REGION:
        raise NotImplementedError("checkpointing: region is not available yet; allowed: none, uniform")
    if mode is Checkpointing.UNIFORM:
        model.run_layer = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return model
