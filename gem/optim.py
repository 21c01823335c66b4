"""Optimisers: AdamW for dense parameters, row-wise Adagrad for embedding tables, applied inside the backward pass.

A table's update runs as soon as its gradient is there and the gradient is freed, so table gradients never exist all
at once; fused tables (gem/fused_tables.py) update themselves and their gradients never exist. Dense gradients are
clipped by the norm over all dense parameters; table gradients are not clipped.

`clip` and `step` are for a CPU: the caller looks at each norm. `clip_and_step` is their form for a GPU, which nothing
waits for: the device itself leaves the dense parameters alone from the first loss or norm that is not finite.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from gem import fused_tables
from gem.config import Config
from gem.model import GEM


class Optimizers:
    """The dense optimiser with clipping and warm-up, and the tables' optimisers that run in backward."""

    def __init__(self, model: GEM, config: Config, total_steps: int):
        train = config.train
        self.dense = list(model.dense_parameters().values())
        self.tables = model.table_parameters()
        self.clip_norm, self.base_lr = train.clip_norm, train.dense_lr
        self.total_steps = total_steps
        self.warmup_steps = max(1, round(train.warmup_share * total_steps))
        self.decay_steps = round(train.decay_share * total_steps)
        self.kind = kind = config.implementations.optimizer
        if kind not in ("foreach", "fused"):
            raise ValueError(f"optimizer: unknown implementation {kind!r}; allowed: foreach, fused")
        self.adamw = torch.optim.AdamW(
            self.dense,
            lr=train.dense_lr,
            weight_decay=train.weight_decay,
            foreach=kind == "foreach",
            fused=kind == "fused",
        )
        self.fused_sums = fused_tables.sums(model)
        self.plain_tables = {name: value for name, value in self.tables.items() if name not in self.fused_sums}
        _apply_optimizer_in_backward(
            RowWiseAdagrad,
            self.plain_tables.values(),
            {"lr": train.table_lr, "eps": fused_tables.TABLE_EPS, "initial_accumulator_value": 0.0},
        )
        self.stopped: torch.Tensor | None = None  # float32 on the device, 1 from the first bad step on

    def rate_factor(self, step: int) -> float:
        """Share of the full rate at `step` (from 0): linear to 1 over the warm-up steps, then 1, then linear towards 0
        over the steps of decay, which a step past the last would reach."""
        factor = min(1.0, (step + 1) / self.warmup_steps)
        if self.decay_steps:
            factor = min(factor, max(0.0, (self.total_steps - step) / self.decay_steps))
        return factor

    def clip(self) -> float:
        """Scale dense gradients to a global norm of at most clip_norm; returns the norm before."""
        return float(torch.nn.utils.clip_grad_norm_(self.dense, self.clip_norm, foreach=True))

    def clip_and_step(self, step: int, loss: torch.Tensor) -> torch.Tensor:
        """`clip` and `step` without waiting for the device; returns the norm before clipping, a scalar on the device.

        From the first step whose loss or norm is NaN or infinite on, the fused optimiser leaves parameters and states
        as they are, so that what went wrong can still be looked for when the host hears of it; the other one gets
        gradients of zero.
        """
        gradients = [item.grad for item in self.dense if item.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        share = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        bad = 1.0 - (loss.detach().isfinite() & norm.isfinite()).float()
        self.stopped = bad if self.stopped is None else torch.maximum(self.stopped, bad)
        if self.kind == "fused":  # the kernel itself scales the gradients, and skips its update where found_inf is 1
            self.adamw.grad_scale, self.adamw.found_inf = share.reciprocal(), self.stopped
        else:
            torch._foreach_mul_(gradients, share)
            for gradient in gradients:
                gradient.masked_fill_(self.stopped > 0, 0.0)
        self.step(step)
        return norm

    def step(self, step: int) -> None:
        """Update the dense parameters at the rate of `step` and clear their gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = self.base_lr * self.rate_factor(step)
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {
            "adamw": self.adamw.state_dict(),
            "tables": {
                name: [item.state_dict() for item in value._in_backward_optimizers]
                for name, value in self.plain_tables.items()
            },
            "fused_tables": dict(self.fused_sums),
        }

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        for name, value in self.plain_tables.items():
            for item, saved in zip(value._in_backward_optimizers, state["tables"][name], strict=True):
                item.load_state_dict(saved)
        for name, own in self.fused_sums.items():
            own.copy_(state["fused_tables"][name])
