"""Collectives of a step in the order in which a rank issues them, from a profile: torch.profiler on a CPU or a GPU.

`record` runs a call and returns its collectives. Each has the name of the range that it was issued in: FSDP's own
("FSDP::all_gather (layers.0)"), those of gem.parallel.experts, or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

# operators of torch.distributed -> the collective
KINDS = {
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
}
RANGE = re.compile(r"FSDP::(?:all_gather|post_backward_reduce)(?: \((?P<unit>.*)\))?|experts::\S+ (?P<what>.*)")


@dataclass(frozen=True)
class Collective:
    """kind: all_gather, reduce_scatter, all_reduce, all_to_all or broadcast. what: payload, in words. unit: the FSDP
    unit ("root" for what is in none), or "". elements: of the tensor that the rank hands over, and of what it gets."""

    kind: str
    what: str
    unit: str
    elements: tuple[int, int]

    @property
    def ranks(self) -> int:
        """Size of the group, as the sizes of a gather or scatter show it; 0 where they do not."""
        small, large = sorted(self.elements)
        return large // small if small and self.kind in ("all_gather", "reduce_scatter") else 0


def record(call: Callable[[], object]) -> list[Collective]:
    """Run `call` under the profiler; its collectives in order of issue, whatever thread issued them."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        call()
    return of_events(profiler.events())


def of_events(events) -> list[Collective]:
    """Collectives of `profiler.events()`, which must have been recorded with shapes."""
    ranges, found = [], []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if RANGE.fullmatch(event.name):
            ranges.append((*span, event.thread, event.name))
        elif event.name.startswith("c10d::") and (kind := _kind(event.name)):
            found.append((*span, event.thread, kind, _elements(event, kind)))
    result = []
    for start, end, thread, kind, elements in sorted(found):
        around = [r for r in ranges if r[0] <= start and end <= r[1] and r[2] == thread]
        what, unit = _words(max(around)[3], kind) if around else ("", "")
        result.append(Collective(kind, what, unit, elements))
    return result


def _kind(operator: str) -> str | None:
    name = operator.removeprefix("c10d::").strip("_")
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), None)


def _elements(event, kind: str) -> tuple[int, int]:
    """(handed over, got) from the shapes of the operator's tensors: output first, then input."""
    sizes = [_size(shape) for shape in event.input_shapes if shape]
    if len(sizes) >= 2 and kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return sizes[1], sizes[0]
    return (sizes[0], sizes[0]) if sizes else (0, 0)


def _size(shape) -> int:
    """Elements of a tensor's shape, or of a list of shapes."""
    total = 1
    if shape and isinstance(shape[0], (list, tuple)):
        return sum(_size(item) for item in shape)
    for length in shape:
        total *= length
    return total


def _words(name: str, kind: str) -> tuple[str, str]:
    match = RANGE.fullmatch(name)
    if match["what"]:
        return match["what"], ""
    unit = match["unit"] or "root"
    if kind == "all_gather":
        return "parameters", unit
    return "gradients" if kind == "reduce_scatter" else "gradient shards", unit
