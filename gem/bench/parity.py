"""Whether a variant computes what it should, before it is timed: loss and gradients of a small batch.

The reference is the same mathematics in its plainest form: jagged layout, eager implementations, separate norms and
rotary, no compilation, float32. Another run of it in the variant's own precision says how far rounding alone moves
each gradient; the variant may err a few times as much.

Of a row in 8 bits the blocks are part of the mathematics: both runs of its reference quantise the same operands of the
same layers, in plain torch (gem/bench/low_reference.py), and differ in what is rounded before that and in the random
numbers of stochastic rounding. So the variant may differ from its format by what those two move, and not by as much as
8 bits differ from float32; that distance is the error that is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gem import precision, train
from gem.bench.batches import MemorySplit, schema_of
from gem.bench.low_reference import Plainly
from gem.config import (
    AttentionImpl,
    Checkpointing,
    Config,
    GdpaImpl,
    Implementations,
    Launch,
    Layout,
    NormMode,
    Precision,
    RotaryMode,
)
from gem.dataset import Batch
from gem.model import GEM

LENGTHS = (130, 0, 65, 1, 64, 200, 17, 3)  # around the edges of tiles and blocks; empty and short histories
TABLE_ROWS = 1000
MARGIN = 4.0  # times the error of same-precision eager
LOW_RUNS = 3  # of the reference in 8 bits: its random numbers move a tensor of few elements by chance
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
        launch=Launch.EAGER,
    )
    plain = Implementations(precision=config.implementations.precision)
    return dataclasses.replace(config, toggles=toggles, implementations=plain, dtype=dtype)


def gradients(model: GEM, batch: Batch, config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss, and the gradient of every dense parameter, which is taken off the model again."""
    loss = train.forward_loss(model, batch, config)
    loss.backward()
    return float(loss.detach()), _taken(model)


def as_launched(model: GEM, batch: Batch, config: Config) -> tuple[float, dict[str, torch.Tensor]]:
    """`gradients` as a training step gets them, from CUDA graphs where the model has them."""
    if model.replay is None:
        return gradients(model, batch, config)
    loss = float(train.backward(model, batch, config))
    return loss, _taken(model)


def _taken(model: GEM) -> dict[str, torch.Tensor]:
    """The gradients of dense parameters, taken off the model."""
    found = {
        f"gradient of {name}": value.grad for name, value in model.dense_parameters().items() if value.grad is not None
    }
    for value in model.parameters():
        value.grad = None
    return found


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
    low = config.toggles.precision is not Precision.BF16
    exact_loss, exact = reference(model, batch, reference_of(config, "float32"), run, low)
    again = LOW_RUNS if low else int(config.dtype != "float32")
    own = [reference(model, batch, reference_of(config, config.dtype), run, low) for _ in range(again)]
    loss, found = run(model, batch, config)
    moved = _mean_square([value - exact_loss for value, _ in own])
    if not math.isfinite(loss) or abs(loss - exact_loss) > MARGIN * moved + FLOOR[config.dtype] * exact_loss:
        return f"loss {loss:.6g}, {exact_loss:.6g} expected (eager {config.dtype} off by {moved:.3g})", math.inf
    wrong, error = compare(found, [values for _, values in own], exact, config.dtype)
    if low and wrong is None:
        error = distance(found, reference(model, batch, reference_of(config, "float32"), run, False)[1])
    return wrong, error


def reference(
    model: GEM, batch: Batch, plain: Config, run: Callable, low: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the configuration `plain` on the parameters of `model`. low: quantised as its toggle
    `precision` says, in plain torch."""
    other = twin(model, plain)
    if low:
        precision.apply(other, plain)
    with Plainly() if low else contextlib.nullcontext():
        return run(other, batch, plain)


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Relative error of all tensors together."""
    error, whole = (
        sum(float(x.float().norm()) ** 2 for x in values)
        for values in ((found[name] - right for name, right in exact.items()), exact.values())
    )
    return math.sqrt(error / whole)


def compare(
    found: dict[str, torch.Tensor], own: Sequence[dict[str, torch.Tensor]], exact: dict[str, torch.Tensor], dtype: str
) -> tuple[str | None, float]:
    """(first tensor that is off or None, relative error of all together). own: runs of the reference in `dtype`; exact:
    in float32."""
    if set(found) != set(exact):
        return f"{sorted(set(found) ^ set(exact))[:3]}: on one side only", math.inf
    floor = FLOOR[dtype]
    largest = max(float(value.norm()) for value in exact.values())
    worst = None
    for name, right in exact.items():
        off, size = float((found[name] - right).float().norm()), float(right.float().norm())
        moved = _mean_square([float((values[name] - right).float().norm()) for values in own])
        allowed = MARGIN * moved + floor * max(size, SMALL * largest)
        if not off <= allowed and worst is None:
            worst = f"{name}: error {off:.3g}, norm {size:.3g}, allowed {allowed:.3g}"
    return worst, distance(found, exact)


def _mean_square(values: Sequence[float]) -> float:
    """Root of the mean square, 0 of none."""
    return math.sqrt(sum(value**2 for value in values) / len(values)) if values else 0.0
