"""Model FLOPs in closed form: what one batch needs, from real lengths, before anything runs.

Every module of the model has `flops(counts)`, the forward FLOPs of its matrix products; norms, activations, lookups
and rotary count zero, as torch's FlopCounterMode has it. Padded variants are charged useful work only, so that the
padded and the jagged form of one model cost the same here and differ in time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Counts:
    """Batch size and history lengths (event -> int64 [B], on the CPU)."""

    batch: int
    lengths: dict[str, torch.Tensor]

    def events(self, name: str) -> int:
        return int(self.lengths[name].sum())


def linear_flops(rows: int, linear: nn.Linear) -> int:
    """2 * rows * in * out."""
    return 2 * rows * linear.in_features * linear.out_features


def matmul_flops(batch: int, m: int, k: int, n: int) -> int:
    """A batch of [m, k] @ [k, n]."""
    return 2 * batch * m * k * n
