"""Activation checkpointing, put on from outside: which activations of the forward are kept for the backward.

A region is a module with a budget of its own: the feed-forward, self-attention or pooling of an event type in a layer,
or a layer's experts. The budget is the share of its activations that may be kept: 1 keeps all, 0 keeps nothing but the
region's inputs and runs it again in the backward. Under torch.compile a region is one graph and the compiler's
partitioner chooses what to keep within the budget; without a compiler nothing lies between all and nothing.

Source: one global budget for the compiled model is replaced by a budget a region, spent where a gigabyte saves the
most milliseconds. `uniform` gives every region the same budget; `region` measures the regions on a batch
(`gem.regions`) and divides the same total.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gem import compile as compilation
from gem import regions as measured
from gem.config import Checkpointing, SavedActivations
from gem.model import GEM
from gem.saved_activations import quantised

LEVELS = {"eager": (0.0, 1.0)}  # what nothing but torch.utils.checkpoint can do
COMPILED_LEVELS = (0.0, 0.5, 1.0)


def levels(backend: str) -> tuple[float, ...]:
    """Budgets that are tried for a region under a compile implementation of the tier."""
    return LEVELS.get(backend, COMPILED_LEVELS)


def regions(model: GEM) -> dict[str, nn.Module]:
    """Name -> module of every part of a layer that can have a budget of its own, in the order of the forward."""
    return {
        f"layer{index}.{name}": module
        for index, layer in enumerate(model.layers)
        for name, module in layer.modules_by_name().items()
    }


def set_budgets(model: GEM, budgets: Mapping[str, float], backend: str) -> None:
    """Give regions their budgets, each in [0, 1]; a region that is not named keeps what it had.

    backend "eager": budgets below 1 run the region again in the backward. Others are torch.compile backends: every
    named region becomes one graph whose partitioner keeps at most that share. ValueError: unknown region or budget.
    """
    known = regions(model)
    for name, budget in budgets.items():
        if name not in known:
            raise ValueError(f"checkpointing: unknown region {name!r}; allowed: {', '.join(known)}")
        if not 0 <= budget <= 1:
            raise ValueError(f"checkpointing: budget {budget} of region {name}; allowed: numbers in [0, 1]")
        region = known[name]
        plain = type(region).forward.__get__(region)
        if backend != "eager":
            compilation.compile_module(region, _within(float(budget), backend))
        elif budget < 1:
            region.forward = partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)
        else:
            region.forward = plain


@lru_cache
def _within(budget: float, backend: str) -> Callable:
    """A torch.compile backend whose partitioner keeps at most this share. An object of its own for each budget: the
    compiler reuses a graph of the same code only for the same backend."""

    def within_budget(graph, inputs):
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return within_budget


def apply(
    model: GEM,
    mode: Checkpointing,
    *,
    backend: str = "eager",
    budget: float = 0.5,
    saved: SavedActivations = SavedActivations.FULL,
    forward: Callable[[], object] | None = None,
) -> GEM:
    """none: the layers stay as they are. uniform: `budget` for every region (eager: 0). region: budgets that divide
    the same total by what each region's memory costs in time, measured by running `forward`, which must call the
    model. saved: the format in which what is kept waits for the backward (`gem.saved_activations`).

    backend: the tier's compile implementation. The model must not have been compiled as a whole.
    """
    names = list(regions(model))
    if mode is Checkpointing.UNIFORM:
        set_budgets(model, dict.fromkeys(names, budget if backend != "eager" else 0.0), backend)
    elif mode is Checkpointing.REGION:
        if forward is None:
            raise ValueError(
                "checkpointing: region needs a forward pass to measure; allowed: none, uniform without one"
            )
        points = measured.measure(
            model, forward, regions(model), levels(backend), partial(set_budgets, backend=backend)
        )
        model.region_points = points
        limit = budget * measured.total_memory(points, dict.fromkeys(names, 1.0))
        set_budgets(model, measured.plan(points, limit), backend)
    if saved is not SavedActivations.FULL:
        model.run_layer = quantised(model, saved.value)
    return model
