"""A training step on the GPUs of one host against the same step on one of them (experiment step, subjects below).

    python -m gem.bench.scaling --tier gpu2 --parts full

FSDP over all ranks, tables sharded over all ranks (V1), parameters gathered one unit ahead; `full_ep` also spreads the
experts of a layer over the ranks. One process a rank does both: first the step of one GPU, each rank by itself, and its
layers one by one; then the step of all. The local batch is the same throughout. Each compiles on a few samples of real
lengths first, whose sizes the compiler takes for usual, and sees all batches of its rotation before it is timed. The
loss of the first joined batch is compared with the sum of what single GPUs compute; where it differs, there is no time
but status failed.

Subject <variant>: time_ms, qps, mfu, all of the median step; weak_scaling = QPS of n over n times QPS of one;
scaling_ratio = MFU of the step over time-weighted MFU of the layers; exposed_ms = communication that no kernel of this
GPU hides, from the profiler, largest of the ranks. Subject <variant>@one_gpu: the step of one GPU, of this very run.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from gem import compile as compilation
from gem import config as configuration
from gem import hardware, metrics, report
from gem import train as single
from gem.bench import batches, exposure, model_work, parity, ranks, units
from gem.bench.loop import Done, Loop, with_batch
from gem.bench.ranks import Job
from gem.bench.timing import Timing
from gem.counts import Counts
from gem.dataset import Batch
from gem.heads import loss_sums
from gem.model import GEM
from gem.optim import Optimizers
from gem.parallel import dense, train
from gem.parallel.mesh import Mesh
from gem.prefetch import prefetch

EXPERIMENT = "step"
SOURCES = (
    *report.SOURCES,
    "gem/bench/scaling.py",
    "gem/bench/exposure.py",
    "gem/bench/ranks.py",
    "gem/bench/loop.py",
    "gem/bench/batches.py",
    "gem/bench/units.py",
    "gem/bench/parity.py",
    "gem/parallel",
)
TOTAL_STEPS, SEED = 1000, 0
STEPS, PROFILED = 20, 2
LOSS_LIMIT = 0.02  # of the loss: bfloat16, and other sums
VARIANTS = {"full": ("full", False), "baseline_varlen": ("baseline_varlen", False), "full_ep": ("full", True)}


@dataclass
class Alone:
    """The step of one GPU. loss: weighted sums by task of this rank's part of the first joined batch."""

    sums: dict[str, float]
    timing: Timing
    qps: float
    mfu: float
    local_mfu: float


class Case:
    """One subject: the variant's configuration, the data, and the rows of every step."""

    def __init__(self, job: Job, name: str):
        self.job, self.name = job, name
        variant, self.experts = VARIANTS[name]
        tier = configuration.load_tier(job.tier)
        self.settings, self.world = tier["step"], job.rank.world_size
        self.config = with_batch(configuration.load(variant, job.tier), self.settings["batch"])
        self.joined = with_batch(self.config, self.settings["batch"] * self.world)
        schema = batches.schema_of(tier["data"], self.settings["table_rows"])
        rows = self.settings["batch"] * self.settings["batches"] * self.world
        self.split = batches.MemorySplit(schema, rows, tier["data"], SEED)
        self.data = single.Data(self.split, self.split)
        self.device = job.rank.device
        self.warmup = self.settings["warmup"] + self.settings["batches"]
        padded = self.config.implementations.gdpa == "eager"
        drafts = batches.draft(schema, self.settings, tier["data"], SEED, padded=padded)
        draft = parity.whole_batch(drafts, self.device)
        weightless = {task: torch.zeros_like(weight) for task, weight in draft.weights.items()}
        self.draft = dataclasses.replace(draft, weights=weightless)  # nothing is learned from it

    def parts(self) -> Iterator[list[np.ndarray]]:
        """Rows of every rank, step after step, as training deals them."""
        for rows in train.order(self.split, self.joined, SEED, False):
            yield train.deal(rows, self.world)

    def counts(self, parts: list[np.ndarray]) -> dict[str, float]:
        rows = np.concatenate(parts)
        return {task: float(weights[rows].sum()) for task, weights in self.split.weights.items()}

    def batch(self, parts: list[np.ndarray]) -> Batch:
        return self.split.batch(parts[self.job.rank.rank])


def prepare(case: Case) -> GEM:
    """The model of one GPU, compiled."""
    model = single.build(case.config, case.data, SEED, case.device)
    model.train()
    parity.gradients(model, case.draft, case.config)
    return model


def alone(case: Case, model: GEM) -> Alone:
    """One GPU by itself: loss of the first batch, time of a step, and MFU of its layers. No collective in here."""
    config, device = case.config, case.device
    batch = case.batch(next(case.parts())).to(device)
    with single.autocast(config, device):  # with gradients, since without them it would be another graph
        sums = loss_sums(model(batch), batch.labels, batch.weights)
    sums = {task: float(value.detach()) for task, value in sums.items()}
    optimizers = Optimizers(model, config, TOTAL_STEPS)
    loop = Loop(model, optimizers, config, case.split, device, SEED + case.job.rank.rank)
    try:
        done = loop.timed(case.warmup, case.settings["repeat_ms"])
    finally:
        loop.close()
    peak = hardware.peak(device)
    works = [model_work.of_steps(model, config, [item]).model for item in done.counts]
    timed = units.time_parts(units.parts_of(model, batch, config), device, case.settings["part_ms"])
    return Alone(
        sums,
        done.timing,
        done.samples_per_s()[0],
        done.rate(works)[0] / peak.flops,
        units.local_mfu(timed, peak.flops),
    )


class Together:
    """All ranks: the trainer of gem.parallel.train on the batches that training would deal."""

    def __init__(self, case: Case):
        self.case, self.step, world = case, 0, case.world
        plan = Mesh(world, world, expert=world if case.experts else 1)
        options = dense.Options(prefetch=1, tables="sharded")
        job = train.Job(plan, options, "v1")
        self.trainer = train.Trainer(case.joined, case.data, SEED, case.job.rank, job, TOTAL_STEPS)
        self.trainer.model.train()
        self.compile()
        self.dealt = case.parts()
        self.batches = prefetch(map(case.batch, case.parts()), case.device)
        self.seen: list[Counts] = []
        self.found: list[torch.Tensor] = []

    def compile(self) -> None:
        """Forward and backward of the draft on every rank."""
        trainer = self.trainer
        trainer.dense.set_rows([self.case.draft.size] * self.case.world)
        trainer.loss(self.case.draft, dict.fromkeys(self.case.split.weights, 1.0)).backward()
        if trainer.tables is not None:
            trainer.tables.sync()
        for parameter in trainer.model.parameters():
            parameter.grad = None

    def one(self) -> None:
        """A step, waiting for its batch included."""
        batch, parts = next(self.batches), next(self.dealt)
        self.seen.append(Counts(batch.size, batch.lengths))
        self.found.append(self.trainer.step(batch, parts, self.case.counts(parts), self.step))
        self.step += 1

    def times(self) -> list[float]:
        """Milliseconds of STEPS steps in a row on this rank."""
        torch.cuda.synchronize()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self.one()
            mark.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]

    def timed(self) -> Done:
        """Steps in a row after the warm-up. Ranks go in lockstep, so a step took what its slowest rank took: times are
        the same on every rank, counts are of what this rank read."""
        for _ in range(self.case.warmup):
            self.one()
        dist.barrier()
        self.seen = []
        times = torch.tensor(self.times(), device=self.case.device, dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return Done(Timing.of(times.tolist(), self.case.warmup), tuple(times.tolist()), tuple(self.seen))

    def profiled(self) -> tuple[float, float]:
        """(communication, exposed) in ms of a step on this rank."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(PROFILED):
                self.one()
            torch.cuda.synchronize()
        return tuple(value / PROFILED for value in exposure.of_profile(profiler.events()))

    def close(self) -> None:
        self.batches.close()


def log(job: Job, name: str, what: str) -> None:
    if job.rank.is_first:
        print(f"{name}, {what}: {compilation.summary()}", file=sys.stderr, flush=True)


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def expected_loss(case: Case, sums: dict[str, float]) -> float:
    """Loss of the first joined batch, from what every GPU computed alone."""
    counts = case.counts(next(case.parts()))
    return sum(sum(case.job.gathered(sums[task])) / max(counts[task], 1.0) for task in sums)


def measure(job: Job, name: str) -> None:
    case = Case(job, name)
    with_times = {"settings": case.settings, "steps": STEPS, "mesh": "shard over all ranks, tables v1"}
    run = job.open_run(EXPERIMENT, f"scaling-{name}", SOURCES, case.config.to_dict() | with_times)
    impl = report.implementation(case.config)
    row = {"case": case.config.preset, "subject": name, "impl": impl, "phase": "step"}
    model, together = prepare(case), Together(case)
    release()
    log(job, name, "compiled")
    dist.barrier()
    one = alone(case, model)
    del model
    release()
    dist.barrier()
    wanted = expected_loss(case, one.sums)
    try:
        together.one()
        loss = float(together.found[0][0])
        right = job.agree(abs(loss / wanted - 1) < LOSS_LIMIT)
        note = f"loss {loss:.5g}, single GPUs {wanted:.5g}"
        run.add(**row, metric="correct", p50=float(right), note=note)
        if right:
            record(job, run, row, case, one, together)
        else:
            run.add(**row, metric="time_ms", status="failed", note=note)
    finally:
        together.close()
    log(job, name, "timed")
    if job.rank.is_first:
        run.write()
    del together
    release()
    dist.barrier()


def joint_rate(job: Job, done: Done, amounts: Iterable[float]) -> tuple[float, float, float]:
    """What all ranks together did of `amounts`, one a step of this rank, in a second: (p50, p20, p80) over steps.

    In lockstep a step of the job does the sum of its ranks' amounts in the time of the slowest, so amounts are summed
    step by step before the median is taken: the ranks' own medians may be of different steps.
    """
    return done.rate([sum(job.gathered(amount)) for amount in amounts])


def record(job: Job, run, row: dict, case: Case, one: Alone, together: Together) -> None:
    """Rows of a subject. The slowest step is named, since a median is silent about it."""
    hardware.reset_peak_memory(case.device)
    done = together.timed()
    memory = hardware.peak_memory_gib(case.device)
    timing, peak = done.timing, hardware.peak(case.device)
    note, n = f"local batch {case.settings['batch']}", timing.n
    slowest = f"{note}; slowest step {max(done.times):.4g} ms"
    run.add(**row, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80, n=n, note=slowest)
    rate, slow, fast = joint_rate(job, done, [item.batch for item in done.counts])
    run.add(**row, metric="qps", p50=rate, p20=slow, p80=fast, n=n, note=f"all {case.world} GPUs, {note}")
    works = [model_work.of_steps(together.trainer.model, case.config, [item]).model for item in done.counts]
    useful = joint_rate(job, done, works)
    mfu, slow, fast = (metrics.mfu(value, 1.0, peak.flops * case.world) for value in useful)
    whole = f"peak: {case.world} x {peak.name}; {note}"
    run.add(**row, metric="mfu", p50=mfu, p20=slow, p80=fast, n=n, note=whole)
    local = sum(job.gathered(one.local_mfu)) / case.world
    run.add(**row, metric="scaling_ratio", p50=mfu / local, note="MFU of the step over that of its layers on one GPU")
    qps = job.gathered(one.qps)
    run.add(**row, metric="weak_scaling", p50=rate / sum(qps), note="over the sum of what the GPUs do alone")
    run.add(**row, metric="peak_mem_gib", p50=job.largest(memory), note=note)
    single_row = row | {"subject": f"{row['subject']}@one_gpu"}
    longest = job.largest(one.timing.p50)
    run.add(**single_row, metric="time_ms", p50=longest, n=one.timing.n, note=f"{note}; the slower of the GPUs")
    run.add(**single_row, metric="qps", p50=sum(qps) / case.world, n=one.timing.n, note=note)
    run.add(**single_row, metric="mfu", p50=sum(job.gathered(one.mfu)) / case.world, n=one.timing.n, note=note)
    run.add(**row | {"subject": f"layers@{row['subject']}"}, metric="mfu", p50=local, note="layers one by one, one GPU")
    talking, exposed = together.profiled()
    run.add(
        **row, metric="exposed_ms", p50=job.largest(exposed), n=PROFILED, note="waiting for the other rank included"
    )
    whole = row | {"subject": f"{row['subject']}:communication"}
    run.add(**whole, metric="time_ms", p50=job.largest(talking), n=PROFILED, note="of a profiled step, hidden or not")
    held = together.trainer.dense.bytes_held()
    for part in ("experts", "dense"):
        run.add(**row | {"subject": f"{row['subject']}:{part}"}, metric="param_bytes", p50=job.largest(held[part]))


PARTS = {name: partial(measure, name=name) for name in VARIANTS}


def main(argv: list[str] | None = None) -> int:
    return ranks.main("gem.bench.scaling", __doc__.split("\n")[0], PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
