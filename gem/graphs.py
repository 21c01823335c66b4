"""Forward and backward of a training step as one launch: CUDA graphs over batches of any lengths.

A step behind its table lookups is about a thousand kernels, and a host that queues them one by one is slower than the
GPU that runs them. A graph replays them all, but with the addresses and sizes of its capture, and no two batches have
the same number of events. So rows have room to spare: a batch is copied to the front of buffers of a fixed size, and
what lies behind its last event belongs to no sequence. That is legal input of every op in `kernels` (rows past
offsets[-1] get zeros in every output and gradient), and what an op has to know of the lengths, its lists of tiles among
them, it finds out on the device, inside the graph. An implementation that looks at lengths on the host cannot be
captured; gem.config refuses those combinations.

The room comes in levels of 2 %, or wider ones for small batches, whose sizes scatter: a batch takes the graph of the
smallest level that holds it, which is captured when it is first needed. All graphs of a model share their memory for
activations, and one for an uncommonly large batch is captured first, so that all others fit into what it took. Lookups
stay outside, as their sizes follow the batch, and so do the optimiser and whatever reads the loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch

from gem.config import Config
from gem.dataset import Batch
from gem.heads import batch_loss
from gem.model import GEM, Lookups, autocast
from kernels.kept import one_graph

STEP = 0.02  # of the first batch's events: a level more, at least
ALIGN = 256  # rows
MOST = 16  # graphs kept, the last used
SPREADS = 3  # standard deviations of a batch's events that the first capture has room for
WARMUP = 2  # runs before a capture: whatever compiles, tunes or loads itself does it there
LAUNCHES = ("eager", "static", "graph")


class Graphs:
    """model.replay: Batch -> loss, a float32 scalar; leaves the gradients of dense parameters in `.grad` (memory of the
    graph, valid until the next call) and has the tables take theirs.

    capture: False runs the same on the same padded buffers without a graph, on any device (for tests).
    """

    def __init__(self, model: GEM, config: Config, *, capture: bool = True):
        self.model, self.config, self.capture = model, config, capture
        self.parameters = list(model.dense_parameters().values())
        self.device = self.parameters[0].device
        self.scales: dict[int, _Scale] = {}  # by local batch
        self.made: OrderedDict[tuple[int, ...], _Graph] = OrderedDict()  # by local batch and rows of each event type
        self.pool = None
        # one for all captures: memory of a pool goes only to the stream that it was first taken for
        self.stream = torch.cuda.Stream(self.device) if capture else None
        self.seconds = 0.0  # spent on captures

    def __call__(self, batch: Batch) -> torch.Tensor:
        with autocast(self.config, self.device):
            found = self.model.lookup(batch)
        graph = self.graph_for(batch)
        graph.load(batch, found)
        loss, gradients = graph.run()
        for parameter, gradient in zip(self.parameters, gradients.parameters, strict=True):
            parameter.grad = gradient
        graph.give_back(found, gradients)
        return loss.clone()

    def clear(self) -> None:
        """Forget all graphs and free their memory: parameters have moved, or something else needs the room."""
        if self.capture:
            torch.cuda.synchronize(self.device)  # a replay may be under way
        self.made.clear()
        self.scales.clear()
        self.pool = None

    def graph_for(self, batch: Batch) -> _Graph:
        """The graph of the batch's level, or of the next above where that is already there."""
        lengths = {name: batch.lengths[name] for name in self.model.names}
        if batch.size not in self.scales:
            self.scales[batch.size] = _Scale.of(lengths)
        scale = self.scales[batch.size]
        level = scale.level({name: int(item.sum()) for name, item in lengths.items()})
        if not any(key[0] == batch.size for key in self.made):
            level = max(level, scale.top)
        keys = [(batch.size, *scale.capacity(each).values()) for each in (level, level + 1)]
        key = next((key for key in keys if key in self.made), keys[0])
        if key not in self.made:
            while len(self.made) >= MOST:
                self.made.popitem(last=False)
            self.made[key] = _Graph(self, batch, dict(zip(lengths, key[1:], strict=True)))
        self.made.move_to_end(key)
        return self.made[key]


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Capacities for batches of one size: level 0 holds the first batch, each level `step` times as much more; few
    batches need more than level `top`."""

    events: dict[str, int]
    step: float
    top: int

    @staticmethod
    def of(lengths: Mapping[str, torch.Tensor]) -> _Scale:
        """From the lengths [B] of the first batch: a step is half of what chance moves the sum of a batch by."""
        every = sum(item.double() for item in lengths.values()) if lengths else torch.zeros(1)
        spread = float(every.std(correction=0) * len(every) ** 0.5 / every.sum().clamp(min=1))
        step = max(STEP, spread / 2)
        events = {name: max(int(item.sum()), ALIGN) for name, item in lengths.items()}
        return _Scale(events, step, math.ceil(SPREADS * spread / step - 1e-9))

    def level(self, events: Mapping[str, int]) -> int:
        """The smallest level that holds these events of every type."""
        most = max((count / self.events[name] for name, count in events.items()), default=1.0)
        return math.ceil((most - 1) / self.step - 1e-9)

    def capacity(self, level: int) -> dict[str, int]:
        """Rows of each event type, whole ALIGN, one at least."""
        wanted = {name: math.ceil(count * (1 + self.step * level)) for name, count in self.events.items()}
        return {name: max(1, -(-count // ALIGN)) * ALIGN for name, count in wanted.items()}


@contextlib.contextmanager
def released(model: GEM) -> Iterator[None]:
    """At the end of the block the model has no graphs. They refer to each other, so that both would outlive their last
    user until Python looks for such circles."""
    try:
        yield
    finally:
        if model.replay is not None:
            model.replay.clear()
            model.replay = None


def apply(model: GEM, config: Config) -> GEM:
    """Put the launch that config.implementations.launch names on the model; last of all, on the final device."""
    launch = config.implementations.launch
    if launch not in LAUNCHES:
        raise ValueError(f"launch: unknown implementation {launch!r}; allowed: {', '.join(LAUNCHES)}")
    if launch == "graph" and next(model.parameters()).device.type != "cuda":
        raise ValueError("launch: implementation 'graph' needs a GPU; allowed: eager, static")
    model.replay = None if launch == "eager" else Graphs(model, config, capture=launch == "graph")
    return model


@dataclasses.dataclass(frozen=True)
class _Gradients:
    parameters: list[torch.Tensor | None]
    lookups: list[torch.Tensor | None]


class _Graph:
    """One capacity: buffers that batches are copied to, and the graph that reads them."""

    def __init__(self, owner: Graphs, batch: Batch, rows: Mapping[str, int]):
        self.owner = owner
        self.rows = rows
        device = owner.device
        self.batch = dataclasses.replace(
            batch,
            sparse=None,
            sequence=None,
            offsets={name: torch.zeros_like(batch.offsets[name]) for name in rows},
            ages={name: torch.zeros(count, device=device) for name, count in rows.items()},
            dense=torch.zeros_like(batch.dense),
            labels={name: torch.zeros_like(item) for name, item in batch.labels.items()},
            weights={name: torch.zeros_like(item) for name, item in batch.weights.items()},
            bayes={},
        )
        self.lookups: list[torch.Tensor] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: tuple[torch.Tensor, _Gradients] | None = None

    def load(self, batch: Batch, found: Lookups) -> None:
        """Copy a batch to the front of the buffers. Behind it are zeros: a weight's gradient is a sum over all rows,
        and zero times what a bad batch left there would not be zero."""
        given = flat(found, self.rows)
        if self.lookups is None:
            self.lookups = [
                item.new_zeros(self.rows.get(_event(name), len(item)), item.shape[1]) for name, item in given
            ]
            for item in self.lookups:
                item.requires_grad_()
        into = [item.detach() for item in self.lookups] + _plain(self.batch, self.rows)
        items = [item.detach() for _, item in given] + _plain(batch, self.rows)
        with torch.no_grad():
            for target, item in zip(into, items, strict=True):
                target[: len(item)].copy_(item)
                target[len(item) :].zero_()

    def run(self) -> tuple[torch.Tensor, _Gradients]:
        if not self.owner.capture:
            return self.compute()
        if self.graph is None:
            self.record()
        self.graph.replay()
        return self.outputs

    def record(self) -> None:
        """Warm up and capture. Nothing is executed for the batch yet."""
        began = time.perf_counter()
        stream = self.owner.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # a thread that pins the next batch allocates meanwhile: only this thread's calls must be capturable
        context = torch.cuda.graph(graph, pool=self.owner.pool, stream=stream, capture_error_mode="thread_local")
        with context, one_graph():
            self.outputs = self.compute()
        self.owner.pool = graph.pool()
        self.graph = graph
        self.owner.seconds += time.perf_counter() - began

    def compute(self) -> tuple[torch.Tensor, _Gradients]:
        """Loss and gradients on the buffers, kernel by kernel."""
        owner, found = self.owner, self.found()
        with autocast(owner.config, owner.device):
            logits = owner.model.from_lookups(self.batch, found)
        loss = batch_loss(logits, self.batch)
        wanted = [*owner.parameters, *self.lookups]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        own = len(owner.parameters)
        of_parameters = [like(item, one) for item, one in zip(gradients[:own], owner.parameters, strict=True)]
        return loss.detach(), _Gradients(of_parameters, list(gradients[own:]))

    def found(self) -> Lookups:
        """The buffers as what a lookup returns."""
        # as views, since those of a batch are no leaves either, and torch.compile tells the two apart
        pooled, *rest = (item.view_as(item) for item in self.lookups)
        rows = {f"{name}_{part}": rest.pop(0) for name in self.rows for part in ("item", "action")}
        return Lookups(pooled, rows, rest[0] if rest else None)

    def give_back(self, found: Lookups, gradients: _Gradients) -> None:
        """Hand the lookups' gradients on to the tables, which are updated on the way."""
        pairs = [
            (item, gradient[: len(item)])
            for (_, item), gradient in zip(flat(found, self.rows), gradients.lookups, strict=True)
            if gradient is not None and item.requires_grad
        ]
        if pairs:
            torch.autograd.backward([item for item, _ in pairs], [gradient for _, gradient in pairs])


def like(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient in the layout of its parameter, which fused optimisers ask for and `.backward()` sees to."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def flat(found: Lookups, events: Mapping[str, int]) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of what a graph takes from the lookups, in the order of its buffers."""
    items = [("", found.pooled)]
    items += [(f"{name}_{part}", found.rows[f"{name}_{part}"]) for name in events for part in ("item", "action")]
    return items if found.candidate is None else [*items, ("", found.candidate)]


def _event(name: str) -> str:
    return name.rpartition("_")[0]


def _plain(batch: Batch, events: Mapping[str, int]) -> list[torch.Tensor]:
    """What a batch has beside ids, in one order."""
    per_event = [item for name in events for item in (batch.offsets[name], batch.ages[name])]
    return [*per_event, batch.dense, *batch.labels.values(), *batch.weights.values()]
