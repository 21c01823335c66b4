"""Norms of the model, and the L2 normalisation that bounds GDPA's scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    """LayerNorm over the last dimension, float32 inside, dtype of the input kept."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.bias.to(x.dtype)).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2)) * weight over the last dimension, dtype of the input kept."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), eps=1e-6).to(x.dtype)


class QKNorm(nn.Module):
    """L2-normalised heads times a learned scale in (0, 1): |q . k| <= 1 by construction.

    Two such tensors have scores bounded by the product of their scales; that bound is what lets a low-degree polynomial stand
    in for GELU.
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.raw = nn.Parameter(torch.full((num_heads, 1), 3.0))  # sigmoid(3) = 0.95

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., H, D] -> the same shape and dtype, norm below 1."""
        wide = x.float()
        return (wide * (wide.square().sum(-1, keepdim=True) + 1e-12).rsqrt() * self.raw.float().sigmoid()).to(x.dtype)
