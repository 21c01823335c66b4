"""torch.compile, put on from outside: each module of a layer is one graph, whatever the batch's lengths; so is what
lies between the table lookups and the first layer, and so are the heads.

A layer's modules are its summary, its interaction, and the feed-forward, self-attention and pooling of each branch.
They meet in nothing but their activations, so that a graph of a whole layer fuses nothing that theirs do not; and
modules of one structure share a graph across layers and event types, which makes a model some ten graphs to compile
instead of one a layer with a copy of the same kernels for every branch.

Order in which a model is wrapped (see `gem.train.build`): precision (replaces linear layers) -> fused tables -> compile
(of what is then there) -> checkpointing (recomputes compiled modules) -> CUDA graphs (gem/graphs.py, one GPU) or
parallelism. Lookups are never compiled: they are one kernel, or communication. Compiled is a module's `forward`, not
its call: hooks run outside of the graph.

Shapes are symbols from the first trace on, so the number of graphs is fixed after the first step. `graphs()` counts
them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx.experimental import _config as symbolic

from gem.model import GEM

BACKENDS = ("eager", "aot_eager", "inductor")


def compiled(call: Callable, backend: str | Callable) -> Callable:
    """One graph of `call` for all lengths. fullgraph: a graph break is an error, not a slow run."""
    return torch.compile(call, backend=backend, fullgraph=True, dynamic=True)


def compile_module(module: nn.Module, backend: str | Callable) -> None:
    """Compile in place, whatever was there before."""
    module.forward = compiled(type(module).forward.__get__(module), backend)


def is_compiled(module: nn.Module) -> bool:
    return "forward" in vars(module)


def leave_plain(module: nn.Module) -> None:
    """Take off what `compile_module` put on."""
    vars(module).pop("forward", None)


def settle(modules: int) -> None:
    """Limits of the compiler that hold for the whole process; `modules` of one class may each need a graph."""
    # scales are constants of a graph, lengths are not
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 16 * modules)
    # a batch of 1,024 whose longest history is 1,024 must not make the two one symbol
    symbolic.use_duck_shape = False


def apply(model: GEM, implementation: str, *, regions: bool = True) -> GEM:
    """Compile in place. implementation: "eager" leaves the model alone; others are torch.compile backends.

    regions: False leaves the modules that can be checkpointed to whoever compiles them under a budget
    (gem/checkpointing.py).
    """
    if implementation not in BACKENDS:
        raise ValueError(f"compile: unknown implementation {implementation!r}; allowed: {', '.join(BACKENDS)}")
    if implementation == "eager":
        return model
    settle(len(model.layers))
    for layer in model.layers:
        compile_module(layer.summary, implementation)
        for module in layer.modules_by_name().values() if regions else ():
            compile_module(module, implementation)
    # methods: the lookups beside them stay outside
    for module in (model.features, *model.embed.values()):
        module.mix = compiled(module.mix, implementation)
    compile_module(model.heads, implementation)
    return model


def graphs() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def summary() -> str:
    """What was compiled in this process, for a log: graphs, and how often the cache on disk had one (forward and
    backward are asked for apart)."""
    found = torch._dynamo.utils.counters["inductor"]
    hits, misses = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
    return f"{graphs()} graphs, {hits} of {hits + misses} halves from the compiler's cache"
