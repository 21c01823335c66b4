"""Losses, gradient norms and times of steps, fetched from a GPU some steps late so that no step waits for the host.

A GPU works through a queue; reading a loss after each step would empty it. Here every step leaves loss and norm in a
small buffer on the device and a time stamp in the queue. Full buffers are copied to the host beside the next steps and
looked at when they have arrived. A bad step is therefore noticed late, but it is named exactly: the device itself stops
changing the dense parameters at the first bad step (gem/optim.py), fused tables take no gradient that is not finite,
and the batches are kept until their step is known to be good, so that the first bad tensor can be looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gem.config import Config
from gem.dataset import Batch
from gem.diagnose import bad_gradient, first_bad_tensor
from gem.model import GEM

WINDOW = 20  # steps a buffer; a bad step is noticed at most two buffers late


class DivergedError(RuntimeError):
    """Loss or gradient is NaN or infinite: names step, variant, seed and the first bad tensor."""


@dataclass(frozen=True)
class Done:
    """A step that is known to be good. seconds: from the end of the step before, waiting for its batch included."""

    step: int
    loss: float
    norm: float
    seconds: float


class _Window:
    """Steps whose results are on their way: values [size, 2] on the device and, once sent, on the host."""

    def __init__(self, device: torch.device, size: int):
        self.values = torch.zeros(size, 2, device=device)
        self.host = torch.empty(size, 2, pin_memory=device.type == "cuda")
        self.steps: list[int] = []
        self.batches: list[Batch] = []
        self.ends: list[torch.cuda.Event] = []
        self.arrived: torch.cuda.Event | None = None

    def send(self) -> None:
        self.host.copy_(self.values, non_blocking=True)
        self.arrived = torch.cuda.Event()
        self.arrived.record()


class Watch:
    """Collects the results of steps. `add` after each step, `flush` before a checkpoint and at the end; both yield
    steps in order, and raise DivergedError at the first one that is bad."""

    def __init__(self, model: GEM, config: Config, seed: int, device: torch.device, window: int = WINDOW):
        self.model, self.config, self.seed, self.device, self.size = model, config, seed, device, window
        self.sent: list[_Window] = []
        self.open = _Window(device, window)
        self.last = self._now()

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, step: int, batch: Batch, loss: torch.Tensor, norm: torch.Tensor) -> Iterator[Done]:
        """A step that has been queued. Yields steps whose results have arrived meanwhile, often none."""
        place = self.open.values[len(self.open.steps)]
        place[0].copy_(loss.detach())
        place[1].copy_(norm)
        self.open.steps.append(step)
        self.open.batches.append(batch)
        self.open.ends.append(self._now())
        if len(self.open.steps) == self.size:
            self._send()
        while self.sent and (len(self.sent) > 1 or self.sent[0].arrived.query()):
            yield from self._receive()

    def flush(self) -> Iterator[Done]:
        """Wait for everything that has been queued."""
        if self.open.steps:
            self._send()
        while self.sent:
            yield from self._receive()

    def restart(self) -> None:
        """Time the next step from here: what was done since the last one is not part of it."""
        self.last = self._now()

    def _send(self) -> None:
        self.open.send()
        self.sent.append(self.open)
        self.open = _Window(self.device, self.size)

    def _receive(self) -> Iterator[Done]:
        window = self.sent.pop(0)
        window.arrived.synchronize()
        rows = zip(window.steps, window.batches, window.ends, window.host.tolist(), strict=False)
        for step, batch, end, (loss, norm) in rows:
            check(self.model, self.config, self.seed, step, batch, loss, norm)
            seconds, self.last = self.last.elapsed_time(end) / 1e3, end
            yield Done(step, loss, norm, seconds)


def check(model: GEM, config: Config, seed: int, step: int, batch: Batch, loss: float, norm: float | None) -> None:
    """DivergedError if loss or norm (None: not known yet) is not finite; the tensor is found by repeating the step."""
    where = f"variant {config.variant}, seed {seed}, step {step}"
    if model.replay is not None and not (math.isfinite(loss) and (norm is None or math.isfinite(norm))):
        model.replay.clear()  # the search runs kernel by kernel and needs the room
    if not math.isfinite(loss):
        raise DivergedError(f"{where}: loss is {loss}; first bad tensor: {first_bad_tensor(model, batch, config)}")
    if norm is not None and not math.isfinite(norm):
        bad = bad_gradient(model, batch, config)
        raise DivergedError(f"{where}: gradient norm is {norm}; first bad tensor: gradient of {bad}")
