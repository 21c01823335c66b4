"""Whether a variant computes what it should, before it is timed: loss and gradients of a small batch.

The reference is the same mathematics in its plainest form: jagged layout, eager implementations, separate norms and
rotary, no compilation, float32. Another run of it in the variant's own precision says how far rounding alone moves
each gradient; the variant may err a few times as much.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch

from gem import train
from gem.bench.batches import MemorySplit, schema_of
from gem.config import AttentionImpl, Checkpointing, Config, GdpaImpl, Implementations, Layout, NormMode, RotaryMode
from gem.dataset import Batch
from gem.model import GEM

LENGTHS = (130, 0, 65, 1, 64, 200, 17, 3)  # around the edges of tiles and blocks; empty and short histories
TABLE_ROWS = 1000
MARGIN = 4.0  # times the error of same-precision eager
FLOOR = {"bfloat16": 1e-2, "float32": 2e-4}  # of a gradient's norm: sums in another order
SMALL = 1e-3  # a gradient below this share of the largest counts as that large


def small_split(data: dict) -> MemorySplit:
    """The split of the check: one batch of LENGTHS, cut where an event type's histories are shorter."""
    schema = schema_of(data, TABLE_ROWS)
    lengths = {event.name: np.minimum(LENGTHS, event.max_length).astype(np.int64) for event in schema.events}
    return MemorySplit(schema, len(LENGTHS), data, seed=7, lengths=lengths)


def whole_batch(split: MemorySplit, device: torch.device) -> Batch:
    """All rows of a split as one batch."""
    return split.batch(np.arange(split.num_rows)).to(device)


def reference_of(config: Config, dtype: str) -> Config:
    """The same mathematics in its plainest form."""
    toggles = dataclasses.replace(
        config.toggles,
        layout=Layout.JAGGED,
        attention_impl=AttentionImpl.VARLEN,
        gdpa_impl=GdpaImpl.EAGER,
        rotary=RotaryMode.SEPARATE,
        norm=NormMode.SEPARATE,
        checkpointing=Checkpointing.NONE,
    )
    return dataclasses.replace(config, toggles=toggles, implementations=Implementations(), dtype=dtype)


def gradients(model: GEM, batch: Batch, config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the gradient of every dense parameter, which is taken off the model again."""
    loss = train.forward_loss(model, batch, config)
    loss.backward()
    found = {
        f"gradient of {name}": value.grad for name, value in model.dense_parameters().items() if value.grad is not None
    }
    for value in model.parameters():
        value.grad = None
    return float(loss.detach()), found


def twin(model: GEM, config: Config) -> GEM:
    """A model of another configuration that shares every parameter and table with `model`; nothing put on it."""
    with torch.device("meta"):
        other = GEM(config, model.schema, "meta")
    other.features.tables = model.features.tables
    if other.history is not None:
        other.history.tables = model.history.tables
    dense = dict(model.named_parameters())
    for name, _ in list(other.dense_parameters().items()):
        owner, _, leaf = name.rpartition(".")
        other.get_submodule(owner)._parameters[leaf] = dense[name]
    return other


def problem(model: GEM, batch: Batch, config: Config, run: Callable = gradients) -> tuple[str | None, float]:
    """(what is wrong or None, relative error of all dense gradients together) of a variant on a small batch.

    model: the variant's, as it will be timed. `run` computes loss and gradients.
    """
    references = {
        dtype: run(twin(model, reference_of(config, dtype)), batch, reference_of(config, dtype))
        for dtype in dict.fromkeys(("float32", config.dtype))
    }
    exact_loss, exact = references["float32"]
    eager_loss, eager = references[config.dtype]
    loss, found = run(model, batch, config)
    floor = FLOOR[config.dtype]
    if not math.isfinite(loss) or abs(loss - exact_loss) > MARGIN * abs(eager_loss - exact_loss) + floor * exact_loss:
        return f"loss {loss:.6g}, {exact_loss:.6g} expected (eager {config.dtype}: {eager_loss:.6g})", math.inf
    return compare(found, eager, exact, config.dtype)


def compare(
    found: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: str
) -> tuple[str | None, float]:
    """(first tensor that is off or None, relative error of all together). eager: the reference in `dtype`; exact: in
    float32."""
    if set(found) != set(exact):
        return f"{sorted(set(found) ^ set(exact))[:3]}: on one side only", math.inf
    floor = FLOOR[dtype]
    largest = max(float(value.norm()) for value in exact.values())
    worst, error, whole = None, 0.0, 0.0
    for name, right in exact.items():
        off, own, size = (float(x.float().norm()) for x in (found[name] - right, eager[name] - right, right))
        error, whole = error + off**2, whole + size**2
        allowed = MARGIN * own + floor * max(size, SMALL * largest)
        if not off <= allowed and worst is None:
            worst = f"{name}: error {off:.3g}, norm {size:.3g}, allowed {allowed:.3g}"
    return worst, math.sqrt(error / whole)
