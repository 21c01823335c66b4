"""The miniature GEM: embeddings -> layers of (sequence side, interaction side) -> heads.

The model knows one device and one precision. Parallelism, low precision, checkpointing and compilation are put on from
outside, in the order that `gem.compile` documents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from gem.attention import Events
from gem.config import Config, Switch
from gem.counts import Counts
from gem.dataset import Batch, Schema
from gem.embeddings import EventEmbedding, FeatureTokens, HistoryTables
from gem.heads import Heads
from gem.interaction import Interaction, Summary
from gem.sequence import Branch


def branch_steps(layer: int, depth: int, compskip: bool) -> dict[str, bool] | None:
    """What layer number `layer` runs for an event type whose branch is `depth` layers deep; None past its depth.

    Without CompSkip every layer runs all three steps. With it layers alternate: self-attention with the cached
    summary, then feed-forward with fresh pooling, counted so that a branch ends with fresh pooling. (The source
    alternates the same two; which parity comes first only shifts them.)
    """
    if layer >= depth:
        return None
    if not compskip:
        return {"feed_forward": True, "attend": True, "pool": True}
    fresh = (depth - 1 - layer) % 2 == 0
    return {"feed_forward": fresh, "attend": not fresh, "pool": fresh}


class Layer(nn.Module):
    """One layer: every event type's branch, then the experts over [X, X_sum, H]."""

    def __init__(self, config: Config, schema: Schema, layer: int):
        super().__init__()
        self.names = [event.name for event in schema.events] if config.toggles.sequence is Switch.ON else []
        self.summary = Summary(config.model)
        self.branches = nn.ModuleDict()
        for index, name in enumerate(self.names):
            size = config.event_size(index)
            steps = branch_steps(layer, size.num_layers, config.toggles.compskip is Switch.ON)
            if steps is not None:
                self.branches[f"{name}_branch"] = Branch(config, size, **steps)
        self.interaction = Interaction(config.model, len(self.names))

    def forward(
        self, x: torch.Tensor, events: dict[str, Events], pooled: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Events], dict[str, torch.Tensor]]:
        """x [B, num_tokens, width]; pooled: event -> [B, num_seeds, width]."""
        personal = self.summary(x)
        events, pooled = dict(events), dict(pooled)
        for name in self.names:
            if f"{name}_branch" in self.branches:
                events[name], pooled[name] = self.branches[f"{name}_branch"](events[name], personal, pooled[name])
        return self.interaction(x, personal, [pooled[name] for name in self.names]), events, pooled

    def modules_by_name(self) -> dict[str, nn.Module]:
        """The steps of every branch and the interaction, in the order of the forward: the parts that are compiled and
        checkpointed each on its own."""
        found = {
            f"{name}.{step}": module
            for name, branch in self.branches.items()
            for step, module in branch.named_children()
        }
        return found | {"interaction": self.interaction}

    def flops(self, counts: Counts) -> dict[str, int]:
        total = {"interaction": self.interaction.flops(counts), "summary": self.summary.flops(counts)}
        for name in self.names:
            if f"{name}_branch" in self.branches:
                for part, value in self.branches[f"{name}_branch"].flops(counts, name).items():
                    total[part] = total.get(part, 0) + value
        return total


def autocast(config: Config, device: torch.device):
    """bfloat16 matrix products under a tier of that dtype; parameters, losses and optimiser states stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


class Lookups(NamedTuple):
    """What a batch looks up in the tables, float32.

    pooled [B, tables * table_dim]; rows: feature of a history -> [T, table_dim]; candidate [B, table_dim], None where
    the data have none.
    """

    pooled: torch.Tensor
    rows: dict[str, torch.Tensor]
    candidate: torch.Tensor | None


class GEM(nn.Module):
    """Batch -> logits, task -> float32 [B].

    config: sizes and toggles. schema: the dataset's. device: where tables and layers are made.
    """

    def __init__(self, config: Config, schema: Schema, device: torch.device | str = "cpu"):
        super().__init__()
        self.config, self.schema = config, schema
        self.names = [event.name for event in schema.events] if config.toggles.sequence is Switch.ON else []
        self.features = FeatureTokens(config, schema, device)
        self.history = HistoryTables(config, schema, device) if self.names else None
        self.embed = nn.ModuleDict(
            {
                f"{name}_embed": EventEmbedding(config, schema, name, config.event_size(index))
                for index, name in enumerate(self.names)
            }
        )
        self.layers = nn.ModuleList(Layer(config, schema, layer) for layer in range(config.model.num_layers))
        self.heads = Heads(config.model, schema.tasks)
        self.run_layer = lambda layer, *inputs: layer(*inputs)  # checkpointing replaces it
        self.replay: Callable[[Batch], torch.Tensor] | None = None  # gem/graphs.py: forward and backward in one launch
        self.to(device)

    def embed_events(self, batch: Batch) -> dict[str, Events]:
        """The histories before the first layer."""
        if self.history is None:
            return {}
        return self._embedded(batch, *self.history(batch))

    def _embedded(
        self, batch: Batch, rows: dict[str, torch.Tensor], candidate: torch.Tensor | None
    ) -> dict[str, Events]:
        return {name: self.embed[f"{name}_embed"](batch, rows, candidate) for name in self.names}

    def forward(self, batch: Batch) -> dict[str, torch.Tensor]:
        return self.trunk(self.features(batch), self.embed_events(batch))

    def lookup(self, batch: Batch) -> Lookups:
        """The part of the forward whose sizes follow the batch."""
        rows, candidate = self.history(batch) if self.history is not None else ({}, None)
        return Lookups(self.features.lookup(batch), rows, candidate)

    def from_lookups(self, batch: Batch, found: Lookups) -> dict[str, torch.Tensor]:
        """The rest of the forward. Reads of `batch` what is no id: offsets, ages and dense values."""
        x = self.features.mix(found.pooled, batch.dense)
        return self.trunk(x, self._embedded(batch, found.rows, found.candidate))

    def trunk(self, x: torch.Tensor, events: dict[str, Events]) -> dict[str, torch.Tensor]:
        """Layers and heads. x [B, num_tokens, width]."""
        shape = (x.shape[0], self.config.model.num_seeds, self.config.model.width)
        pooled = {name: x.new_zeros(shape) for name in self.names}
        for layer in self.layers:
            x, events, pooled = self.run_layer(layer, x, events, pooled)
        return self.heads(x)

    def table_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the embedding tables, by name; everything else is dense."""
        prefixes = ("features.tables.", "history.tables.")
        return {name: value for name, value in self.named_parameters() if name.startswith(prefixes)}

    def dense_parameters(self) -> dict[str, nn.Parameter]:
        tables = self.table_parameters()
        return {name: value for name, value in self.named_parameters() if name not in tables}

    def flops(self, counts: Counts) -> dict[str, int]:
        """Forward FLOPs of one batch by part: useful pairs only, real lengths, no recompute."""
        total = {"embedding": self.features.flops(counts), "heads": self.heads.flops(counts)}
        total["embedding"] += sum(self.embed[f"{name}_embed"].flops(counts) for name in self.names)
        for layer in self.layers:
            for part, value in layer.flops(counts).items():
                total[part] = total.get(part, 0) + value
        return total

    def step_flops(self, counts: Counts) -> int:
        """Model FLOPs of one training step: forward, and twice that for the backward."""
        return 3 * sum(self.flops(counts).values())
