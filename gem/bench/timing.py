"""The only timer. CUDA events on a GPU, `time.perf_counter` on a CPU; median and 20/80 % quantiles, warm-up apart.

What makes a timing wrong, and what is done about it: launches return before the work is done (events, one
synchronisation at the end); the first calls compile and tune (warm-up by count and by time, never counted); the data
of the last call still lie in the cache (a buffer larger than L2 is overwritten before each timed call, and inputs may
rotate); clocks drift (the median and its spread are kept, with the number of samples).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

L2_FLUSH_BYTES = 256 * 2**20  # several times the largest L2 (H200: 50 MB)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call: median, quantiles, timed calls, warm-up calls that were not counted."""

    p50: float
    p20: float
    p80: float
    n: int
    warmup: int

    @staticmethod
    def of(milliseconds: Sequence[float], warmup: int) -> Timing:
        """Summary of timed calls. ValueError where there is none or one is not positive and finite."""
        values = np.asarray(milliseconds, dtype=float)
        if not len(values) or not np.isfinite(values).all() or (values <= 0).any():
            raise ValueError(f"Timing: samples {list(milliseconds)[:5]}; allowed: at least one, positive and finite")
        p20, p50, p80 = np.quantile(values, (0.2, 0.5, 0.8))
        return Timing(float(p50), float(p20), float(p80), len(values), warmup)

    def rate(self, amount: float) -> tuple[float, float, float]:
        """`amount` a second at median, slow and fast quantile: samples in a step give samples/s, FLOPs give FLOP/s."""
        return tuple(amount * 1e3 / value for value in (self.p50, self.p80, self.p20))


class Clock(Protocol):
    """Runs calls and says how long each took, in ms."""

    def run(self, calls: Sequence[Callable[[], object]]) -> list[float]: ...


class CpuClock:
    """Wall clock of the calling thread: CPU operators are done when they return."""

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self.now = now

    def run(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        times = []
        for call in calls:
            start = self.now()
            call()
            times.append((self.now() - start) * 1e3)
        return times


class CudaClock:
    """CUDA events around each call on the current stream, the L2 cache overwritten before it;

    one synchronisation at the end.
    """

    def __init__(self, flush_bytes: int = L2_FLUSH_BYTES):
        import torch

        self.torch = torch
        self.buffer = torch.empty(flush_bytes, dtype=torch.int8, device="cuda") if flush_bytes else None

    def run(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        cuda = self.torch.cuda
        pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in calls]
        self.settle()
        for call, (start, end) in zip(calls, pairs, strict=True):
            if self.buffer is not None:
                self.buffer.zero_()
            start.record()
            call()
            end.record()
        self.settle()
        return [start.elapsed_time(end) for start, end in pairs]

    def settle(self) -> None:
        """Wait for what was queued."""
        self.torch.cuda.synchronize()


def clock_for(device: str, flush_bytes: int = L2_FLUSH_BYTES) -> Clock:
    """Clock of a device type."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f"timing: device {device!r}; allowed: cpu, cuda")
    return CudaClock(flush_bytes) if device == "cuda" else CpuClock()


def measure(
    call: Callable[[], object] | Sequence[Callable[[], object]],
    *,
    device: str = "cpu",
    warmup: int = 2,
    warmup_ms: float = 0.0,
    repeat_ms: float = 100.0,
    min_repeats: int = 5,
    max_repeats: int = 1000,
    clock: Clock | None = None,
) -> Timing:
    """Time a call, or several equal calls on different inputs taken in turn.

    At least `warmup` calls and `warmup_ms` are spent unmeasured. The number of timed calls follows from `repeat_ms`
    over the last warm-up call, within min_repeats and max_repeats. ValueError: warmup < 1 (the first call compiles),
    repeats < 1.
    """
    calls = [call] if callable(call) else list(call)
    if warmup < 1 or min_repeats < 1 or max_repeats < min_repeats or not calls:
        raise ValueError(
            f"measure: warmup {warmup}, repeats {min_repeats}..{max_repeats}, {len(calls)} calls; "
            "allowed: warmup >= 1, 1 <= min_repeats <= max_repeats, at least one call"
        )
    clock = clock or clock_for(device)
    spent, done, last = 0.0, 0, 0.0
    while done < warmup or (spent < warmup_ms and done < 10 * max_repeats):
        last = clock.run([calls[done % len(calls)]])[0]
        spent, done = spent + last, done + 1
    wanted = int(repeat_ms / max(last, 1e-6))
    repeats = min(max(wanted, min_repeats), max_repeats)
    return Timing.of(clock.run([calls[i % len(calls)] for i in range(repeats)]), warmup=done)
