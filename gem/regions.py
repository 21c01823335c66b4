"""What the activations of a model's regions cost: measured points, and the plan that spends memory where it saves time.

A point is one region at one budget: milliseconds of forward and backward, GiB kept between them. A plan picks one
point a region. Source: budgets of regions come from how many milliseconds a kept gigabyte saves there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

REPEATS = 3
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """One region at one budget in [0, 1]: milliseconds of forward and backward, GiB kept between them."""

    region: str
    budget: float
    time_ms: float
    memory_gib: float


def plan(points: Sequence[Point], limit_gib: float) -> dict[str, float]:
    """Region -> budget: the least time whose memory is within the limit.

    Every region starts at its smallest point; steps along its lower convex hull are taken in the order of
    milliseconds saved a GiB while they fit. That is the optimum of the problem with divisible steps, and one step short
    of it at most. A uniform budget that fits and is faster is taken instead. ValueError where nothing fits.
    """
    by_region: dict[str, list[Point]] = {}
    for point in points:
        by_region.setdefault(point.region, []).append(point)
    hulls = {name: _hull(options) for name, options in by_region.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    used = sum(point.memory_gib for point in chosen.values())
    if used > limit_gib * (1 + 1e-9) + 1e-12:
        raise ValueError(
            f"checkpointing: limit {limit_gib:.3g} GiB; allowed: at least {used:.3g}, all regions at least"
        )
    steps = [
        ((low.time_ms - high.time_ms) / (high.memory_gib - low.memory_gib), name, index + 1)
        for name, hull in hulls.items()
        for index, (low, high) in enumerate(itertools.pairwise(hull))
    ]
    for _, name, index in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        hull = hulls[name]
        if chosen[name] is not hull[index - 1]:
            continue  # an earlier step of this region did not fit
        more = hull[index].memory_gib - hull[index - 1].memory_gib
        if used + more <= limit_gib * (1 + 1e-9) + 1e-12:
            chosen[name], used = hull[index], used + more
    best = {name: point.budget for name, point in chosen.items()}
    candidates = [best]
    for level in sorted({point.budget for point in points}):
        uniform = dict.fromkeys(by_region, level)
        if all(any(p.budget == level for p in options) for options in by_region.values()):
            if total_memory(points, uniform) <= limit_gib * (1 + 1e-9):
                candidates.append(uniform)
    return min(candidates, key=lambda budgets: total_time(points, budgets))


def _hull(options: Sequence[Point]) -> list[Point]:
    """Points of a region that some trade of time against memory prefers, by rising memory and falling time."""
    best = []
    for point in sorted(options, key=lambda p: (p.memory_gib, p.time_ms)):
        if best and point.time_ms >= best[-1].time_ms:
            continue  # more memory and no faster
        while len(best) > 1 and _slope(best[-2], best[-1]) <= _slope(best[-2], point):
            best.pop()
        best.append(point)
    return best


def _slope(low: Point, high: Point) -> float:
    """Milliseconds saved a GiB; points of equal memory do not reach here (the slower is dropped)."""
    return (low.time_ms - high.time_ms) / max(high.memory_gib - low.memory_gib, 1e-12)


def total_memory(points: Sequence[Point], budgets: Mapping[str, float]) -> float:
    """GiB kept under the budgets, as measured region by region."""
    return sum(point.memory_gib for point in points if budgets.get(point.region) == point.budget)


def total_time(points: Sequence[Point], budgets: Mapping[str, float]) -> float:
    """Milliseconds of forward and backward of all regions under the budgets."""
    return sum(point.time_ms for point in points if budgets.get(point.region) == point.budget)


def measure(
    model: nn.Module,
    forward: Callable[[], object],
    regions: Mapping[str, nn.Module],
    levels: Sequence[float],
    set_budgets: Callable[[nn.Module, Mapping[str, float]], None],
) -> list[Point]:
    """Points of every region at every level, on the inputs that `forward` (it calls the model) gives the region.

    Leaves the regions at the last level and no gradient behind. The first call of a level, which may compile, is not
    timed.
    """
    inputs, contexts = _inputs(forward, regions)
    points = []
    for level in levels:
        set_budgets(model, dict.fromkeys(regions, level))
        for name, region in regions.items():
            with torch.autocast(**contexts[name]):
                _run(region, inputs[name])
                memory = _kept_bytes(region, inputs[name]) / GIB
                times = [_run(region, inputs[name]) for _ in range(REPEATS)]
            points.append(Point(name, float(level), float(np.median(times)), memory))
    model.zero_grad(set_to_none=True)
    return points


def _inputs(forward: Callable[[], object], regions: Mapping[str, nn.Module]) -> tuple[dict, dict]:
    """Detached inputs of each region in one forward pass, and the autocast state that it ran under."""
    inputs: dict[str, tuple] = {}
    contexts: dict[str, dict] = {}

    def keep(name):
        def hook(_, args):
            inputs[name] = tree_map(_leaf, args)
            device = next((x.device.type for x in tree_flatten(args)[0] if isinstance(x, torch.Tensor)), "cpu")
            contexts[name] = {
                "device_type": device,
                "dtype": torch.get_autocast_dtype(device),
                "enabled": torch.is_autocast_enabled(device),
            }

        return hook

    handles = [region.register_forward_pre_hook(keep(name)) for name, region in regions.items()]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return inputs, contexts


def _leaf(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _outputs(region: nn.Module, inputs: tuple) -> list[torch.Tensor]:
    flat, _ = tree_flatten(region(*inputs))
    given = {id(x) for x in tree_flatten(inputs)[0]}
    return [x for x in flat if isinstance(x, torch.Tensor) and x.requires_grad and id(x) not in given]


def _run(region: nn.Module, inputs: tuple) -> float:
    """Milliseconds of one forward and backward."""
    _synchronize(inputs)
    start = time.perf_counter()
    outputs = _outputs(region, inputs)
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    _synchronize(inputs)
    elapsed = (time.perf_counter() - start) * 1e3
    for value in tree_flatten(inputs)[0]:
        if isinstance(value, torch.Tensor):
            value.grad = None
    return elapsed


def _kept_bytes(region: nn.Module, inputs: tuple) -> int:
    """Bytes that a forward pass keeps for the backward: storages counted once, parameters and inputs not at all."""
    known = {x.untyped_storage().data_ptr() for x in tree_flatten(inputs)[0] if isinstance(x, torch.Tensor)}
    known |= {x.untyped_storage().data_ptr() for x in region.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(value):
        storage = value.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        outputs = _outputs(region, inputs)
    total = sum(value.untyped_storage().nbytes() for value in kept.values())
    del outputs
    return total


def _synchronize(inputs: tuple) -> None:
    for value in tree_flatten(inputs)[0]:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            torch.cuda.synchronize(value.device)
            return
