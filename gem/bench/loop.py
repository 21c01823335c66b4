"""Real training steps under a clock: the reader, the balancer and the prefetching of training, and its own step."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from gem import train
from gem.bench import components
from gem.bench.timing import Clock, Timing, clock_for
from gem.config import Config
from gem.counts import Counts
from gem.dataset import Batch, Split
from gem.model import GEM
from gem.optim import Optimizers
from gem.prefetch import prefetch
from gem.watch import Watch

MIN_STEPS, MAX_STEPS = 6, 200
MAX_CAPTURES = 16  # steps of warm-up more, while each of them captures a CUDA graph


@dataclass(frozen=True)
class Done:
    """Timed steps: quantiles of one step, milliseconds of each, and what each read."""

    timing: Timing
    times: tuple[float, ...]
    counts: tuple[Counts, ...]

    def rate(self, amounts: Iterable[float]) -> tuple[float, float, float]:
        """What the steps did of `amounts`, one a step, in a second: (p50, p20, p80) over steps."""
        rates = [amount * 1e3 / ms for amount, ms in zip(amounts, self.times, strict=True)]
        p20, p50, p80 = np.quantile(rates, (0.2, 0.5, 0.8))
        return float(p50), float(p20), float(p80)

    def samples_per_s(self) -> tuple[float, float, float]:
        """(p50, p20, p80) over steps."""
        return self.rate([item.batch for item in self.counts])


class Loop:
    """A model in training on endless batches of a split. Close it: a thread may be bringing batches."""

    def __init__(
        self, model: GEM, optimizers: Optimizers, config: Config, split: Split, device: torch.device, seed: int = 0
    ):
        self.model, self.optimizers, self.config, self.device, self.seed = model, optimizers, config, device, seed
        self.batches = prefetch(endless(config, split, seed), device)
        self.counts: list[Counts] = []
        self.steps = 0
        # as in training: a GPU is never waited for, and a bad loss is heard of some steps later
        self.watch = Watch(model, config, seed, device) if device.type == "cuda" else None

    def one(self) -> None:
        """A step, waiting for its batch included."""
        batch = next(self.batches)
        self.counts.append(Counts(batch.size, batch.lengths))
        if self.watch is None:
            train.train_step(self.model, self.optimizers, batch, self.config, self.steps, self.seed)
        else:
            results = train.step_once(self.model, self.optimizers, batch, self.config, self.steps)
            for _ in self.watch.add(self.steps, batch, *results):
                pass
        self.steps += 1

    def timed(self, warmup: int, repeat_ms: float, clock: Clock | None = None) -> Done:
        """As many steps as fill `repeat_ms`, after `warmup` (>= 1) that do not count; more while they capture graphs.

        Nothing runs between the steps and no cache is cleared, as in training.
        """
        clock = clock or clock_for(self.device.type, flush_bytes=0)
        before = clock.run([self.one] * warmup)
        made = -1
        while self._graphs() > made and len(before) < warmup + MAX_CAPTURES:
            made = self._graphs()
            before += clock.run([self.one]) if made else []
        steps = min(max(int(repeat_ms / max(min(before), 1e-3)), MIN_STEPS), MAX_STEPS)
        self.counts = []
        train.set_aside()
        try:
            times = clock.run([self.one] * steps)
        finally:
            gc.unfreeze()
        if self.watch is not None:  # raises if a loss was not finite
            for _ in self.watch.flush():
                pass
        return Done(Timing.of(times, warmup), tuple(times), tuple(self.counts))

    def _graphs(self) -> int:
        """CUDA graphs captured so far: a step that captures one says nothing about the others."""
        return 0 if self.model.replay is None else len(self.model.replay.made)

    def profiled(self, steps: int) -> dict[str, float]:
        """Milliseconds of a step by component, see gem.bench.components."""
        return components.profiled(self.one, steps, self.device.type == "cuda")

    def close(self) -> None:
        self.batches.close()


def endless(config: Config, split: Split, seed: int) -> Iterator[Batch]:
    """Batches of one epoch after another, as training orders them."""
    epoch = 0
    while True:
        yield from split.epoch(config.train.batch_size, seed, epoch, config.toggles.balance.value)
        epoch += 1


def with_batch(config: Config, batch_size: int) -> Config:
    """The same variant at another local batch."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=batch_size))
