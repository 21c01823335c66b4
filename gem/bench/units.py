"""The parts of a training step alone on one device: embedding, each layer as training runs it, heads, optimiser.

The source's local MFU runs the layers one by one on one GPU, without recomputation and without communication, and
averages by weight. Weighted by time the average is the FLOPs of all layers over the time of all layers over the peak.
The inputs are those of a real forward pass; the compiled layers are the very ones that train. What a step takes
beyond its layers is the optimiser, which is timed here too, and what the parts lose side by side.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from gem import train
from gem.bench.timing import Timing, clock_for, measure
from gem.config import Config
from gem.counts import Counts
from gem.dataset import Batch
from gem.heads import batch_loss
from gem.model import GEM
from kernels.kept import one_graph

# Overwritten before each call: longer than the launch of a layer's kernels takes the CPU, so that the GPU never waits.
FLUSH_BYTES = 2**30


@dataclass(frozen=True)
class Part:
    """One part: name, model FLOPs of forward and backward, and a call that runs both. fixed: a CUDA graph can hold it,
    which neither lookups nor the optimiser are made for."""

    name: str
    flops: int
    call: Callable[[], None]
    fixed: bool = True


@dataclass(frozen=True)
class Timed:
    """captured: timed as a CUDA graph, so that the host has no part in it."""

    part: Part
    timing: Timing
    captured: bool = False


def parts_of(model: GEM, batch: Batch, config: Config) -> list[Part]:
    """The parts of a model on one batch, without the optimiser."""
    counts = Counts(batch.size, batch.lengths)
    entered: list[tuple] = []  # (layer, inputs)
    inside = model.run_layer

    def record(layer, *inputs):
        entered.append((layer, inputs))
        return inside(layer, *inputs)

    model.run_layer = record
    try:
        with train.autocast(config, batch.dense.device):
            last = _last_hidden(model, batch)
    finally:
        model.run_layer = inside

    def embedding():
        x, events = model.features(batch), model.embed_events(batch)
        return [x, *(item.values for item in events.values())]

    def heads(x):
        return [batch_loss(model.heads(x), batch)]

    whole = model.flops(counts)
    table = [name for name in ("features", "history", "embed") if getattr(model, name, None) is not None]
    dense = [value for name in table for value in getattr(model, name).parameters()]
    found = [_part("embedding", 3 * whole["embedding"], embedding, (), dense, config, batch, fixed=False)]
    for index, (layer, inputs) in enumerate(entered):
        flops = 3 * sum(layer.flops(counts).values())
        run = _layer_call(layer)
        found.append(_part(f"layer{index}", flops, run, inputs, list(layer.parameters()), config, batch))
    found.append(_part("heads", 3 * whole["heads"], heads, (last,), list(model.heads.parameters()), config, batch))
    return found


def _last_hidden(model: GEM, batch: Batch) -> torch.Tensor:
    """Input of the heads in a whole forward pass."""
    kept = []
    hook = model.heads.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    try:
        model(batch)
    finally:
        hook.remove()
    return kept[0]


def _layer_call(layer) -> Callable:
    def run(*inputs):
        x, events, pooled = layer(*inputs)
        return [x, *(item.values for item in events.values()), *pooled.values()]

    return run


def _part(name, flops, run, inputs, parameters, config: Config, batch: Batch, fixed: bool = True) -> Part:
    return Part(name, flops, closure(run, inputs, parameters, config, batch.dense.device), fixed)


def closure(
    run: Callable, inputs: tuple, parameters: list[torch.nn.Parameter], config: Config, device: torch.device
) -> Callable[[], None]:
    """A call that runs forward and backward of `run(*inputs) -> outputs`.

    Inputs become fresh leaves once. Gradients of the outputs are random, of unit norm. Gradients of parameters and
    inputs are dropped first, as training drops them, so that they are written and not added.
    """
    inputs = tuple(map(leaves, inputs))
    grads: list[torch.Tensor] = []
    reached = [item for item in tensors(inputs) if item.requires_grad]

    def call() -> None:
        for value in (*parameters, *reached):
            value.grad = None
        with train.autocast(config, device):
            outputs = [item for item in run(*inputs) if item.grad_fn is not None]
        if not grads:
            grads.extend(
                torch.randn_like(item) / item.numel() ** 0.5 if item.dim() else torch.ones_like(item)
                for item in outputs
            )
        torch.autograd.backward(outputs, grads)

    return call


def leaves(value):
    """The same structure with fresh copies of its tensors, which take gradients where the given ones did: a layer that
    was compiled for the gradients of training must not meet others here. Rotary tables and offsets stay as they are.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, list):
        return [leaves(item) for item in value]
    if hasattr(value, "_replace"):  # Events: only its values are activations
        return value._replace(values=leaves(value.values))
    return value


def tensors(value) -> Iterable[torch.Tensor]:
    """All tensors of a nested structure."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)


def optimizer_part(model: GEM, optimizers) -> Part:
    """Clipping and the dense update, with the gradients that are there: call it after a backward pass."""
    kept = [(value, value.grad) for value in model.dense_parameters().values() if value.grad is not None]
    device = kept[0][0].device
    on_gpu, good = device.type == "cuda", torch.zeros((), device=device)

    def call() -> None:
        for value, gradient in kept:
            value.grad = gradient
        if on_gpu:
            optimizers.clip_and_step(0, good)
        else:
            optimizers.clip()
            optimizers.step(0)

    return Part("optimizer", 0, call, fixed=False)


class CaptureError(RuntimeError):
    """A capture failed half-way: random numbers and the allocator of this process are not to be trusted after it."""


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object] | None:
    """`call`, whose inputs are always the same tensors, as one CUDA graph; None where there is no GPU. CaptureError: it
    cannot be captured.

    A module alone is a few kernels, which a GPU runs faster than a host can queue them. The source's local MFU is about
    the kernels.
    """
    if device.type != "cuda":
        return None
    # An autograd graph of before that some circle keeps alive would add its gradients on its own stream, which a
    # capture may not wait for.
    gc.collect()
    stream, before = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(before)
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    before.wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"), one_graph():
            call()
    except RuntimeError as error:
        torch.cuda.set_stream(before)
        raise CaptureError(f"not captured: {' '.join(str(error).split())[:200]}") from error
    return graph.replay


def launch_note(captured: bool) -> str:
    """For a record."""
    return "as one CUDA graph" if captured else "launched kernel by kernel"


def time_parts(parts: Iterable[Part], device: torch.device, repeat_ms: float, clock=None) -> list[Timed]:
    """Each part alone, a few calls."""
    clock = clock or clock_for(device.type, FLUSH_BYTES)
    settings = {"device": device.type, "warmup": 2, "repeat_ms": repeat_ms, "min_repeats": 5, "max_repeats": 50}
    found = []
    for part in parts:
        graph = captured(part.call, device) if part.fixed else None
        found.append(Timed(part, measure(graph or part.call, clock=clock, **settings), graph is not None))
        del graph  # its memory is wanted for the next one
    return found


def local_mfu(timed: Iterable[Timed], peak_flops: float) -> float:
    """Time-weighted mean of the parts' MFU: their FLOPs over their time over the peak."""
    timed = list(timed)
    return sum(item.part.flops for item in timed) / sum(item.timing.p50 for item in timed) * 1e3 / peak_flops
