"""Time the layers of the model one by one on one device: every module, each implementation swapped alone.

    python -m gem.bench.layers --tier gpu --processes 20 --limit-s 150
    python -m gem.bench.layers --tier gpu --cells 'self_attention-*'

A module runs forward and backward on a batch of real lengths, under the tier's compiler, after its output and
gradients were compared with the plain reference; without that there is no time. From these times come, by addition:
the time-weighted local MFU of variants, the share of norms, attention, GEMMs and elementwise work in it, the predicted
time of the layers of every variant (to be held against real steps), and what each optimisation saves on average over
all orders (Shapley values).

Subjects: feed_forward, self_attention, pooling, summary, interaction, embedding, heads are the modules of variant
`full`, summed over its layers; <module>@<variant> those of another; self_attention_block and the like one module
swapped alone, summed over a model whose layers all have it; <variant> the sum of a variant's modules; norms,
attention, gemms, elementwise shares of time of baseline_varlen; shapley:<column> milliseconds saved by a column.

Each cell's result is kept under results/<run>/layers as soon as it is there: after a run that was stopped the same
command with GEM_RESUME=1 measures what is missing (with --limit-s 1 nothing) and writes the record of all.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch

from gem import compile as compilation
from gem import config as configuration
from gem import hardware, metrics, provenance, record, report, train
from gem.bench import attribution, batches, cells, components, farm, parity, step, units
from gem.bench.attribution import PLAYERS, Place
from gem.bench.cell_store import Store
from gem.bench.cells import BASE, PER_EVENT, Cell
from gem.bench.timing import Timing, clock_for, measure
from gem.cli import Parser
from gem.digest import source_digest
from gem.train import Data

FULL = "full"
FIXED = ("embedding", "heads")  # the same in every jagged variant
FIXED_JOB = ", ".join(FIXED)
SOURCES = (*step.SOURCES, *(f"gem/bench/{name}.py" for name in ("layers", "cells", "attribution")))
SHARES = {"norm": "norms", "attention": "attention", "gdpa": "attention", "gemm": "gemms"}  # all else: elementwise
PROFILED_CALLS = 2


@dataclass
class Measured:
    """One cell on one event type. fwd, both: times of the forward, and of forward and backward. flops: of both.
    parts: component -> ms of both. status other than ok: why there is no time. captured: timed as CUDA graphs."""

    fwd: Timing | None = None
    both: Timing | None = None
    flops: int = 0
    error: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    status: tuple[str, str] = ("ok", "")
    captured: bool = False


class CellTask:
    """One cell on all event types, as `gem.bench.farm` runs it."""

    def __init__(self, cell: Cell, options: step.Options, store: Store | None = None):
        self.cell, self.options, self.settings, self.store = cell, options, options.settings(), store
        self.config = cell.config(options.tier, options.preset)

    def prepare(self) -> None:
        self.device = hardware.open_device(self.config.device)
        self.data = configuration.load_tier(self.options.tier)["data"]
        self.lengths = cells.median_lengths(self.config, self.data, self.settings["batch"])
        self.found: dict[int, Measured] = {}
        self.built = {}
        # as in batches.draft: whole in samples, small in events; four times `draft` samples where GDPA pads them,
        # which the feed-forward alone calls: other modules would be compiled once more for a whole batch
        batch, few = self.settings["batch"], self.settings["draft"]
        padded = self.cell.kind == "feed_forward" and self.config.implementations.gdpa == "eager"
        rows = min(4 * few, batch) if padded else batch
        draft = {name: np.where(np.arange(rows) < few, lengths[:rows], 0) for name, lengths in self.lengths.items()}
        sizes = [cells.Inputs(self.config, found, self.device) for found in (draft, cells.small_lengths(self.data))]
        count = len(self.lengths) if self.cell.kind in PER_EVENT else 1
        for event in range(count):
            try:
                made = cells.compiled(cells.build(self.cell.kind, self.config, sizes[0], event), self.config)
                for inputs in sizes:
                    given = cells.build(self.cell.kind, self.config, inputs, event).inputs
                    cells.evaluate(made.call, made.module, given, self.config, self.device)
                self.built[event] = made
            except Exception as error:
                self.found[event] = Measured(status=step.status_of(error))
        hardware.synchronize(self.device)
        step.release(self.device)
        print(f"{self.cell.name}: {compilation.summary()}", flush=True)

    def measure(self) -> dict[int, Measured]:
        clock = clock_for(self.device.type, units.FLUSH_BYTES if self.device.type == "cuda" else 0)
        for event, made in self.built.items():
            try:
                self.found[event] = self.time(made, event, clock)
            except Exception as error:
                self.found[event] = Measured(status=step.status_of(error))
            step.release(self.device)
        if self.store is not None:
            self.store.keep(self.cell.name, self.found)
        return self.found

    def time(self, made: cells.Built, event: int, clock) -> Measured:
        wrong, error = cells.problem(self.cell.kind, made, self.config, self.data, self.device, event)
        if wrong:
            return Measured(status=("failed", wrong), error=error)
        inputs = cells.Inputs(self.config, self.lengths, self.device)
        real = cells.build(self.cell.kind, self.config, inputs, event)
        parameters = list(made.module.parameters())

        def forward(*given):
            return [cells.outputs_of(made.call(*given))]

        both = units.closure(forward, real.inputs, parameters, self.config, self.device)
        leaves = tuple(map(units.leaves, real.inputs))

        def alone():
            with train.autocast(self.config, self.device):
                made.call(*leaves)

        settings = {"device": self.device.type, "warmup": 2, "repeat_ms": self.settings["part_ms"], "clock": clock}
        times, graphs = [], []
        for call in (alone, both):
            graphs.append(units.captured(call, self.device))
            times.append(measure(graphs[-1] or call, min_repeats=5, max_repeats=100, **settings))
        parts = profile(both, self.device)
        return Measured(*times, real.flops, error, parts, captured=None not in graphs)


class FixedTask:
    """Embedding and heads, which no toggle of a jagged variant touches, out of a whole model of one layer."""

    def __init__(self, options: step.Options, store: Store | None = None):
        self.options, self.settings, self.store = options, options.settings(), store
        config = configuration.load(BASE, options.tier, options.preset)
        model = dataclasses.replace(
            config.model,
            num_layers=1,
            events=tuple(dataclasses.replace(size, num_layers=1) for size in config.model.events),
        )
        self.config = step.with_batch(dataclasses.replace(config, model=model), self.settings["batch"])

    def prepare(self) -> None:
        self.device = hardware.open_device(self.config.device)
        data = configuration.load_tier(self.options.tier)["data"]
        self.schema = batches.schema_of(data, self.settings["table_rows"])
        self.split = batches.MemorySplit(self.schema, self.settings["batch"], data)
        small = parity.small_split(data)
        self.model = train.build(self.config, Data(small, small), 0, self.device)
        for layer in self.model.layers:  # only brings the heads their input; it is timed as cells
            for module in layer.modules():
                compilation.leave_plain(module)
        draft = batches.draft(small.schema, self.settings, data, padded=self.config.implementations.gdpa == "eager")
        for split in (draft, small):
            parity.gradients(self.model, parity.whole_batch(split, self.device), self.config)
        step.release(self.device)

    def measure(self) -> dict[str, Measured]:
        self.model = step.with_tables(self.model, self.config, self.schema, self.device)
        batch = next(self.split.epoch(self.settings["batch"], 0, 0)).to(self.device)
        parts = {part.name: part for part in units.parts_of(self.model, batch, self.config)}
        wanted = [parts[name] for name in FIXED]
        found = {}
        for item in units.time_parts(wanted, self.device, self.settings["part_ms"]):
            parts = profile(item.part.call, self.device)
            found[item.part.name] = Measured(None, item.timing, item.part.flops, 0.0, parts, captured=item.captured)
        if self.store is not None:
            self.store.keep(FIXED_JOB, found)
        return found


def profile(call, device) -> dict[str, float]:
    """Components of a call; none where the profiler fails, which must not cost the time."""
    try:
        return components.profiled(call, PROFILED_CALLS, device.type == "cuda")
    except Exception as error:
        print(f"profiler: {type(error).__name__}: {error}", file=sys.stderr)
        return {}


class Book:
    """Measured cells, and the sums that variants make of them."""

    def __init__(self, options: step.Options, fixed: dict[str, Measured], found: dict[tuple, dict[int, Measured]]):
        self.options, self.fixed, self.found = options, fixed, found
        self.config = configuration.load(BASE, options.tier, options.preset)
        self.rows = configuration.load_variants()
        data = configuration.load_tier(options.tier)["data"]
        self.events = [event.name for event in batches.schema_of(data, 1).events]

    def of(self, place: Place) -> Measured:
        cell, event = place
        key = (cell.kind, *cell.runs_as(cell.config(self.options.tier, self.options.preset)))
        return self.found[key][event]

    def places(self, row: dict[str, str]) -> list[tuple[str, Measured, int]]:
        """(module, measured cell, how often) of a variant; embedding and heads once."""
        counts = attribution.cells_of(row, self.config.model, len(self.events))
        found = [(cell.kind, self.of((cell, event)), count) for (cell, event), count in counts.items()]
        return found + [(name, item, 1) for name, item in self.fixed.items()]

    def problem(self, row: dict[str, str]) -> str | None:
        """Why a variant has no sum: the first module without a time."""
        if set(self.fixed) != set(FIXED):
            return f"{', '.join(set(FIXED) - set(self.fixed))}: not measured"
        try:
            bad = next(((kind, item) for kind, item, _ in self.places(row) if item.status[0] != "ok"), None)
        except KeyError as error:
            return f"cell {error.args[0]} was not measured"
        return None if bad is None else f"{bad[0]}: {bad[1].status[0]}: {bad[1].status[1]}"

    def milliseconds(self, row: dict[str, str]) -> float:
        return sum(item.both.p50 * count for _, item, count in self.places(row))

    def modules(self, row: dict[str, str]) -> dict[str, tuple[float, int]]:
        """module -> (ms, FLOPs) of a variant."""
        total: dict[str, tuple[float, int]] = {}
        for kind, item, count in self.places(row):
            ms, flops = total.get(kind, (0.0, 0))
            total[kind] = (ms + item.both.p50 * count, flops + item.flops * count)
        return total

    def shares(self, row: dict[str, str]) -> dict[str, float]:
        """norms, attention, gemms, elementwise -> share of the kernels' time in the layers of a variant; empty where a
        module has no profile."""
        if not all(item.parts for _, item, _ in self.places(row)):
            return {}
        total = dict.fromkeys((*dict.fromkeys(SHARES.values()), "elementwise"), 0.0)
        for _, item, count in self.places(row):
            for name, ms in item.parts.items():
                total[SHARES.get(name, "elementwise")] += ms * count
        whole = sum(total.values())
        return {name: value / whole for name, value in total.items()}


def write(run: record.Run, book: Book, jobs: dict[tuple, Cell], variants: list[str], peak: hardware.Peak) -> None:
    """All rows of the experiment."""
    case = book.config.preset
    for key, cell in jobs.items():
        config = cell.config(book.options.tier, book.options.preset)
        subject, impl = cell.labels(config)
        _write_cell(run, book, cell, {"case": case, "subject": subject, "impl": impl}, book.found[key], peak)
    for name in variants:
        row = book.rows[name]
        impl = report.implementation(configuration.load(name, book.options.tier, book.options.preset))
        base = {"case": case, "subject": name, "impl": impl}
        wrong = book.problem(row)
        if wrong:
            run.add(**base, phase="step", metric="mfu", status="failed", note=wrong)
            continue
        modules = book.modules(row)
        total, flops = (sum(column) for column in zip(*modules.values(), strict=True))
        note = "sum of modules timed alone; without optimiser and input"
        run.add(**base, phase="model", metric="time_ms", p50=total, scope="modelled", note=note)
        run.add(**base, phase="step", metric="mfu", p50=metrics.mfu(flops, total / 1e3, peak.flops), note=note)
        if name in (FULL, BASE):
            for kind, (ms, count) in modules.items():
                own = base | {"subject": kind if name == FULL else f"{kind}@{name}", "phase": "step"}
                run.add(**own, metric="time_ms", p50=ms)
                run.add(**own, metric="time_share", p50=ms / total)
                run.add(**own, metric="mfu", p50=metrics.mfu(count, ms / 1e3, peak.flops), note=f"peak: {peak.name}")
            for kind, share in book.shares(row).items():
                own = base | {"subject": kind if name == BASE else f"{kind}@{name}", "phase": "step"}
                run.add(**own, metric="time_share", p50=share, note="of the time of kernels, all layers")
    _write_shapley(run, book, case)


def _write_cell(run, book: Book, cell: Cell, base: dict, found: dict[int, Measured], peak) -> None:
    depth = {
        event: sum(book.config.model.events[event % len(book.config.model.events)].num_layers > layer
                   for layer in range(book.config.model.num_layers)) if cell.kind in PER_EVENT
        else book.config.model.num_layers
        for event in found
    }  # fmt: skip
    bad = next((item for item in found.values() if item.status[0] != "ok"), None)
    if bad is not None:
        if bad.error:
            run.add(**base, phase="step", metric="correct", p50=0, note=bad.status[1])
        run.add(**base, phase="step", metric="time_ms", status=bad.status[0], note=bad.status[1])
        return
    run.add(**base, phase="step", metric="correct", p50=1, note="output and gradients of a small batch")
    run.add(**base, phase="step", metric="rel_err", p50=max(item.error for item in found.values()))
    for event, item in found.items():
        if cell.kind in PER_EVENT:
            own = base | {"subject": f"{base['subject']}[{book.events[event]}]"}
            _write_times(run, own, item.fwd, item.both, item.flops, peak, item.captured)
    fwd, both = (
        Timing(*(sum(getattr(getattr(item, side), name) * depth[event] for event, item in found.items())
                 for name in ("p50", "p20", "p80")), n=min(getattr(item, side).n for item in found.values()), warmup=2)
        for side in ("fwd", "both")
    )  # fmt: skip
    flops = sum(item.flops * depth[event] for event, item in found.items())
    _write_times(run, base, fwd, both, flops, peak, all(item.captured for item in found.values()))


def _write_times(run, base: dict, fwd: Timing, both: Timing, flops: int, peak, captured: bool) -> None:
    base = base | {"note": units.launch_note(captured)}
    for phase, timing in (("fwd", fwd), ("step", both)):
        run.add(**base, phase=phase, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80, n=timing.n)
    base.pop("note")
    run.add(**base, phase="bwd", metric="time_ms", p50=both.p50 - fwd.p50, n=both.n, note="both less the forward")
    run.add(**base, phase="step", metric="mfu", p50=metrics.mfu(flops, both.p50 / 1e3, peak.flops), n=both.n)


def _write_shapley(run, book: Book, case: str) -> None:
    low, high = book.rows[BASE], book.rows[FULL]
    rows = {chosen: attribution.subset_row(low, high, chosen) for chosen in attribution.subsets(PLAYERS)}
    wrong = next(filter(None, map(book.problem, rows.values())), None)
    base = {"case": case, "impl": "shapley", "phase": "model", "scope": "modelled"}
    if wrong:
        run.add(**base, subject="shapley", metric="time_ms", status="failed", note=wrong)
        return
    shares = attribution.shapley(PLAYERS, lambda chosen: -book.milliseconds(rows[chosen]))
    whole = sum(shares.values())
    for name, saved in shares.items():
        note = f"ms saved between {BASE} and {FULL}, mean over all orders of {len(PLAYERS)} toggles"
        run.add(**base, subject=f"shapley:{name}", metric="time_ms", p50=saved, note=note)
        if whole:
            run.add(
                **base, subject=f"shapley:{name}", metric="time_share", p50=saved / whole, note="of all that is saved"
            )


def wanted_cells(options: step.Options, variants: list[str]) -> dict[tuple, Cell]:
    """What must be timed, once each: the modules of the variants, and of every subset of the players' toggles."""
    rows = configuration.load_variants()
    tier = configuration.load_tier(options.tier)
    config = configuration.load(BASE, options.tier, options.preset)
    events = len(batches.schema_of(tier["data"], 1).events)
    subsets = [attribution.subset_row(rows[BASE], rows[FULL], chosen) for chosen in attribution.subsets(PLAYERS)]
    found: dict[tuple, Cell] = {}
    for row in [*(rows[name] for name in variants), *subsets]:
        for cell, _ in attribution.cells_of(row, config.model, events):
            key = (cell.kind, *cell.runs_as(cell.config(options.tier, options.preset)))
            found.setdefault(key, cell)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.layers", description=__doc__.split("\n")[0])
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml; its section `step` has the defaults")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--cells", default="*", help="glob of cells, such as self_attention-*: only these, no sums")
    parser.add_argument("--preset", help=f"size of the model: {', '.join(configuration.PRESETS)} (default: the tier's)")
    parser.add_argument("--batch", type=int, help="samples whose lengths the modules run on")
    parser.add_argument("--processes", type=int, default=1, help="cells that compile at once (default 1)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which none begins")
    args = parser.parse_args(argv)
    try:
        tier = configuration.load_tier(args.tier)
        device = hardware.open_device(tier["device"])
        options = step.Options(args.tier, args.run or args.tier, args.preset, args.batch)
        variants = step.section_of(args.tier)["layer_variants"]
        step.settle_environment(tier["device"], args.processes)
        jobs = wanted_cells(options, variants)
        jobs = {key: cell for key, cell in jobs.items() if fnmatchcase(cell.name, args.cells)}
        if not jobs:
            names = sorted({cell.name for cell in wanted_cells(options, variants).values()})
            raise ValueError(f"--cells {args.cells!r}; allowed: a glob over {', '.join(names)}")
        store = store_of(options, device)
        work = [farm.Job(cell.name, CellTask, (cell, options, store)) for cell in jobs.values()]
        if args.cells == "*":
            work.insert(0, farm.Job(FIXED_JOB, FixedTask, (options, store)))
        kept = {job.name: value for job in work if (value := store.load(job.name, Measured)) is not None}
        for name in kept:
            print(f"{name}: measured before", flush=True)
        work = [job for job in work if job.name not in kept]
        outcomes = farm.run(work, args.processes, limit_s=args.limit_s, say=lambda line: print(line, flush=True))
        results = {name: farm.Outcome(name, "done", value=value) for name, value in kept.items()}
        results |= {outcome.name: outcome for outcome in outcomes}
        fixed = results.get(FIXED_JOB)
        found = {key: cells_found(results[cell.name], events_of(cell, options)) for key, cell in jobs.items()}
        book = Book(options, fixed.value if fixed and fixed.value else {}, found)
        config = book.config.to_dict() | {"step": options.settings(), "cells": args.cells}
        row = {"id": "layers" if args.cells == "*" else f"layers-{args.cells.replace('*', 'x')}"}
        with record.Run(options.run, "layers", name=row["id"], case_row=row, config=config, sources=SOURCES) as run:
            write(run, book, jobs, variants if args.cells == "*" else [], hardware.peak(device))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 3 if any(outcome.status == "skipped" for outcome in outcomes) else 0


def store_of(options: step.Options, device: torch.device) -> Store:
    """Where results of this model, these settings, sources, software and device are kept. A cell's name says what a
    variant asks for; what it runs as, and on which lengths, the tier's file says."""
    tier = configuration.load_tier(options.tier)
    depends = {"config": configuration.load(BASE, options.tier, options.preset).to_dict(), "step": options.settings()}
    depends |= {name: tier[name] for name in ("implementations", "data")}
    depends |= {"software": provenance.software(), "device": hardware.device_name(device)}
    return Store.of(Path("results", options.run, "layers"), source_digest(*SOURCES), depends)


def events_of(cell: Cell, options: step.Options) -> int:
    """On how many event types a cell is timed."""
    data = configuration.load_tier(options.tier)["data"]
    return len(batches.schema_of(data, 1).events) if cell.kind in PER_EVENT else 1


def cells_found(outcome: farm.Outcome, events: int = 1) -> dict[int, Measured]:
    """Measured event types of a cell; a process that was lost counts as failed on each of them."""
    lost = Measured(status=("failed", outcome.reason))
    return outcome.value if outcome.value else dict.fromkeys(range(events), lost)


if __name__ == "__main__":
    sys.exit(main())
