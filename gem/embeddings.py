"""Embedding side: sparse ids and dense values -> tokens X; event histories -> jagged rows S.

Tables are TorchRec's: an EmbeddingBagCollection for the pooled features, an EmbeddingCollection for items and actions
of the histories. The item table is shared by all event types and by the impression's own item (the candidate), so
that a history row can be compared with the candidate by a product of embeddings.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from gem.attention import Events, ages_to_tau, event_mask, rotary_tables, rows_of
from gem.config import Config, EventSize, Layout
from gem.counts import Counts, linear_flops
from gem.dataset import CANDIDATE, Batch, Schema
from gem.norms import LayerNorm
from kernels.jagged import pad, positions, remember, row_ids

POOLING = {"mean": PoolingType.MEAN, "sum": PoolingType.SUM}


def _init(weight: torch.Tensor) -> None:
    nn.init.normal_(weight, std=0.1)


class FeatureTokens(nn.Module):
    """X: pooled sparse embeddings and the dense values' MLP, projected to num_tokens tokens of the model's width."""

    def __init__(self, config: Config, schema: Schema, device: torch.device | str = "cpu"):
        super().__init__()
        model = config.model
        self.num_tokens, self.num_dense = model.num_tokens, schema.num_dense
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table_{name}",
                    embedding_dim=model.table_dim,
                    num_embeddings=size,
                    feature_names=[name],
                    pooling=POOLING[pooling],
                    init_fn=_init,
                )
                for name, (size, pooling) in schema.sparse.items()
            ],
            device=torch.device(device),
        )
        self.dense_up = nn.Linear(schema.num_dense, model.dense_hidden) if schema.num_dense else None
        self.dense_down = nn.Linear(model.dense_hidden, model.table_dim) if schema.num_dense else None
        columns = model.table_dim * (len(schema.sparse) + (schema.num_dense > 0))
        self.project = nn.Linear(columns, model.num_tokens * model.width)
        self.norm = LayerNorm(model.width)

    def forward(self, batch: Batch) -> torch.Tensor:
        """[B, num_tokens, width]."""
        return self.mix(self.lookup(batch), batch.dense)

    def lookup(self, batch: Batch) -> torch.Tensor:
        """Pooled embeddings of all tables, float32 [B, tables * table_dim]."""
        return self.tables(batch.sparse).values()

    def mix(self, pooled: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        """What follows the lookups: pooled [B, tables * table_dim], dense [B, num_dense] -> [B, num_tokens, width]."""
        parts = [pooled]
        if self.dense_up is not None:
            parts.append(self.dense_down(F.gelu(self.dense_up(dense))).to(pooled.dtype))
        tokens = self.project(torch.cat(parts, 1))
        return self.norm(tokens.unflatten(-1, (self.num_tokens, -1)))

    def flops(self, counts: Counts) -> int:
        modules = [self.project, self.dense_up, self.dense_down]
        return sum(linear_flops(counts.batch, module) for module in modules if module is not None)


class HistoryTables(nn.Module):
    """Lookups of every event type in one EmbeddingCollection: KJT -> name -> float32 [T, table_dim]."""

    def __init__(self, config: Config, schema: Schema, device: torch.device | str = "cpu"):
        super().__init__()
        self.tables = EmbeddingCollection(
            tables=[
                EmbeddingConfig(
                    name=name,
                    embedding_dim=config.model.table_dim,
                    num_embeddings=size,
                    feature_names=features,
                    init_fn=_init,
                )
                for name, (size, features) in schema.history_tables.items()
            ],
            device=torch.device(device),
        )
        self.has_candidate = schema.has_candidate

    def forward(self, batch: Batch) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """Rows by feature name, and the candidate's mean embedding [B, table_dim] if the data have one."""
        rows = {name: jagged.values() for name, jagged in self.tables(batch.sequence).items()}
        candidate = mean_rows(rows[CANDIDATE], batch.offsets[CANDIDATE]) if self.has_candidate else None
        return rows, candidate


def mean_rows(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Mean of each sample's rows: values [T, d], offsets [B + 1] -> [B, d]; zeros for a sample without any."""
    total = values.new_zeros(offsets.shape[0] - 1, values.shape[1])
    total = total.index_add(0, row_ids(offsets, values.shape[0]), values)
    return total / offsets.diff().clamp(min=1)[:, None].to(total.dtype)


@cache  # a few kilobytes a batch size; CUDA graphs read them for as long as they live
def every(rows: int, batch: int, device: torch.device) -> torch.Tensor:
    """Offsets int32 [batch + 1] of `rows` rows a sample: one object for all event types and steps, so that what kernels
    derive from it is derived once."""
    host = torch.arange(batch + 1, dtype=torch.int32, device="cpu") * rows  # whatever the default device is
    offsets = host.to(device)
    remember(offsets, host)
    return offsets


def _columns(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[n], [n] -> [n, 8]: the two, and zeros."""
    return F.pad(torch.stack((first, second.to(first.dtype)), 1), (0, 6))


class EventEmbedding(nn.Module):
    """S of one event type: item, action and item x candidate embeddings through a linear layer, plus the event's age.

    The result is a jagged or padded `Events`, with the tables of the time-aware rotary.
    """

    def __init__(self, config: Config, schema: Schema, name: str, size: EventSize):
        super().__init__()
        model = config.model
        self.name, self.head_dim, self.time_scale, self.num_kv = name, size.head_dim, model.time_scale, model.num_kv
        self.padded = config.toggles.layout is Layout.PADDED
        self.project = nn.Linear(model.table_dim * (3 if schema.has_candidate else 2), size.width)
        self.age = nn.Parameter(torch.zeros(size.width))

    def forward(self, batch: Batch, rows: dict[str, torch.Tensor], candidate: torch.Tensor | None) -> Events:
        offsets, longest = batch.offsets[self.name], batch.longest[self.name]
        values, cos, sin, mask = self.mix(
            rows[f"{self.name}_item"],
            rows[f"{self.name}_action"],
            candidate,
            batch.ages[self.name],
            offsets,
            longest if self.padded else 0,
        )
        kv_offsets = every(self.num_kv, batch.size, offsets.device)
        return Events(values, offsets, kv_offsets, mask, cos, sin, longest)

    def mix(
        self,
        items: torch.Tensor,
        actions: torch.Tensor,
        candidate: torch.Tensor | None,
        ages: torch.Tensor,
        offsets: torch.Tensor,
        longest: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What follows the lookups: values, cos, sin and the mask of `Events`. longest: of padded tensors."""
        total, age = items.shape[0], ages_to_tau(ages, self.time_scale)
        parts = [items, actions]
        if candidate is not None:
            parts.append(items * rows_of(candidate, offsets, total))
        # age and bias are columns of the one product, so that their gradients are too, and not sums over all events;
        # zeros fill up to what matrix units load at once
        parts.append(_columns(0.1 * age, torch.ones_like(age)))
        weight = torch.cat((self.project.weight, _columns(self.age, self.project.bias)), 1)
        cos, sin = rotary_tables(positions(offsets, total), ages, self.head_dim, self.time_scale)
        inputs, mask = torch.cat(parts, 1), None
        if self.padded:
            inputs, cos, sin = (pad(x, offsets, longest) for x in (inputs, cos, sin))
            mask = event_mask(offsets, longest)
        return F.linear(inputs, weight), cos, sin, mask

    def flops(self, counts: Counts) -> int:
        return linear_flops(counts.events(self.name), self.project)
