"""Interaction side of a layer: the summary of X that personalises the sequence side, and the experts over all
tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gem.config import ModelConfig
from gem.counts import Counts, linear_flops
from gem.experts import Experts, over_tokens
from gem.norms import layer_norm


class Summary(nn.Module):
    """Weight generation, first half: X_sum = MLP(W_c X), num_summary tokens of the model's width."""

    def __init__(self, model: ModelConfig):
        super().__init__()
        self.num_summary = model.num_summary
        self.compress = nn.Linear(model.num_tokens, model.num_summary)  # W_c
        self.up = nn.Linear(model.width, model.width)
        self.down = nn.Linear(model.width, model.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, num_tokens, width] -> [B, num_summary, width]."""
        return self.down(F.gelu(self.up(over_tokens(self.compress, x))))

    def flops(self, counts: Counts) -> int:
        rows = counts.batch * self.num_summary
        return (
            linear_flops(counts.batch * self.up.in_features, self.compress)
            + linear_flops(rows, self.up)
            + linear_flops(rows, self.down)
        )


class Interaction(nn.Module):
    """X <- Experts([X, X_sum, norm(H) of every event type]).

    A summary is a mean over many events, so it is far smaller than the normalised tokens of X; without its own norm
    (no weights) the experts are slow to notice the histories.
    """

    def __init__(self, model: ModelConfig, num_event_types: int):
        super().__init__()
        num_in = model.num_tokens + model.num_summary + num_event_types * model.num_seeds
        self.experts = Experts(model, num_in)

    def forward(self, x: torch.Tensor, personal: torch.Tensor, pooled: list[torch.Tensor]) -> torch.Tensor:
        tokens = torch.cat([x, personal.to(x.dtype), *(layer_norm(item).to(x.dtype) for item in pooled)], 1)
        return self.experts(x, tokens)

    def flops(self, counts: Counts) -> int:
        return self.experts.flops(counts)
