"""Prediction heads and their loss: CTR on every impression, CVR on clicked ones."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from gem.config import ModelConfig
from gem.counts import Counts, linear_flops


class Heads(nn.Module):
    """One MLP a task over the flattened tokens of the last layer: logits, task -> float32 [B]."""

    def __init__(self, model: ModelConfig, tasks: tuple[str, ...]):
        super().__init__()
        self.hidden = nn.ModuleDict({t: nn.Linear(model.num_tokens * model.width, model.head_hidden) for t in tasks})
        self.logit = nn.ModuleDict({task: nn.Linear(model.head_hidden, 1) for task in tasks})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        flat = x.flatten(1)
        return {task: self.logit[task](F.gelu(self.hidden[task](flat))).squeeze(-1).float() for task in self.hidden}

    @torch.no_grad()
    def start_at(self, base_rates: dict[str, float]) -> None:
        """Zero the output weights and set the bias to the base rate's log-odds, so that training starts at NE = 1."""
        for task, rate in base_rates.items():
            rate = min(max(rate, 1e-4), 1 - 1e-4)
            self.logit[task].weight.mul_(0.1)
            self.logit[task].bias.fill_(math.log(rate / (1 - rate)))

    def flops(self, counts: Counts) -> int:
        return sum(
            linear_flops(counts.batch, self.hidden[task]) + linear_flops(counts.batch, self.logit[task])
            for task in self.hidden
        )


def loss_sums(
    logits: dict[str, torch.Tensor], labels: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Weighted sum of binary cross-entropy a task, natural log, not divided by anything."""
    return {
        task: (F.binary_cross_entropy_with_logits(logits[task], labels[task], reduction="none") * weights[task]).sum()
        for task in logits
    }


def normalised_loss(sums: dict[str, torch.Tensor], counts: dict[str, torch.Tensor | float]) -> torch.Tensor:
    """Sum over tasks of sum / count, with counts of the GLOBAL batch (all micro-batches and ranks), at least 1.

    Dividing by each part's own count first would make a mean of means, which weighs a label by the size of its part.
    """
    return sum(sums[task] / torch.clamp(torch.as_tensor(counts[task], dtype=torch.float32), min=1.0) for task in sums)


def batch_loss(logits: dict[str, torch.Tensor], batch) -> torch.Tensor:
    """`normalised_loss` of a `dataset.Batch` that is the whole global batch: a float32 scalar on its device."""
    counts = {task: weight.sum() for task, weight in batch.weights.items()}
    return normalised_loss(loss_sums(logits, batch.labels, batch.weights), counts)
