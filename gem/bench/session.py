"""Several experiments of config/kernels.tsv in one process and within a time limit, for GPUs lent by the minute.

    python -m gem.bench.session --tier gpu --limit-s 355 kernels=v4,tlx traffic=all 'kernels=flex@jfa_self_*+jfa_pma_*'

A step is EXPERIMENT=IMPLS[@CASES]: IMPLS is "all" or names separated by commas, as in the column impls (a name without
its option stands for every option); CASES are globs over case ids separated by "+". Steps run in order, each row as
`python -m gem.bench.kernels` would run it, so that the most wanted numbers come first and one process pays once for
the start, the device and the ceilings of an experiment.

No row begins after --limit-s; a row that has begun is finished, so leave the caller a minute more. What is measured
already is skipped (a part that is whole, made by the present sources and of this very row), so the same command goes
on where it stopped; --again measures everything anew. `python -m gem.bench.precompile` takes the same steps and
compiles what they launch, in parallel, beforehand.

Exit status: 0 all steps done; 1 an error (a row that broke is named, the others run); 3 stopped by the limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gem import workflow
from gem.bench import kernels
from gem.cli import Parser
from gem.progress import Progress

OUT_OF_TIME = 3


@dataclass(frozen=True)
class Step:
    """One argument: an experiment, and the (row, implementations) that it asks for."""

    text: str
    experiment: str
    work: list[tuple[dict, list[str]]]

    @property
    def size(self) -> int:
        """Number of (row, implementation) pairs."""
        return sum(len(impls) for _, impls in self.work)


def parse_step(text: str, settings: workflow.Settings) -> Step:
    """A step from its text; ValueError, in one line, for what the sheet does not have in this tier."""
    experiment, equals, wanted = text.partition("=")
    impls, _, globs = wanted.partition("@")
    if not equals or not experiment or not impls:
        raise ValueError(f"step {text!r}; allowed: EXPERIMENT=all or EXPERIMENT=IMPL,IMPL, then @CASE+CASE or nothing")
    rows = settings.kernel_cases(experiment)
    if not rows:
        known = {row["experiment"] for row in settings.sheets["kernels"].values()}
        known = sorted(name for name in known if settings.kernel_cases(name))
        raise ValueError(
            f"step {text!r}: experiment {experiment!r}; allowed in tier {settings.tier}: {', '.join(known)}"
        )
    for glob in globs.split("+") if globs else ():
        if not any(fnmatchcase(row["case"], glob) for row in rows):
            raise ValueError(f"step {text!r}: cases {glob!r}; allowed: a glob that a case of {experiment} matches")
    if globs:
        rows = [row for row in rows if any(fnmatchcase(row["case"], glob) for glob in globs.split("+"))]
    filters = [] if impls == "all" else impls.split(",")
    for name in filters:
        if not any(kernels.chosen_impls(row, [name]) for row in rows):
            there = sorted({impl for row in rows for impl in row["impls"].split(",")})
            raise ValueError(f"step {text!r}: impl {name!r}; allowed there: all, {', '.join(there)}")
    work = [(row, kernels.chosen_impls(row, filters)) for row in rows]
    return Step(text, experiment, [(row, names) for row, names in work if names])


@contextlib.contextmanager
def resuming(resume: bool) -> Iterator[None]:
    """Within the block GEM_RESUME says whether parts that are there already are skipped."""
    before = os.environ.get("GEM_RESUME")
    os.environ["GEM_RESUME"] = "1" if resume else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["GEM_RESUME"]
        else:
            os.environ["GEM_RESUME"] = before


class Session:
    """Runs steps until a deadline. `clock` counts seconds."""

    def __init__(self, run_name: str, config: dict, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.run_name, self.config, self.clock = run_name, config, clock
        self.deadline = clock() + limit_s
        self.benches: dict[str, kernels.Bench] = {}
        self.done: set[tuple[str, str]] = set()
        self.broken: list[str] = []

    def run(self, steps: list[Step]) -> str | None:
        """None when every step is done, else where the limit stopped it."""
        with Progress(total=sum(step.size for step in steps), unit="cases", label="session") as progress:
            for step in steps:
                for row, names in step.work:
                    if self.clock() >= self.deadline:
                        return f"{step.text} at {row['case']}"
                    self.run_row(step, row, names)
                    progress.advance(len(names), case=row["case"])
        return None

    def run_row(self, step: Step, row: dict, names: list[str]) -> None:
        """Measure what no earlier step has measured of a row."""
        names = [name for name in names if (row["case"], name) not in self.done]
        self.done |= {(row["case"], name) for name in names}
        if step.experiment not in self.benches:
            self.benches[step.experiment] = kernels.Bench(step.experiment, self.run_name, self.config)
        try:
            self.benches[step.experiment].run_case(row, names)
        except kernels.DeviceLostError:
            raise
        except Exception as error:  # such as the reference of a row running out of memory: the next row may fit
            self.broken.append(row["case"])
            reason = " ".join(str(error).split())[:200]
            print(f"error: {row['case']}: {type(error).__name__}: {reason}", file=sys.stderr)


def timing_config(config: dict, warmup_ms: float | None, repeat_ms: float | None) -> dict:
    """The tier's configuration with other times a measurement; they are kept in the records. ValueError if below 0."""
    asked = {"warmup_ms": warmup_ms, "repeat_ms": repeat_ms}
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, value in asked.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value}; allowed: a number of milliseconds from 0 on")
    return config | {"bench": config["bench"] | asked}


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.session", description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="+", metavar="EXPERIMENT=IMPLS[@CASES]", help="in the order in which they run")
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--limit-s", type=float, required=True, help="seconds after which no further row begins")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--warmup-ms", type=float, help="of a measurement (default: the tier's bench.warmup_ms)")
    parser.add_argument("--repeat-ms", type=float, help="of a measurement (default: the tier's bench.repeat_ms)")
    parser.add_argument("--again", action="store_true", help="measure also what is measured already")
    args = parser.parse_args(argv)
    try:
        if not 0 < args.limit_s < float("inf"):
            raise ValueError(f"--limit-s {args.limit_s}; allowed: a number of seconds above 0")
        settings = workflow.load({"tier": args.tier})
        config = timing_config(settings.config, args.warmup_ms, args.repeat_ms)
        steps = [parse_step(text, settings) for text in args.steps]
        session = Session(args.run or settings.name, config, args.limit_s)
        with resuming(not args.again):
            stopped = session.run(steps)
    except (ValueError, OSError, kernels.DeviceLostError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if stopped:
        print(f"stopped after {args.limit_s:g} s, before {stopped}; the same command goes on there", file=sys.stderr)
        return OUT_OF_TIME
    if session.broken:
        print(f"error: {len(session.broken)} rows broke: {', '.join(session.broken)}", file=sys.stderr)
    return 1 if session.broken else 0


if __name__ == "__main__":
    sys.exit(main())
