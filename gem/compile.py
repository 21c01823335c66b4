"""torch.compile, put on from outside: each layer is one graph, whatever the batch's lengths.

Order in which a model is wrapped (see `gem.train.build`): precision (replaces linear layers) -> compile (of what is
then there) -> checkpointing (recomputes compiled layers) -> parallelism.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gem.model import GEM

BACKENDS = ("eager", "aot_eager", "inductor")


def compiled(call: Callable, implementation: str, num_units: int = 1) -> Callable:
    """One graph of `call` for all lengths. implementation: a torch.compile backend of BACKENDS.

    num_units: how many such graphs share one piece of code (each counts as a recompilation of it).
    """
    _settings(num_units)
    return torch.compile(call, backend=implementation, fullgraph=True, dynamic=True)


def _settings(num_units: int) -> None:
    """Scales are constants of a graph, lengths are not; modules of one class share a forward, and each of them counts
    as a recompilation of it."""
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 8 * num_units)


def apply(model: GEM, implementation: str) -> GEM:
    """Compile every layer in place. implementation: "eager" leaves the model alone; others are torch.compile backends.

    fullgraph: a graph break inside a layer is an error, not a slow run.
    """
    if implementation not in BACKENDS:
        raise ValueError(f"compile: unknown implementation {implementation!r}; allowed: {', '.join(BACKENDS)}")
    if implementation != "eager":
        _settings(len(model.layers))
        for layer in model.layers:
            layer.compile(backend=implementation, fullgraph=True, dynamic=True)
    return model
