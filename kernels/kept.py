"""Tables that follow from a batch's offsets, built once and kept while those offsets live unchanged."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import torch

_KEPT: dict[tuple, tuple] = {}
_ASKED: list[Callable] | None = None
_GRAPH: dict[tuple, tuple] | None = None


@contextlib.contextmanager
def asked() -> Iterator[list[Callable]]:
    """Within the block, what `kept` is asked for, there or not, as functions that build it anew: for timing."""
    global _ASKED
    before, _ASKED = _ASKED, []
    try:
        yield _ASKED
    finally:
        _ASKED = before


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Around the capture of one CUDA graph, forward and backward: its kernels share a table, which each replay builds
    once. What is kept keeps its memory until the capture ends, so that nothing later in the graph writes over it."""
    global _GRAPH
    before, _GRAPH = _GRAPH, {}
    try:
        yield
    finally:
        _GRAPH = before


def _stream(x: torch.Tensor) -> int | None:
    """The stream that work on x's device goes to now, 0 on a CPU; None while it is being captured into a graph."""
    if not x.is_cuda:
        return 0
    if torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(x.device).cuda_stream


def kept(build, q_offsets: torch.Tensor | None, kv_offsets: torch.Tensor, *sizes: int):
    """build(q_offsets, kv_offsets, *sizes), kept for a pair of offsets tensors.

    The layers of a step share their offsets, so only the first one pays. The key holds the tensors' identity and
    version, and the stream, behind which the table is ready; entries leave with their offsets tensor. Built anew each
    time for inference tensors, which have no version. Inside a CUDA graph, whose replays see other offsets at the same
    address, a table belongs to the graph: built anew each time, or once in the block of `one_graph`.
    """
    if _ASKED is not None:
        _ASKED.append(partial(build, q_offsets, kv_offsets, *sizes))
    given = [x for x in (q_offsets, kv_offsets) if x is not None]
    stream = _stream(kv_offsets)
    if any(x.is_inference() for x in given) or (stream is None and _GRAPH is None):
        return build(q_offsets, kv_offsets, *sizes)
    versions = [(id(x), x._version) for x in given]
    key = (build.__module__, build.__qualname__, q_offsets is None, *versions, stream, *sizes)
    if stream is None:
        if key not in _GRAPH:
            _GRAPH[key] = (given, build(q_offsets, kv_offsets, *sizes))
        return _GRAPH[key][1]
    found = _KEPT.get(key)
    if found is not None and all(ref() is x for ref, x in zip(found[0], given, strict=True)):
        return found[1]
    built = build(q_offsets, kv_offsets, *sizes)
    _KEPT[key] = ([weakref.ref(x, lambda _: _KEPT.pop(key, None)) for x in given], built)
    return built
