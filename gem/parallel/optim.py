"""Optimisers over shards: every rank clips and updates its own part of the dense parameters, as plain tensors.

AdamW, warm-up and the tables' optimisers are those of one process (gem/optim.py). What differs is said here once:
gradients arrive as sums over ranks and are divided by their number; the norm that clips them is that of all shards of a
shard group together. The loss of the joined batch comes back from the same all-reduce, so that all ranks see the same
two numbers and a NaN anywhere stops all of them in the same step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem.config import Config
from gem.optim import Optimizers
from gem.parallel import low_gather
from gem.parallel.dense import Dense, local


class _Shards(nn.Module):
    """What gem.optim.Optimizers asks of a model, answered with this rank's shards (empty ones left out)."""

    def __init__(self, dense: Dense):
        super().__init__()
        self.whole = dense.model.dense_parameters()
        self.views = {name: nn.Parameter(local(value)) for name, value in self.whole.items()}
        self.tables = dense.model.table_parameters() if dense.options.tables == "replicated" else {}

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        return {name: view for name, view in self.views.items() if view.numel()}

    def table_parameters(self) -> dict[str, nn.Parameter]:
        return self.tables


class ShardOptimizers(Optimizers):
    """`finish` after each backward pass; `state` and `restore` for checkpoints of any mesh."""

    def __init__(self, dense: Dense, config: Config, total_steps: int):
        self.shards, self.ranks, self.replicas = _Shards(dense), dense.ranks, dense.plan.replica
        super().__init__(self.shards, config, total_steps)

    @torch.no_grad()
    def finish(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Divide and clip this rank's gradients. loss: what this rank differentiated (`dense.rank_loss`).

        Returns the loss of the joined batch and the gradient norm before clipping, float32 scalars on the device, equal
        on all ranks. One all-reduce of two numbers. `step` updates afterwards.
        """
        grads = []
        for name, parameter in self.shards.whole.items():
            view = self.shards.views[name]
            view.grad = None if parameter.grad is None else local(parameter.grad)
            if view.grad is not None and view.numel():
                grads.append(view.grad)
        squares = loss.new_zeros(())
        if grads:
            torch._foreach_mul_(grads, 1.0 / self.ranks)
            squares = torch.stack(torch._foreach_norm(grads)).square().sum()
        # every shard exists once a replica, every rank's loss once
        both = torch.stack((squares / self.replicas, loss.detach().float() / self.ranks))
        dist.all_reduce(both)
        norm = both[0].sqrt()
        if grads:
            torch._foreach_mul_(grads, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if not loss.is_cpu:
            self._stop_at_bad_steps(both, grads)
        return both[1], norm

    def _stop_at_bad_steps(self, both: Tensor, grads: list[Tensor]) -> None:
        """From the first loss or norm that is not finite on the device leaves parameters alone, until the host hears of
        it. As in gem.optim.Optimizers.clip_and_step, from numbers that all ranks share."""
        bad = 1.0 - both.isfinite().all().float()
        self.stopped = bad if self.stopped is None else torch.maximum(self.stopped, bad)
        if self.kind == "fused":
            self.adamw.found_inf = self.stopped
            return
        for grad in grads:
            grad.masked_fill_(self.stopped > 0, 0.0)

    def clip(self) -> float:
        raise NotImplementedError("ShardOptimizers: clipping needs the loss too; call finish(loss)")

    def step(self, step: int) -> None:
        """Update this rank's shards at the rate of `step`, quantise what travels in 8 bits, and clear all gradients."""
        super().step(step)
        low_gather.prequantise(self.shards.whole.values())
        for parameter in self.shards.whole.values():
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """Parameters and optimiser states by name: DTensors for what is sharded, tensors for replicated tables. The
        names do not depend on the mesh, so another mesh restores them."""
        state: dict[str, Tensor] = {}
        for name, whole in self.shards.whole.items():
            view = self.shards.views[name]
            state[f"model.{name}"] = _like(whole, view.detach())
            moments = self._moments(view)
            state[f"adamw.{name}.exp_avg"] = _like(whole, moments["exp_avg"])
            state[f"adamw.{name}.exp_avg_sq"] = _like(whole, moments["exp_avg_sq"])
            if view.numel():  # an empty shard has taken no steps
                state[f"adamw.{name}.step"] = moments["step"]
        for name, table in self.tables.items():
            state[f"model.{name}"] = table.detach()
            for index, optimizer in enumerate(table._in_backward_optimizers):
                for key, value in _prepared(optimizer, table).items():
                    state[f"adagrad.{name}.{index}.{key}"] = value
        return state

    def _moments(self, view: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a shard, made as AdamW would in its first step when there was none."""
        if view.numel() == 0:
            return {"exp_avg": view.detach(), "exp_avg_sq": view.detach()}
        moments = self.adamw.state[view]
        if not moments:
            device = view.device if self.adamw.defaults["fused"] else "cpu"
            moments["step"] = torch.zeros((), device=device)
            moments["exp_avg"], moments["exp_avg_sq"] = torch.zeros_like(view), torch.zeros_like(view)
        return moments


def _like(whole: Tensor, part: Tensor) -> Tensor:
    """`part` as the shard of a DTensor laid out as `whole`."""
    if not isinstance(whole, DTensor):
        return part
    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _prepared(optimizer, table: nn.Parameter) -> dict[str, Tensor]:
    """Tensors of a table's optimiser state."""
    return {key: value for key, value in optimizer.state[table].items() if isinstance(value, Tensor)}
