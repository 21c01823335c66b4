"""Embedding side: sparse ids and dense values -> tokens X; event histories -> jagged rows S.

Tables are TorchRec's: an EmbeddingBagCollection for the pooled features, an EmbeddingCollection for items and actions
of the histories. The item table is shared by all event types and by the impression's own item (the candidate), so
that a history row can be compared with the candidate by a product of embeddings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from gem.attention import Events, ages_to_tau, event_mask, pad_rows, rotary_tables, rows_of
from gem.config import Config, EventSize, Layout
from gem.counts import Counts, linear_flops
from gem.dataset import CANDIDATE, Batch, Schema
from gem.norms import LayerNorm
from kernels.jagged import positions, row_ids

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
        parts = [self.tables(batch.sparse).values()]
        if self.dense_up is not None:
            parts.append(self.dense_down(F.gelu(self.dense_up(batch.dense))).to(parts[0].dtype))
        tokens = self.project(torch.cat(parts, 1))
        return self.norm(tokens.unflatten(-1, (self.num_tokens, -1)))

    def flops(self, counts: Counts) -> int:
        modules = [self.project, self.dense_up, self.dense_down]
        return sum(linear_flops(counts.batch, module) for module in modules if module is not None)


class HistoryTables(nn.Module):
    """Lookups of every event type in one EmbeddingCollection: KJT -> name -> float32 [T, table_dim]."""

    def __init__(self, config: Config, schema: Schema, device: torch.device | str = "cpu"):
        super().__init__()
        dim = config.model.table_dim
        by_size: dict[int, list[str]] = {}
        for event in schema.events:
            by_size.setdefault(event.num_items, []).append(f"{event.name}_item")
        if schema.has_candidate:
            by_size[schema.sparse[CANDIDATE][0]].insert(0, CANDIDATE)
        tables = [
            EmbeddingConfig(
                name=f"table_items_{size}", embedding_dim=dim, num_embeddings=size, feature_names=names, init_fn=_init
            )
            for size, names in by_size.items()
        ]
        tables += [
            EmbeddingConfig(
                name=f"table_{event.name}_action",
                embedding_dim=dim,
                num_embeddings=event.num_actions,
                feature_names=[f"{event.name}_action"],
                init_fn=_init,
            )
            for event in schema.events
        ]
        self.tables = EmbeddingCollection(tables=tables, device=torch.device(device))
        self.has_candidate = schema.has_candidate

    def forward(self, batch: Batch) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], torch.Tensor | None]:
        """Rows and offsets by feature name, and the candidate's mean embedding [B, table_dim] if the data have one."""
        looked_up = self.tables(batch.sequence)
        rows = {name: jagged.values() for name, jagged in looked_up.items()}
        offsets = {name: jagged.offsets() for name, jagged in looked_up.items()}
        candidate = None
        if self.has_candidate:
            values, starts = rows[CANDIDATE], offsets[CANDIDATE].long()
            total = values.new_zeros(batch.size, values.shape[1])
            total = total.index_add(0, row_ids(starts, values.shape[0]), values)
            candidate = total / starts.diff().clamp(min=1)[:, None].to(total.dtype)
        return rows, offsets, candidate


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

    def forward(self, batch: Batch, rows, offsets, candidate: torch.Tensor | None) -> Events:
        items, actions = rows[f"{self.name}_item"], rows[f"{self.name}_action"]
        starts = offsets[f"{self.name}_item"].long()
        ages, total, longest = batch.ages[self.name], items.shape[0], batch.longest[self.name]
        parts = [items, actions]
        if candidate is not None:
            parts.append(items * rows_of(candidate, starts, total))
        cos, sin = rotary_tables(positions(starts, total), ages, self.head_dim, self.time_scale)
        inputs, age = torch.cat(parts, 1), ages_to_tau(ages, self.time_scale)
        mask = None
        if self.padded:
            inputs, age, cos, sin = (pad_rows(x, starts, longest) for x in (inputs, age, cos, sin))
            mask = event_mask(starts, longest)
        values = self.project(inputs)
        values = values + (0.1 * age[..., None] * self.age).to(values.dtype)
        kv_offsets = torch.arange(batch.size + 1, device=starts.device) * self.num_kv
        return Events(values, starts, kv_offsets, mask, cos, sin, longest)

    def flops(self, counts: Counts) -> int:
        return linear_flops(counts.events(self.name), self.project)
