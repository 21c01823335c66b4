"""Checkpoints of sharded tables, in the form and under the names of replicated ones: any generation, any mesh and one
process's tables read each other's.

Every rank holds whole tables on the CPU while it saves or loads; tables that do not fit a host need TorchRec's own
sharded state instead, which knows its own layout only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from gem.parallel.sparse import SparseTables, optimizer_states


def state(tables: SparseTables, names: Mapping[str, str]) -> dict[str, Tensor]:
    """Whole tables and row-wise Adagrad's sums, float32 on the CPU. names: table -> name of its parameter. Collective.

    Keys are those of gem.parallel.optim: model.<name>, adagrad.<name>.0.sum [rows, 1] and .step (which nothing reads).
    """
    local = [(name, rows, sums.detach().cpu().reshape(-1, 1)) for name, rows, sums in _sums(tables)]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, local)
    found = {f"model.{names[table]}": weight for table, weight in tables.gather().items()}
    for table, rows, sums in (item for rank in everyone for item in rank):
        key = f"adagrad.{names[table]}.0.sum"
        whole = found.setdefault(key, torch.zeros(tables.placements[table].rows, 1))
        whole[rows] = sums
        found[f"adagrad.{names[table]}.0.step"] = torch.zeros(())
    return found


@torch.no_grad()
def restore(tables: SparseTables, names: Mapping[str, str], saved: Mapping[str, Tensor]) -> None:
    """Copy what `state` gave into this rank's shards, whatever they are now. Collective."""
    tables.load({table: saved[f"model.{name}"] for table, name in names.items()})
    for table, rows, sums in _sums(tables):
        sums.copy_(saved[f"adagrad.{names[table]}.0.sum"][rows].reshape(sums.shape))


def _sums(tables: SparseTables) -> list[tuple[str, slice, Tensor]]:
    """(table, its rows, sums of squares) of every shard on this rank; the tensors are the kernels' own."""
    found = []
    shards = [(name, rows) for name, rows, _, _ in tables.local_shards()]
    states = [item for kernel in tables.kernels for item in optimizer_states(kernel)]
    for (name, rows), sums in zip(shards, states, strict=True):
        found.append((name, rows, sums))
    return found
