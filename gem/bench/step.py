"""Time a training step of variants of the model: MFU, throughput, memory, and where the time goes.

    python -m gem.bench.step --tier gpu --processes 27 --limit-s 330
    python -m gem.bench.step --tier gpu --variants full,baseline_varlen --parts step

What is timed is `gem.train.train_step` on batches that training's own reader, balancer and prefetching bring, waiting
for them included. Every variant runs at one local batch (records `step`), and at the largest power of two times it
that fits (records `step_largest`). A variant whose loss or gradients differ from the plain reference gets no time but
status failed; one that does not fit gets oom. One process a variant: all compile side by side, then each is timed
alone on the device.

Subjects of the rows: <variant>, the whole step; layers@<variant>, its parts one by one: their time-weighted MFU, over
which the step's is `scaling_ratio`; parts@<variant>, layers and optimiser; <part>@<variant>, one part;
<variant>:<component>, from the profiler, where `idle` is the time that no kernel accounts for.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gem import compile as compilation
from gem import config as configuration
from gem import fused_tables, hardware, metrics, record, report, train
from gem.bench import batches, components, farm, model_work, parity, units
from gem.bench.loop import Done, Loop, with_batch
from gem.cli import Parser
from gem.config import Config, Precision
from gem.counts import Counts
from gem.dataset import Schema
from gem.embeddings import FeatureTokens, HistoryTables
from gem.model import GEM
from gem.optim import Optimizers
from gem.train import Data

PARTS = ("step", "units", "profile", "largest")
# What decides the numbers: kernels, model and training, and how they are timed. Also in config/experiments.tsv.
_MODEL = (
    "train model sequence attention interaction experts norms heads embeddings fused_tables optim watch dataset "
    "prefetch sampler balance compile graphs checkpointing config sizes counts precision"
).split()
_OWN = "step loop batches units components model_work parity low_reference farm timing".split()
SOURCES = ("kernels", *(f"gem/{name}.py" for name in _MODEL), *(f"gem/bench/{name}.py" for name in _OWN))
TOTAL_STEPS = 1000  # of the learning-rate schedule; times do not depend on it
PROFILED_STEPS = 2
SEED = 0


@dataclass(frozen=True)
class Options:
    """What a run measures. parts: of PARTS, "step" always; None: all of them for the tier's `detailed` variants, the
    step alone for others. preset, batch, repeat_ms None: the tier's."""

    tier: str
    run: str
    preset: str | None = None
    batch: int | None = None
    repeat_ms: float | None = None
    parts: tuple[str, ...] | None = None

    def settings(self) -> dict:
        """The tier's section `step`, changed by what was asked for."""
        asked = {"batch": self.batch, "repeat_ms": self.repeat_ms}
        return section_of(self.tier) | {key: value for key, value in asked.items() if value is not None}


def section_of(tier: str) -> dict:
    """The section `step` of a tier; ValueError for a tier that times no steps."""
    section = configuration.load_tier(tier).get("step")
    if section is None:
        raise ValueError(f"config/{tier}.yaml: section step is missing; allowed: a tier that has it, such as gpu")
    return section


class WrongResult(RuntimeError):
    """Loss or gradients are not those of the reference."""


class StepTask:
    """One variant, as `gem.bench.farm` runs it."""

    def __init__(self, variant: str, options: Options):
        self.options, self.settings = options, options.settings()
        self.config = with_batch(configuration.load(variant, options.tier, options.preset), self.settings["batch"])
        self.parts = options.parts or (PARTS if variant in self.settings["detailed"] else ("step",))
        self.failure: tuple[str, str] | None = None
        self.spoiled: Exception | None = None  # after which this process can measure nothing more
        self.model: GEM | None = None

    def prepare(self) -> None:
        """Beside others: the model with small tables, compiled on a batch of a few samples of real lengths (whose sizes
        are what the compiler takes for usual) and tried on the small batch of the check; the data. Leaves the layers in
        host memory, since the device is shared until the last is ready."""
        self.device = hardware.open_device(self.config.device)
        low = self.config.toggles.precision is not Precision.BF16
        if low and self.config.implementations.precision == "mx":
            self.failure = ("unsupported", "MX runs as emulated numerics here: its time says nothing of the format")
            return
        data = configuration.load_tier(self.options.tier)["data"]
        rows = self.settings["batch"] * self.settings["batches"]
        self.split = batches.MemorySplit(batches.schema_of(data, self.settings["table_rows"]), rows, data, SEED)
        self.small = parity.small_split(data)
        try:
            # the check runs the model several times, so its tables must not learn in between
            still = dataclasses.replace(self.config, train=dataclasses.replace(self.config.train, table_lr=1e-30))
            self.model = train.build(still, Data(self.small, self.small), SEED, self.device)
            compiled = self.config.implementations.compile != "eager"
            padded = self.config.implementations.gdpa == "eager"
            drafts = [batches.draft(self.small.schema, self.settings, data, SEED, padded=padded)] if compiled else []
            for split in (*drafts, self.small):
                parity.gradients(self.model, parity.whole_batch(split, self.device), self.config)
            hardware.synchronize(self.device)
            self.model.layers.to("cpu")
            print(f"{self.config.variant}: {compilation.summary()}", flush=True)
        except Exception as error:
            self.failure = status_of(error)
        release(self.device)

    def measure(self) -> None:
        """Alone: check, time, record. A failure is a row."""
        before, prepared = compilation.graphs(), self.failure is None
        with self.open_run("step") as run:
            base = self.row()
            if self.failure is None:
                try:
                    self.model.layers.to(self.device)
                    self.check(run, base)
                    self.model = with_tables(self.model, self.config, self.split.schema, self.device)
                    self.time_step(run, base)
                except Exception as error:
                    self.failure = status_of(error)
            if self.failure is not None:
                run.add(**base, metric="time_ms", status=self.failure[0], note=self.failure[1])
        fits = self.failure is None
        if compilation.graphs() > before:
            print(f"{self.config.variant}: {compilation.graphs() - before} graphs were compiled again", flush=True)
        if "largest" in self.parts and prepared and (fits or self.failure[0] == "oom"):
            with self.open_run("step_largest") as run:
                try:
                    if self.spoiled:
                        raise self.spoiled
                    self.search_largest(run, fits)
                except Exception as error:
                    status, note = status_of(error)
                    run.add(**self.row(), metric="time_ms", status=status, note=note)

    def open_run(self, experiment: str) -> record.Run:
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        config = self.config.to_dict() | {"step": self.settings, "parts": self.parts, "allocator": allocator}
        name = f"{experiment}-{self.config.variant}"
        return record.Run(
            self.options.run, experiment, name=name, case_row=self.config.row, config=config, sources=SOURCES
        )

    def row(self, subject: str = "{}", phase: str = "step") -> dict:
        """Key columns of a row; {} in `subject` is the variant."""
        subject = subject.format(self.config.variant)
        impl = report.implementation(self.config)
        return {"case": self.config.preset, "subject": subject, "impl": impl, "phase": phase}

    def check(self, run: record.Run, base: dict) -> None:
        small = parity.whole_batch(self.small, self.device)
        wrong, error = parity.problem(self.model, small, self.config, parity.as_launched)
        run.add(**base, metric="correct", p50=0 if wrong else 1, note=wrong or "loss and gradients of a small batch")
        if wrong:
            raise WrongResult(wrong)
        run.add(**base, metric="rel_err", p50=error, note="all dense gradients against float32")
        self.forget()

    def time_step(self, run: record.Run, base: dict) -> None:
        self.model.train()
        self.optimizers = Optimizers(self.model, self.config, TOTAL_STEPS)
        peak = hardware.peak(self.device)
        loop = Loop(self.model, self.optimizers, self.config, self.split, self.device, SEED)
        try:
            hardware.reset_peak_memory(self.device)
            done = loop.timed(self.settings["warmup"], self.settings["repeat_ms"])
            memory = hardware.peak_memory_gib(self.device)
            mfu = self.add_step(run, base, done, memory, peak)
            if "profile" in self.parts:
                self.detail(run, "{}:all", lambda: self.add_profile(run, self.profiled(loop), done))
        finally:
            loop.close()
        if self.model.replay is not None:
            made, seconds = len(self.model.replay.made), self.model.replay.seconds
            print(f"{self.config.variant}: {made} CUDA graphs, {seconds:.1f} s for them", flush=True)
            self.forget()
        if "units" in self.parts:
            self.detail(run, "layers@{}", lambda: self.add_units(run, done, mfu, peak))

    def profiled(self, loop: Loop) -> dict[str, float]:
        """Milliseconds by component of steps whose kernels are launched one by one: in a CUDA graph the same kernels
        have no operator that says what they are."""
        replay, self.model.replay = self.model.replay, None
        try:
            return loop.profiled(PROFILED_STEPS)
        finally:
            self.model.replay = replay

    def detail(self, run: record.Run, subject: str, work: Callable[[], None]) -> None:
        """Measure beside the step: a failure costs its own rows, not the step's."""
        try:
            work()
        except Exception as error:
            status, note = status_of(error)
            run.add(**self.row(subject), metric="time_ms", status=status, note=note)
            if isinstance(error, units.CaptureError):
                self.spoiled = error
            self.forget()

    def add_step(self, run: record.Run, base: dict, done: Done, memory: float, peak: hardware.Peak) -> float:
        """Rows of timed steps; returns the MFU. Rates are those of the median step; the slowest step is named, since a
        median is silent about it."""
        works, timing = [model_work.of_steps(self.model, self.config, [item]) for item in done.counts], done.timing
        batch = done.counts[0].batch
        note, whole = f"local batch {batch}", "" if self.device.type == "cuda" else ", of the whole process"
        common = base | {"note": note, "n": timing.n}
        slowest = f"{note}; slowest step {max(done.times):.4g} ms"
        run.add(**common | {"note": slowest}, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80)
        add_rate(run, common, "qps", done.samples_per_s())
        useful = [value / peak.flops for value in done.rate(work.model for work in works)]
        add_rate(run, common | {"note": f"{note}; peak: {peak.name}"}, "mfu", useful)
        self.add_mixed(run, common, done, works, peak)
        add_rate(run, common, "hfu", [value / peak.flops for value in done.rate(work.done for work in works)])
        add_rate(run, common, "tokens_per_s", done.rate(work.tokens for work in works))
        mfu, work = useful[0], model_work.of_steps(self.model, self.config, done.counts)
        run.add(**base, metric="peak_mem_gib", p50=memory, note=note + whole)
        run.add(**base | {"phase": "model"}, metric="flops_per_sample", p50=work.model / work.samples)
        run.add(**base | {"phase": "model"}, metric="local_batch", p50=batch)
        return mfu

    def add_mixed(
        self, run: record.Run, common: dict, done: Done, works: Sequence[model_work.Work], peak: hardware.Peak
    ) -> None:
        """The MFU that divides the FLOPs of each precision by its own peak; equal to the MFU where nothing ran in 8
        bits. On a CPU such products are emulated, at the one peak that a CPU has."""
        share = sum(work.low for work in works) / sum(work.model for work in works)
        eight = peak
        if share and self.device.type == "cuda":
            eight = hardware.dense_peak(hardware.device_name(self.device), "fp8")
        note = f"every product ran in {self.config.dtype}"
        if share:
            emulated = ", emulated" if self.device.type == "cpu" else ""
            note = f"{share:.1%} of the FLOPs in 8 bits{emulated}; peak: {eight.name}"
        rates = done.rate((work.model - work.low) / peak.flops + work.low / eight.flops for work in works)
        add_rate(run, common | {"note": f"{common['note']}; {note}"}, "mfu_mixed", rates)

    def add_profile(self, run: record.Run, found: dict[str, float], done: Done) -> None:
        """Rows of components. Copies of the next batch run beside the step and are no part of it."""
        step = done.timing.p50
        beside = found.pop(components.INPUT, 0.0)
        found["idle"] = max(0.0, step - sum(found.values()))
        for name, value in (found | {components.INPUT: beside}).items():
            base = self.row(f"{{}}:{name}")
            run.add(**base, metric="time_ms", p50=value, n=PROFILED_STEPS, note="time of kernels in a profiled step")
            run.add(**base, metric="time_share", p50=value / step, n=PROFILED_STEPS)

    def add_units(self, run: record.Run, done: Done, mfu: float, peak: hardware.Peak) -> None:
        """Rows of the parts one by one, on the batch of the median FLOPs, and what the step makes of them."""
        size = self.config.train.batch_size
        starts = range(0, self.split.num_rows - size + 1, size)[:4]
        candidates = [self.split.batch(np.arange(start, start + size)) for start in starts]
        work = [self.model.step_flops(Counts(item.size, item.lengths)) for item in candidates]
        batch = candidates[work.index(sorted(work)[len(work) // 2])].to(self.device)
        parts = units.parts_of(self.model, batch, self.config)
        timed = units.time_parts(parts, self.device, self.settings["part_ms"])
        update = units.time_parts(
            [units.optimizer_part(self.model, self.optimizers)], self.device, self.settings["part_ms"]
        )
        for item in (*timed, *update):
            base, timing = self.row(f"{item.part.name}@{{}}"), item.timing
            note = units.launch_note(item.captured)
            run.add(**base, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80, n=timing.n, note=note)
            if item.part.flops:
                run.add(
                    **base, metric="mfu", p50=metrics.mfu(item.part.flops, timing.p50 / 1e3, peak.flops), n=timing.n
                )
        local = units.local_mfu(timed, peak.flops)
        run.add(**self.row("layers@{}"), metric="mfu", p50=local, note="FLOPs over time of all layers one by one")
        # of the mean batch, which has other FLOPs than the one that was timed
        layers = sum(item.timing.p50 for item in timed) * sum(
            self.model.step_flops(counts) for counts in done.counts
        ) / len(done.counts) / sum(item.part.flops for item in timed)  # fmt: skip
        run.add(**self.row("layers@{}"), metric="time_ms", p50=layers, note="forward and backward, for the mean batch")
        whole = layers + sum(item.timing.p50 for item in update)
        run.add(**self.row("parts@{}"), metric="time_ms", p50=whole, note="layers and optimiser, for the mean batch")
        run.add(**self.row(), metric="scaling_ratio", p50=mfu / local, note="MFU of the step over that of its layers")

    def search_largest(self, run: record.Run, fits: bool) -> None:
        """Double the local batch while it fits (halve it until it does, where the common one did not)."""
        base, best, reason = self.row(), None, ""
        size = self.config.train.batch_size * 2 if fits else self.config.train.batch_size // 2
        limit = min(self.settings["largest"], self.split.num_rows)
        while 1 <= size <= limit:
            try:
                best = self.at_batch(size)
            except Exception as error:
                status, reason = status_of(error)
                self.forget()
                if status != "oom":
                    run.add(**base, metric="time_ms", status=status, note=f"local batch {size}: {reason}")
                    return
                if fits:
                    break
                size //= 2
                continue
            if not fits:
                break
            size *= 2
        if best is None and fits:
            best = self.at_batch(self.config.train.batch_size)
        if best is None:
            run.add(**base, metric="time_ms", status="oom", note=f"no local batch fits: {reason}")
            return
        done, memory = best
        self.add_step(run, base, done, memory, hardware.peak(self.device))

    def at_batch(self, size: int) -> tuple[Done, float]:
        self.forget()
        if not hasattr(self, "optimizers"):
            self.optimizers = Optimizers(self.model, self.config, TOTAL_STEPS)
        config = with_batch(self.config, size)
        loop = Loop(self.model, self.optimizers, config, self.split, self.device, SEED)
        try:
            hardware.reset_peak_memory(self.device)
            done = loop.timed(2, self.settings["repeat_ms"] / 2)
        finally:
            loop.close()
        return done, hardware.peak_memory_gib(self.device)

    def forget(self) -> None:
        """Free what earlier steps left: gradients, CUDA graphs."""
        for value in self.model.parameters():
            value.grad = None
        if self.model.replay is not None:
            self.model.replay.clear()
        release(self.device)


def with_tables(model: GEM, config: Config, schema: Schema, device: torch.device) -> GEM:
    """The model with tables of another data set's sizes, made on the device; everything else stays as it is."""
    fused = bool(fused_tables.sums(model))
    with torch.device(device):
        model.features.tables = FeatureTokens(config, schema, device).tables
        if model.history is not None:
            model.history.tables = HistoryTables(config, schema, device).tables
    model.schema = schema
    return fused_tables.apply(model, config) if fused else model


def add_rate(run: record.Run, common: dict, metric: str, rate: Sequence[float]) -> None:
    """A row of (p50, p20, p80) over steps."""
    p50, p20, p80 = rate
    run.add(**common, metric=metric, p50=p50, p20=p20, p80=p80)


def status_of(error: Exception) -> tuple[str, str]:
    """(status, reason) of a failure, for a record."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason:
        return "oom", reason
    if isinstance(error, WrongResult):
        return "failed", reason
    if isinstance(error, NotImplementedError) or (isinstance(error, ValueError) and "allowed" in reason):
        return "unsupported", reason
    return "failed", f"{type(error).__name__}: {reason}"


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def chosen(names: str | None, tier: str) -> list[str]:
    """Variants to measure: those named, else the tier's section `step`. ValueError for an unknown one."""
    known = configuration.load_variants()
    wanted = names.split(",") if names else section_of(tier)["variants"]
    for name in wanted:
        if name not in known:
            raise ValueError(f"--variants {name!r}; allowed: {', '.join(known)}")
    return list(dict.fromkeys(wanted))


def run_jobs(jobs: list[farm.Job], processes: int, limit_s: float, record_lost) -> int:
    """Run jobs of a farm; a process that was lost leaves a row by `record_lost(name, reason)`. Exit status."""
    outcomes = farm.run(jobs, processes, limit_s=limit_s, say=lambda line: print(line, flush=True))
    for outcome in outcomes:
        if outcome.status == "failed":
            record_lost(outcome.name, outcome.reason)
    skipped = [outcome.name for outcome in outcomes if outcome.status == "skipped"]
    if skipped:
        names = ", ".join(skipped)
        print(f"stopped after {limit_s:g} s, before {names}; GEM_RESUME=1 goes on there", file=sys.stderr)
    return 3 if skipped else 0


def settle_environment(device: str, processes: int) -> None:
    """What must be set before a process imports torch: one compiler thread a process (they are many, and TLX's Triton
    knows no workers of inductor), memory that can grow in place (batches differ in size)."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if device == "cuda":
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.step", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml; its section `step` has the defaults")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--variants", help="ids of config/variants.tsv, separated by commas")
    parser.add_argument("--preset", help=f"size of the model: {', '.join(configuration.PRESETS)} (default: the tier's)")
    parser.add_argument("--batch", type=int, help="the local batch that all variants share")
    parser.add_argument("--repeat-ms", type=float, help="timed steps of a variant, together")
    parser.add_argument(
        "--parts", help="of step, units, profile, largest (default: all for the tier's detailed variants)"
    )
    parser.add_argument("--processes", type=int, default=1, help="variants that compile at once (default 1)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which none begins")
    args = parser.parse_args(argv)
    try:
        parts = tuple(args.parts.split(",")) if args.parts else None
        if parts and (not set(parts) <= set(PARTS) or "step" not in parts):
            raise ValueError(f"--parts {args.parts!r}; allowed: step, and any of {', '.join(PARTS[1:])}")
        for name, value in (("--batch", args.batch), ("--repeat-ms", args.repeat_ms), ("--limit-s", args.limit_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value}; allowed: a number > 0")
        run = args.run or args.tier
        options = Options(args.tier, run, args.preset, args.batch, args.repeat_ms, parts)
        tier = configuration.load_tier(args.tier)
        hardware.open_device(tier["device"])
        settle_environment(tier["device"], args.processes)
        rows = configuration.load_variants()
        names = [
            name for name in chosen(args.variants, args.tier)
            if not record.already_measured(run, f"step-{name}", rows[name])
        ]  # fmt: skip
        for name in names:
            configuration.load(name, args.tier, args.preset)  # what cannot be is known before anything compiles

        def lost(name: str, reason: str) -> None:
            task = StepTask(name, options)
            with task.open_run("step") as part:
                part.add(**task.row(), metric="time_ms", status="failed", note=reason)

        jobs = [farm.Job(name, StepTask, (name, options)) for name in names]
        return run_jobs(jobs, args.processes, args.limit_s, lost)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
