"""Norms of the model, and the normalisation that bounds GDPA's scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

EPS = 1e-5


def _as_given(x: torch.Tensor):
    """Autocast off: it would widen norms to float32 in memory, where the statistics alone need that and have it."""
    return torch.autocast(x.device.type, enabled=False)


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, float32 inside, dtype of the input kept."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _as_given(x):
            return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype))


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """LayerNorm without weights, as in the source's sequence side: float32 statistics, dtype of x kept."""
    with _as_given(x):
        return F.layer_norm(x, x.shape[-1:], eps=EPS)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """RMSNorm without weights: x / sqrt(mean(x^2) + eps), dtype of x kept."""
    with _as_given(x):
        return F.rms_norm(x, x.shape[-1:], eps=EPS)


class KeyNorm(nn.Module):
    """Keys of GDPA: L2-normalised heads times a learned scale in (0, 1).

    With queries whose norm over all heads is at most 1 every score then obeys |s| <= 1 by construction, and that
    bound is what lets a low-degree polynomial stand in for GELU.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.raw = nn.Parameter(torch.full((num_heads, 1), 3.0))  # sigmoid(3) = 0.95

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H, D] -> the same shape and dtype, norm of a head below 1."""
        wide = x.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + 1e-12).rsqrt() * self.raw.float().sigmoid()).to(x.dtype)
