"""Dense mixture of Wukong-style experts (DHEN): every sample visits every expert, their tokens are put side by side.

There is no router. With expert parallelism one expert lives on a rank, which is why an expert is a module of its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gem.config import ModelConfig
from gem.counts import Counts, linear_flops, matmul_flops
from gem.norms import LayerNorm


def over_tokens(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A linear layer over the token axis: x [B, num_in, width] -> [B, num_out, width].

    A plain one is a batched product with the same weight for every sample, so that nothing is transposed in memory;
    what replaces it (gem/precision.py) is called as a layer.
    """
    if type(linear) is not nn.Linear:
        return linear(x.transpose(1, 2)).transpose(1, 2)
    weight = linear.weight.to(x.dtype).expand(x.shape[0], -1, -1)
    if linear.bias is None:
        return torch.bmm(weight, x)
    return torch.baddbmm(linear.bias.to(x.dtype)[:, None], weight, x)


class WukongExpert(nn.Module):
    """num_out tokens from num_in: one half interactions FMB(Z) = MLP(LN(flat(Z (Z^T Y)))), one half linear LCB(Z) =
    W_L Z.

    Z [B, num_in, width]. Y is a learned [num_in, rank], which makes the factorisation machine linear in its tokens'
    pairs.
    """

    def __init__(self, num_in: int, num_out: int, width: int, rank: int, hidden: int):
        super().__init__()
        self.num_in, self.width, self.rank, self.half = num_in, width, rank, num_out // 2
        self.project = nn.Linear(num_in, rank, bias=False)  # Y
        self.norm = LayerNorm(num_in * rank)
        self.up = nn.Linear(num_in * rank, hidden)
        self.down = nn.Linear(hidden, self.half * width)
        self.linear = nn.Linear(num_in, num_out - self.half, bias=False)  # W_L

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, num_in, width] -> [B, num_out, width]."""
        interactions = torch.bmm(tokens, over_tokens(self.project, tokens).to(tokens.dtype).transpose(1, 2))
        mixed = self.down(F.gelu(self.up(self.norm(interactions.flatten(1) * self.width**-0.5))))
        return torch.cat((mixed.unflatten(-1, (self.half, self.width)), over_tokens(self.linear, tokens)), 1)

    def flops(self, counts: Counts) -> int:
        batch = counts.batch
        return (
            linear_flops(batch * self.width, self.project)
            + matmul_flops(batch, self.num_in, self.width, self.rank)
            + linear_flops(batch, self.up)
            + linear_flops(batch, self.down)
            + linear_flops(batch * self.width, self.linear)
        )


class Experts(nn.Module):
    """X <- LN(concat over experts of expert(Z) + X), with Z = [X, summary of X, summaries of the histories]."""

    def __init__(self, model: ModelConfig, num_in: int):
        super().__init__()
        num_out = model.num_tokens // model.num_experts
        self.experts = nn.ModuleList(
            WukongExpert(num_in, num_out, model.width, model.expert_rank, model.expert_hidden)
            for _ in range(model.num_experts)
        )
        self.norm = LayerNorm(model.width)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """x [B, num_tokens, width], tokens [B, num_in, width] -> [B, num_tokens, width]."""
        mixed = torch.cat([expert(tokens) for expert in self.experts], 1)
        return self.norm(mixed.to(x.dtype) + x)

    def flops(self, counts: Counts) -> int:
        return sum(expert.flops(counts) for expert in self.experts)
