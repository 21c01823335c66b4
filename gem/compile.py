"""torch.compile, put on from outside: each layer is one graph, whatever the batch's lengths; so is what lies between
the table lookups and the first layer, and so are the heads.

Order in which a model is wrapped (see `gem.train.build`): precision (replaces linear layers) -> fused tables -> compile
(of what is then there) -> checkpointing (recomputes compiled layers) -> parallelism. Lookups are never compiled: they
are one kernel, or communication.

Layers of the same structure share a graph, and shapes are symbols from the first trace on, so the number of graphs is
fixed after the first step. `graphs()` counts them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental import _config as symbolic

from gem.model import GEM

BACKENDS = ("eager", "aot_eager", "inductor")


def compiled(call: Callable, backend: str | Callable) -> Callable:
    """One graph of `call` for all lengths. fullgraph: a graph break is an error, not a slow run."""
    return torch.compile(call, backend=backend, fullgraph=True, dynamic=True)


def apply(model: GEM, implementation: str, *, layers: bool = True) -> GEM:
    """Compile in place. implementation: "eager" leaves the model alone; others are torch.compile backends.

    layers: False leaves them to whoever divides them into smaller graphs (gem/checkpointing.py).
    """
    if implementation not in BACKENDS:
        raise ValueError(f"compile: unknown implementation {implementation!r}; allowed: {', '.join(BACKENDS)}")
    if implementation == "eager":
        return model
    # scales are constants of a graph, lengths are not; the layers share one forward, so each counts as a
    # recompilation
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16 * len(model.layers))
    # a batch of 1,024 whose longest history is 1,024 must not make the two one symbol
    symbolic.use_duck_shape = False
    settings = {"backend": implementation, "fullgraph": True, "dynamic": True}
    for layer in model.layers if layers else ():
        layer.compile(**settings)
    # methods, not modules: the lookups beside them stay outside, and no parameter changes its name
    for module in (model.features, *model.embed.values()):
        module.mix = torch.compile(module.mix, **settings)
    model.heads.compile(**settings)
    return model


def graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
