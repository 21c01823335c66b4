"""Work with a slow, parallel half and a fast half that must be alone: compile everywhere at once, then time in turn.

A torch.compile variant of the model takes about a minute on one core and no GPU to speak of; its timing takes seconds
and the whole GPU. So each task has a process: all of them `prepare` together, and when the last is ready they
`measure` one after another, in the order given, while the others sleep. A process that dies or overstays its time is
reported and costs nobody else anything: stragglers are stopped while those that are ready are timed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Protocol

PATIENCE = 0.4  # share of the time limit after which measuring begins without those that are not ready


class Task(Protocol):
    """What a process does. `make` of `Job` builds it inside the process."""

    def prepare(self) -> None:
        """Beside others: compile, check. Must leave little memory of the device in use."""

    def measure(self) -> object:
        """Alone on the device: time, and write the records or return what `run` hands back (picklable)."""


@dataclass(frozen=True)
class Job:
    """A task to be made in another process: make(*arguments) -> Task. Both must be picklable."""

    name: str
    make: Callable[..., Task]
    arguments: tuple = ()


@dataclass(frozen=True)
class Outcome:
    """How a job ended: status done (with what measure returned), failed (reason) or skipped (not begun when time was
    up); seconds of both halves."""

    name: str
    status: str
    reason: str = ""
    prepare_s: float = 0.0
    measure_s: float = 0.0
    value: object = None


def run(
    jobs: Sequence[Job],
    processes: int,
    *,
    limit_s: float = float("inf"),
    prepare_s: float = 1800.0,
    measure_s: float = 120.0,
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run all jobs, `processes` at a time (1: in this process, one after another).

    limit_s: no measuring begins after it; after 0.4 of it those that are ready are timed, the others go on afterwards.
    prepare_s, measure_s: what a process may take for a half before it is killed. Outcomes in the order of jobs.
    """
    if processes < 1:
        raise ValueError(f"processes: {processes}; allowed: 1 or more")
    start, outcomes = time.monotonic(), []
    for first in range(0, len(jobs), processes):
        wave = jobs[first : first + processes]
        left = limit_s - (time.monotonic() - start)
        if left <= 0:
            outcomes += [Outcome(job.name, "skipped", f"not begun within {limit_s:g} s") for job in wave]
        elif processes == 1:
            outcomes.append(_here(wave[0]))
            say(_line(outcomes[-1]))
        else:
            outcomes += _wave(wave, start + limit_s, prepare_s, measure_s, say)
    return outcomes


def _here(job: Job) -> Outcome:
    start = middle = time.monotonic()
    try:
        task = job.make(*job.arguments)
        task.prepare()
        middle = time.monotonic()
        value = task.measure()
    except Exception as error:
        traceback.print_exc()
        return Outcome(job.name, "failed", _reason(error), middle - start, time.monotonic() - middle)
    return Outcome(job.name, "done", "", middle - start, time.monotonic() - middle, value)


@dataclass
class _Worker:
    job: Job
    process: multiprocessing.Process
    pipe: Connection
    started: float
    ready_after: float | None = None
    outcome: Outcome | None = None

    @property
    def preparing(self) -> bool:
        return self.ready_after is None and self.outcome is None

    def signal(self, number: int) -> None:
        """Stop or continue the process, if it is still preparing."""
        if self.preparing and self.process.is_alive():
            os.kill(self.process.pid, number)

    def fail(self, reason: str) -> None:
        spent = time.monotonic() - self.started if self.ready_after is None else self.ready_after
        self.outcome = Outcome(self.job.name, "failed", reason, spent)
        if self.process.is_alive():
            self.process.kill()  # joined at the end: a driver may take seconds to let go of a process

    def stop(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)

    def receive(self) -> tuple[str, object]:
        """(word, reason or value) from the process; its death is a word too."""
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join(10)
            return "failed", f"its process ended with exit code {self.process.exitcode}"


def _wave(wave, deadline: float, prepare_s: float, measure_s: float, say) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    workers = []
    for job in wave:
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(job, theirs))
        process.start()
        theirs.close()
        workers.append(_Worker(job, process, pipe, time.monotonic()))
    start = time.monotonic()
    try:
        # One that hangs must not cost the others their time: after a share of it, those that are ready are timed while
        # the rest are stopped; then the rest go on with what is left.
        patience = start + min(prepare_s, PATIENCE * (deadline - start))
        for until in (patience, float("inf")):
            if not (waiting := [worker for worker in workers if worker.preparing]):
                break
            began = time.monotonic()
            for worker in waiting:
                worker.signal(signal.SIGCONT)
            _prepare(waiting, min(until, began + prepare_s, deadline), say)
            for worker in waiting:
                worker.signal(signal.SIGSTOP)
            for worker in workers:
                if worker.ready_after is not None and worker.outcome is None:
                    _measure_in_time(worker, deadline, measure_s)
                    say(_line(worker.outcome))
        for worker in workers:
            if worker.outcome is None and time.monotonic() >= deadline:
                worker.outcome = Outcome(worker.job.name, "skipped", "not ready when time was up")
            elif worker.outcome is None:
                worker.fail(f"not ready after {time.monotonic() - start:.0f} s")
            else:
                continue
            say(_line(worker.outcome))
        return [worker.outcome for worker in workers]
    finally:
        for worker in workers:
            worker.stop()


def _prepare(waiting: list[_Worker], until: float, say) -> None:
    """Until all are ready or have failed, or time is up."""
    while left := [worker for worker in waiting if worker.preparing]:
        ready = wait([worker.pipe for worker in left], timeout=max(0.0, until - time.monotonic()))
        if not ready:
            return
        for worker in left:
            if worker.pipe in ready:
                word, reason = worker.receive()
                worker.ready_after = time.monotonic() - worker.started
                if word != "ready":
                    worker.fail(reason)
                say(f"{worker.job.name}: {word} after {worker.ready_after:.1f} s{reason and f': {reason}'}")


def _measure_in_time(worker: _Worker, deadline: float, measure_s: float) -> None:
    if time.monotonic() >= deadline:
        worker.outcome = Outcome(worker.job.name, "skipped", "time was up", worker.ready_after)
        worker.stop()
    else:
        _measure(worker, measure_s)


def _measure(worker: _Worker, measure_s: float) -> None:
    began = time.monotonic()
    worker.pipe.send("go")
    if not worker.pipe.poll(measure_s):
        worker.fail(f"not measured after {measure_s:g} s")
        return
    word, content = worker.receive()
    times = worker.ready_after, time.monotonic() - began
    if word == "done":
        worker.outcome = Outcome(worker.job.name, "done", "", *times, content)
    else:
        worker.outcome = Outcome(worker.job.name, "failed", content, *times)
    worker.process.join(30)  # its memory must be free before the next one begins
    worker.stop()


def _work(job: Job, pipe: Connection) -> None:
    try:
        task = job.make(*job.arguments)
        task.prepare()
        pipe.send(("ready", ""))
        pipe.recv()
        pipe.send(("done", task.measure()))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("failed", _reason(error)))
    # What is left is to tear down an interpreter full of compiled graphs, which takes seconds that the next one waits.
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.close()
    os._exit(0)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _line(outcome: Outcome) -> str:
    times = f"{outcome.prepare_s:.1f} s to prepare, {outcome.measure_s:.1f} s to measure"
    return f"{outcome.name}: {outcome.status} ({times}){': ' + outcome.reason if outcome.reason else ''}"
