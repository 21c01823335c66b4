"""Optimisers: AdamW for dense parameters, row-wise Adagrad for embedding tables, applied inside the backward pass.

A table's update runs as soon as its gradient is there and the gradient is freed, so table gradients never exist all
at once. Dense gradients are clipped by the norm over all dense parameters; table gradients are not clipped.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from gem.config import Config
from gem.model import GEM


class Optimizers:
    """The dense optimiser with clipping and warm-up, and the tables' optimisers that run in backward."""

    def __init__(self, model: GEM, config: Config, total_steps: int):
        train = config.train
        self.dense = list(model.dense_parameters().values())
        self.tables = model.table_parameters()
        self.clip_norm, self.base_lr = train.clip_norm, train.dense_lr
        self.warmup_steps = max(1, round(train.warmup_share * total_steps))
        kind = config.implementations.optimizer
        if kind not in ("foreach", "fused"):
            raise ValueError(f"optimizer: unknown implementation {kind!r}; allowed: foreach, fused")
        self.adamw = torch.optim.AdamW(
            self.dense,
            lr=train.dense_lr,
            weight_decay=train.weight_decay,
            foreach=kind == "foreach",
            fused=kind == "fused",
        )
        _apply_optimizer_in_backward(
            RowWiseAdagrad, self.tables.values(), {"lr": train.table_lr, "eps": 1e-8, "initial_accumulator_value": 0.0}
        )

    def warmup_factor(self, step: int) -> float:
        """Share of the full rate at `step` (from 0): linear to 1 over the warm-up steps."""
        return min(1.0, (step + 1) / self.warmup_steps)

    def clip(self) -> float:
        """Scale dense gradients to a global norm of at most clip_norm; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.dense, self.clip_norm, foreach=True))

    def step(self, step: int) -> None:
        """Update the dense parameters at the rate of `step` and clear their gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = self.base_lr * self.warmup_factor(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {
            "adamw": self.adamw.state_dict(),
            "tables": {
                name: [item.state_dict() for item in value._in_backward_optimizers]
                for name, value in self.tables.items()
            },
        }

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for name, value in self.tables.items():
            for item, saved in zip(value._in_backward_optimizers, state["tables"][name], strict=True):
                item.load_state_dict(saved)
