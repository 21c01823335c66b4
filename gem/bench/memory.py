"""Memory against time of a training step: checkpointing budgets, uniform and by region, and packed activations.

    python -m gem.bench.memory --tier gpu --processes 3

Every region of the model is measured alone at every budget (`gem.regions`), then whole steps are timed: every uniform
budget, and at several limits the plan by region beside the best uniform budget within the same limit. Records `step`:
subjects checkpointing_uniform and checkpointing_region, case memory_<share of what keeping all takes>;
saved_activations_* (case packed), whose largest local batch is a power of two times the tier's. Records `regions`:
the points.

--processes: compile the budgets side by side in processes of their own before anything is timed.
"""

from __future__ import annotations

import dataclasses
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gem import checkpointing, hardware, record, regions, train
from gem import config as configuration
from gem.bench import batches
from gem.bench.loop import Loop, with_batch
from gem.bench.step import section_of
from gem.cli import Parser
from gem.config import Checkpointing, Config, SavedActivations
from gem.optim import Optimizers
from gem.saved_activations import FORMATS

VARIANT = "full"
LIMITS = (0.25, 0.5, 0.75)  # shares of the memory of keeping everything
SOURCES = (
    "gem/bench/memory.py",
    "gem/bench/loop.py",
    "gem/bench/batches.py",
    "gem/bench/timing.py",
    "gem/checkpointing.py",
    "gem/graphs.py",
    "gem/regions.py",
    "gem/saved_activations.py",
    "gem/train.py",
    "gem/model.py",
    "gem/sequence.py",
    "gem/config.py",
    "gem/sizes.py",
    "kernels",
)


class Bench:
    """The variant on batches in memory, at the sizes of a tier's section `step`."""

    def __init__(self, tier: str, preset: str | None = None):
        config = configuration.load(VARIANT, tier, preset)
        settings = configuration.load_tier(tier)
        self.section = section_of(tier)
        self.config = with_batch(config, self.section["batch"])
        self.device = hardware.open_device(config.device)
        schema = batches.schema_of(settings["data"], self.section["table_rows"])
        rows = self.section["largest"] * 2
        split = batches.MemorySplit(schema, rows, settings["data"])
        self.data = train.Data(split, split)

    def with_columns(self, **columns) -> Config:
        return dataclasses.replace(self.config, toggles=dataclasses.replace(self.config.toggles, **columns))

    @contextmanager
    def loop(self, config: Config, model=None) -> Iterator[Loop]:
        """A model in training; its memory is given back at the end."""
        model = model or train.build(config, self.data, 0, self.device)
        model.train()
        loop = Loop(model, Optimizers(model, config, 1000), config, self.data.train, self.device)
        try:
            yield loop
        finally:
            loop.close()
            del loop, model
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def timed(self, loop: Loop) -> dict[str, tuple[float, float, float]]:
        """metric -> (p50, p20, p80) of a step, and the peak of memory in it, one number without a spread."""
        if loop.model.replay is not None:  # what was captured had other budgets
            loop.model.replay.clear()
        hardware.reset_peak_memory(self.device)
        done = loop.timed(self.section["warmup"], self.section["repeat_ms"] / 2)
        memory = hardware.peak_memory_gib(self.device)
        time = done.timing
        return {
            "time_ms": (time.p50, time.p20, time.p80),
            "qps": done.samples_per_s(),
            "peak_mem_gib": (memory, None, None),
        }

    def add(self, run: record.Run, case: str, subject: str, values: dict, note: str = "") -> None:
        for metric, (p50, p20, p80) in values.items():
            run.add(case=case, subject=subject, impl=self.config.implementations.compile, phase="step", metric=metric,
                    p50=p50, p20=p20, p80=p80, n=1, seed=0, note=note)  # fmt: skip


def frontier(bench: Bench, run: record.Run, points_run: record.Run) -> None:
    """Points of the regions, and steps under uniform budgets and under plans."""
    backend = bench.config.implementations.compile
    config = bench.with_columns(checkpointing=Checkpointing.REGION)
    model = train.build(config, bench.data, 0, bench.device)
    points = model.region_points
    for point in points:
        case, common = f"budget_{point.budget:g}", {"subject": point.region, "impl": backend, "phase": "step", "n": 3}
        points_run.add(case=case, metric="time_ms", p50=point.time_ms, **common)
        points_run.add(case=case, metric="memory_bytes", p50=point.memory_gib * 2**30, **common)
    names = list(checkpointing.regions(model))
    uniforms = {level: dict.fromkeys(names, level) for level in checkpointing.levels(backend)}
    everything = regions.total_memory(points, uniforms[1.0])
    with bench.loop(config, model) as loop:
        measured = {}

        def timed(budgets):
            key = tuple(sorted(budgets.items()))
            if key not in measured:
                checkpointing.set_budgets(model, budgets, backend)
                measured[key] = bench.timed(loop)
            return measured[key]

        for level, budgets in uniforms.items():
            bench.add(run, f"budget_{level:g}", "checkpointing_uniform", timed(budgets))
        for share in LIMITS:
            limit = max(share * everything, regions.total_memory(points, uniforms[0.0]))
            fitting = [b for b in uniforms.values() if regions.total_memory(points, b) <= limit * (1 + 1e-9)]
            uniform = min(fitting, key=lambda b: timed(b)["time_ms"][0])
            plan = regions.plan(points, limit)
            note = f"limit {limit:.3f} GiB"
            bench.add(run, f"memory_{share:g}", "checkpointing_uniform", timed(uniform), note)
            kept = sum(budget > 0 for budget in plan.values())
            bench.add(
                run, f"memory_{share:g}", "checkpointing_region", timed(plan), f"{note}; {kept} of {len(plan)} kept"
            )


def packed(bench: Bench, run: record.Run) -> None:
    """Steps whose saved activations are packed, and how far the local batch then goes."""
    for value in (SavedActivations.FULL, *(SavedActivations(name) for name in FORMATS)):
        subject = "saved_activations_bf16" if value is SavedActivations.FULL else f"saved_activations_{value.value}"
        config = bench.with_columns(saved_activations=value)
        with bench.loop(config) as loop:
            bench.add(run, "packed", subject, bench.timed(loop))
        largest = _largest(bench, config)
        note = f"powers of two times {bench.section['batch']}, up to {bench.section['largest']}"
        bench.add(run, "packed", subject, {"local_batch": (largest, None, None)}, note)


def _largest(bench: Bench, config: Config) -> int:
    """The largest local batch up to the tier's that fits, by doubling; 0 where the tier's own does not."""
    best, size = 0, bench.section["batch"]
    while size <= bench.section["largest"]:
        try:
            with bench.loop(with_batch(config, size)) as loop:
                loop.one()
                loop.one()
        except torch.OutOfMemoryError:
            break
        best, size = size, size * 2
    return best


def warm(bench: Bench, level: float) -> None:
    """Two steps with every region at one budget, for the caches of the compiler."""
    config = bench.with_columns(checkpointing=Checkpointing.UNIFORM)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, checkpoint_budget=level))
    with bench.loop(config) as loop:
        loop.one()
        loop.one()


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--preset", help="size of the model (default: the tier's)")
    parser.add_argument("--processes", type=int, default=1, help="processes that compile before the timing (default 1)")
    parser.add_argument("--warm", type=float, help="compile the regions at this budget and time nothing")
    args = parser.parse_args(argv)
    try:
        if args.processes > 1:
            same = ["--tier", args.tier, *(["--preset", args.preset] if args.preset else [])]
            commands = [
                [sys.executable, "-m", "gem.bench.memory", *same, "--warm", str(level)]
                for level in checkpointing.levels(
                    configuration.load(VARIANT, args.tier, args.preset).implementations.compile
                )
            ]
            started = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
            for process in started:
                process.wait()
        bench = Bench(args.tier, args.preset)
        if args.warm is not None:
            warm(bench, args.warm)
            return 0
        folder = args.run or args.tier
        config = {"variant": VARIANT, "preset": bench.config.preset, "step": bench.section, "limits": LIMITS}
        with record.Run(folder, "step", config=config, sources=SOURCES) as run:
            with record.Run(folder, "regions", config=config, sources=SOURCES) as points_run:
                frontier(bench, run, points_run)
            packed(bench, run)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"gem.bench.memory: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
