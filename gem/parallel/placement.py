"""Which rank of a model-parallel group holds which table, or which rows of it."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from torch import nn
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

SCHEMES = ("auto", "row", "table")
ROW = -1  # instead of a rank: the table's rows are spread over all ranks


@dataclass(frozen=True)
class Placement:
    """Where a table of [rows, dim] lives: on `rank`, or by rows over `ranks` ranks where rank is ROW."""

    name: str
    rows: int
    dim: int
    rank: int
    ranks: int

    def rows_by_rank(self) -> dict[int, int]:
        """Rank of the group -> rows that it holds. Row-wise: equal blocks, the last ones shorter or empty."""
        if self.rank != ROW:
            return {self.rank: self.rows}
        block = -(-self.rows // self.ranks)
        return {rank: min(block, max(0, self.rows - rank * block)) for rank in range(self.ranks)}

    def ranks_of(self, ids: np.ndarray) -> np.ndarray:
        """The rank of the group that looks up each id."""
        if self.rank != ROW:
            return np.full(len(ids), self.rank)
        return ids // -(-self.rows // self.ranks)


def place(
    sizes: dict[str, int], ranks: int, scheme: str = "auto", means: frozenset[str] = frozenset()
) -> dict[str, int]:
    """Table -> rank, or ROW, for the tables of one collection, of `sizes` (any unit of load); `means` pool by mean.

    "row": all by rows. "table": whole tables, heaviest first, each to the rank that has least. "auto": by rows what
    alone would fill more than half of a rank's fair share, the rest as whole tables; all by rows where one of those is
    pooled by mean, because TorchRec then divides the features of whole tables too (seen in 1.6.1 and 1.8.0).
    """
    if scheme not in SCHEMES:
        raise ValueError(f"sparse: scheme {scheme!r}; allowed: {', '.join(SCHEMES)}")
    fair = sum(sizes.values()) / ranks
    if scheme == "auto" and ranks > 1 and any(sizes[name] > fair / 2 for name in means):
        scheme = "row"
    heap = [(0.0, rank) for rank in range(ranks)]
    found = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        if scheme == "row" or (scheme == "auto" and ranks > 1 and size > fair / 2):
            found[name] = ROW
            continue
        load, rank = heapq.heappop(heap)
        heapq.heappush(heap, (load + size, rank))
        found[name] = rank
    return found


def plan_module(module: nn.Module, ranks: int, device_type: str, scheme: str):
    """(TorchRec's plan of one collection for a group of ranks 0..ranks-1, table -> Placement)."""
    bags = isinstance(module, EmbeddingBagCollection)
    configs = module.embedding_bag_configs() if bags else module.embedding_configs()
    means = frozenset(c.name for c in configs if bags and c.pooling is PoolingType.MEAN)
    where = place({c.name: c.num_embeddings * c.embedding_dim for c in configs}, ranks, scheme, means)
    generators = {
        name: row_wise(compute_kernel="fused")
        if rank == ROW
        else table_wise(rank=rank, device=device_type, compute_kernel="fused")
        for name, rank in where.items()
    }
    plan = construct_module_sharding_plan(
        module, generators, local_size=ranks, world_size=ranks, device_type=device_type
    )
    placed = {c.name: Placement(c.name, c.num_embeddings, c.embedding_dim, where[c.name], ranks) for c in configs}
    return plan, placed


def remap(plan: ShardingPlan, members: list[int], device_type: str) -> None:
    """Rewrite a plan of ranks 0..n-1 for the job's ranks `members`, in place.

    TorchRec's helpers place every shard of a CPU plan on rank 0; here a shard is placed where its table's ranks say.
    """
    for module in plan.plan.values():
        for sharding in module.values():
            sharding.ranks = [members[rank] for rank in sharding.ranks]
            if isinstance(sharding.sharding_spec, EnumerableShardingSpec):
                for shard, rank in zip(sharding.sharding_spec.shards, sharding.ranks, strict=True):
                    shard.placement = type(shard.placement)(f"rank:{rank}/{device_type}")
