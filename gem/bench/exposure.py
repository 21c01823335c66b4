"""How long a GPU communicates while it computes nothing: intervals of a profile."""

from __future__ import annotations

import re
from collections.abc import Iterable

# collectives of NCCL; copies between GPUs by copy engines
COMMUNICATION = re.compile(r"nccl|PtoP|Peer", re.IGNORECASE)
# neither work nor communication: ranges that the profiler or the host adds to the device's timeline
ANNOTATION = re.compile(r"^(ProfilerStep|##|c10d|record_param_comms|FSDP::|nccl:|Torch-Compiled|Optimizer\.)")


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, disjoint intervals that cover the same points."""
    merged: list[list[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif end > start:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def outside(inner: Iterable[tuple[float, float]], outer: Iterable[tuple[float, float]]) -> float:
    """Length of `inner` that no interval of `outer` covers."""
    inner, outer = union(inner), union(outer)
    total, place = 0.0, 0
    for start, end in inner:
        total += end - start
        while place < len(outer) and outer[place][1] <= start:
            place += 1
        for left, right in outer[place:]:
            if left >= end:
                break
            total -= min(end, right) - max(start, left)
    return total


def of_profile(events) -> tuple[float, float]:
    """(communication, exposed communication) in ms of all profiled steps, from `profiler.events()`.

    A collective that waits for a slower rank counts as communication, so exposed time includes imbalance.
    """
    talking, working = [], []
    for event in events:
        if not str(event.device_type).endswith("CUDA") or getattr(event, "is_user_annotation", False):
            continue
        if ANNOTATION.match(event.name):
            continue
        interval = (event.time_range.start, event.time_range.end)
        (talking if COMMUNICATION.search(event.name) else working).append(interval)
    return sum(end - start for start, end in union(talking)) / 1e3, outside(talking, working) / 1e3
