"""The training jobs of a tier several at a time on each GPU: python -m gem.bench.trainings --tier gpu --processes 12

What a step of a small model costs is the launching of its kernels, which keeps a core busy and a GPU idle. So every
(job, seed) is a process of its own and `--processes` of them share each visible GPU. This process reads every data set
once and forks the others, which find data and imported modules in memory; it never touches a GPU itself. Jobs are
those of the rules in workflow/rules/train.smk: same results, records and receipts, so Snakemake goes on from here. The
one difference: throughput, step time and MFU are left out of the records, since the GPU was shared.

--jobs are globs over names (train-<variant>, quality-<weight>-<variant>, quality-size_<preset>-<variant>,
quality-hopper-<variant>), in the order in which they are wanted. Jobs that have a receipt are skipped unless --again.
Nothing begins that would not end within --limit-s as seeds went so far, and what still runs then is ended; a job of
which some seeds were done is recorded with these and left without a receipt.

Exit status: 0 all done; 1 a job failed (named; the others run) or bad arguments; 3 stopped by the limit.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from multiprocessing.connection import wait
from pathlib import Path

from gem import config as configuration
from gem import job as jobs
from gem import workflow
from gem.cli import Parser

OUT_OF_TIME = 3


@dataclass
class Work:
    """A job with the seeds that are still to be trained, those done, and seconds of each."""

    job: workflow.Training
    folder: str
    run: str
    todo: list[int]
    done: list[int] = field(default_factory=list)
    running: int = 0
    failed: bool = False
    recorded: bool = False

    @property
    def output(self) -> Path:
        """Where gem.train would put it by itself."""
        words = dict(zip(self.job.arguments[::2], self.job.arguments[1::2], strict=True))
        case = [words["--case"]] if "--case" in words else []
        return Path("results", self.run, words.get("--experiment", "train"), *case, words["--variant"])

    def train_command(self, seed: int) -> list[str]:
        """Arguments of gem.train for one seed, without records."""
        common = [*self.job.arguments, "--data", self.folder, "--output", str(self.output)]
        return [*common, "--seeds", str(seed), "--checkpoint-every", "0", "--quiet"]

    def record_command(self, seeds: Sequence[int], all_seeds: bool) -> list[str]:
        """Arguments of gem.train that record finished seeds and train none."""
        some = [] if all_seeds else ["--seeds", ",".join(map(str, sorted(seeds)))]
        return [
            *self.job.arguments,
            "--data",
            self.folder,
            "--run",
            self.run,
            *some,
            "--untimed",
            "--resume",
            "--quiet",
        ]


def chosen(settings: workflow.Settings, globs: Sequence[str], again: bool) -> list[workflow.Training]:
    """Jobs in the order of the globs, without those that have a receipt; ValueError for a glob that matches none."""
    every, picked = settings.trainings(), {}
    for glob in globs or ["*"]:
        found = [job for job in every if fnmatchcase(job.name, glob)]
        if not found:
            raise ValueError(f"--jobs {glob!r}; allowed: a glob that matches a training job of tier {settings.tier}")
        picked |= {job.name: job for job in found if job.name not in picked}
    receipts = Path(settings.results, "records", "jobs")
    return [job for job in picked.values() if again or not (receipts / f"{job.name}.json").exists()]


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, one a GPU; asks the driver's tool, which makes no CUDA context here."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    import subprocess

    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(index) for index, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


class Farm:
    """Runs (job, seed) pairs in processes until all are done or time is up."""

    def __init__(
        self,
        work: list[Work],
        gpus: list[str],
        processes: int,
        limit_s: float,
        *,
        target: Callable,
        seeds: int,
        start: str = "fork",
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.work, self.target, self.seeds, self.say, self.clock = work, target, seeds, say, clock
        self.context = multiprocessing.get_context(start)
        self.slots = dict.fromkeys(gpus, processes)
        self.began, self.limit_s = clock(), limit_s
        self.seconds: dict[str, list[float]] = {}  # job -> of its seeds
        self.running: dict = {}  # process sentinel -> (process, work, seed or None, gpu, start)

    def run(self) -> bool:
        """True when everything was done or failed, False when time was up first."""
        while self.running or self._next() is not None:
            while (place := self._place()) and (item := self._next()):
                self._start(*item, place)
            left = self.began + self.limit_s - self.clock()
            if left <= 0:
                self._stop()
                return False
            if not self.running:
                return False  # what is left would not be done in time
            for sentinel in wait(list(self.running), timeout=min(left, 60.0)):
                self._end(sentinel)
        return True

    def _place(self) -> str | None:
        gpu = max(self.slots, key=self.slots.get)
        return gpu if self.slots[gpu] > 0 else None

    def _next(self) -> tuple[Work, int | None] | None:
        """The record of a job whose seeds are done, else the next seed (none when it would not end in time)."""
        for item in self.work:
            if not item.todo and not item.running and not item.recorded and not item.failed:
                return item, None
        left = self.began + self.limit_s - self.clock()
        waiting = (item for item in self.work if item.todo and not item.failed)
        return next(((item, item.todo[0]) for item in waiting if self._expected(item) <= left), None)

    def _expected(self, item: Work) -> float:
        """Seconds of a seed: the job's slowest so far, else the median of all jobs' seeds, 0 before the first."""
        own = self.seconds.get(item.job.name)
        every = [value for values in self.seconds.values() for value in values]
        return max(own) if own else statistics.median(every) if every else 0.0

    def _start(self, item: Work, seed: int | None, gpu: str) -> None:
        if seed is None:
            item.recorded = True
            argv = item.record_command(item.done, len(item.done) == self.seeds)
        else:
            item.todo.remove(seed)
            argv = item.train_command(seed)
        process = self.context.Process(target=self.target, args=(item.job.name, item.folder, argv, gpu), daemon=True)
        process.start()
        item.running += 1
        self.slots[gpu] -= 1
        self.running[process.sentinel] = (process, item, seed, gpu, self.clock())

    def _end(self, sentinel) -> None:
        process, item, seed, gpu, start = self.running.pop(sentinel)
        process.join()
        item.running -= 1
        self.slots[gpu] += 1
        seconds = self.clock() - start
        what = "recorded" if seed is None else f"seed {seed}"
        if process.exitcode:
            item.failed = True
            self.say(f"{item.job.name}: {what}: failed after {seconds:.1f} s (exit code {process.exitcode})")
            return
        if seed is not None:
            item.done.append(seed)
            self.seconds.setdefault(item.job.name, []).append(seconds)
        self.say(f"{self.clock() - self.began:6.1f} s  {item.job.name}: {what} in {seconds:.1f} s")

    def _stop(self) -> None:
        """End what is running; then record what is done of jobs that were cut short."""
        for process, item, seed, *_ in self.running.values():
            process.kill()
            item.running -= 1
            if seed is None:
                item.recorded = False
        for process, *_ in self.running.values():
            process.join(10)
        self.running.clear()
        recorders = []
        for item in self.work:
            if item.done and not item.recorded and not item.failed:
                argv = item.record_command(item.done, len(item.done) == self.seeds)
                gpu = next(iter(self.slots))
                process = self.context.Process(
                    target=self.target, args=(item.job.name, item.folder, argv, gpu), daemon=True
                )
                process.start()
                recorders.append((process, item))
        for process, item in recorders:
            process.join(60)
            item.recorded, item.failed = True, process.exitcode != 0
            self.say(f"{item.job.name}: recorded with {len(item.done)} of {self.seeds} seeds")


_data: dict = {}  # folder -> Data, filled before the first fork


def read_data(folder: str):
    """The data of a folder, read once."""
    if folder not in _data:
        from gem import train

        _data[folder] = train.Data.open(folder)
    return _data[folder]


def read_all(folders: Iterable[str]) -> None:
    """The data of all folders, side by side."""
    from gem import train  # noqa: F401  once, before threads want it

    with ThreadPoolExecutor() as pool:
        list(pool.map(read_data, folders))


def train_here(name: str, folder: str, argv: list[str], gpu: str, logs: str) -> None:
    """Body of a process: gem.train with these arguments on this GPU, its output in a log of the job."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": gpu, "GEM_JOB": name, "GEM_RESUME": "0"}
    log = Path(logs, f"{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"$ python -m gem.train {shlex.join(argv)}", flush=True)
    try:
        import torch

        from gem import train

        # a fork has its parent's pool of threads without the threads: a second one would be waited for forever
        torch.set_num_threads(1)
        torch.cuda._cached_device_count = None  # what the parent counted was more than this process may see
        code = train.main(argv, read_data(folder))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # past the handlers that this process has from its parent


@dataclass(frozen=True)
class Target:
    """`train_here` with the folder of logs."""

    logs: str

    def __call__(self, name: str, folder: str, argv: list[str], gpu: str) -> None:
        train_here(name, folder, argv, gpu, self.logs)


def make_data(settings: workflow.Settings, names: Sequence[str]) -> None:
    """Data sets that are not there yet, side by side, each in a process of its own."""
    missing = [name for name in dict.fromkeys(names) if not Path(settings.data_folder(name), "manifest.json").exists()]
    context = multiprocessing.get_context("fork")
    made = [(name, context.Process(target=_synthesize, args=(settings, name))) for name in missing]
    for _, process in made:
        process.start()
    for name, process in made:
        process.join()
        if process.exitcode:
            raise ValueError(f"data set {name}: data.synthesize ended with exit code {process.exitcode}")


def _synthesize(settings: workflow.Settings, name: str) -> None:
    from data import synthesize

    arguments = ["--output", settings.data_folder(name), *shlex.split(settings.synthesize_arguments(name)), "--quiet"]
    sys.exit(synthesize.main(arguments))


def write_receipts(settings: workflow.Settings, work: list[Work], seeds: int) -> None:
    """Receipts of jobs that were recorded with all their seeds, as gem.job leaves them."""
    records = Path(settings.results, "records")
    for item in work:
        runs = jobs.runs_of(records / "parts", item.job.name)
        if item.recorded and not item.failed and len(item.done) == seeds and runs:
            jobs.write_receipt(records / "jobs" / f"{item.job.name}.json", runs)


def parser() -> Parser:
    p = Parser(prog="python -m gem.bench.trainings", description=__doc__.split("\n")[0])
    p.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    p.add_argument("--jobs", nargs="+", default=[], metavar="GLOB", help="over names of jobs, in order (default: all)")
    p.add_argument("--processes", type=int, default=4, help="at once on each GPU, or on the CPU (default 4)")
    p.add_argument("--limit-s", type=float, default=float("inf"), help="seconds after which nothing runs on")
    p.add_argument("--again", action="store_true", help="train also what has a receipt")
    p.add_argument("--steps", type=int, help="training steps, to try something out: nothing is recorded")
    p.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how processes begin (default fork)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    began = time.monotonic()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # a look at the GPUs that a fork survives
    try:
        for name, value in (("processes", args.processes), ("steps", args.steps)):
            if value is not None and value < 1:
                raise ValueError(f"--{name} {value}; allowed: an integer >= 1")
        if not args.limit_s > 0:
            raise ValueError(f"--limit-s {args.limit_s}; allowed: a number of seconds above 0")
        settings = workflow.load({"tier": args.tier})
        picked = chosen(settings, args.jobs, args.again)
        gpus = visible_gpus() if settings.uses_gpu else ["cpu"]
        if not gpus:
            raise ValueError("no NVIDIA GPU is visible here; use --tier smoke on a CPU")
        make_data(settings, [job.dataset for job in picked])
        if args.start == "fork":
            read_all({settings.data_folder(job.dataset) for job in picked})
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        f"{time.monotonic() - began:6.1f} s  data read; {len(picked)} jobs on {len(gpus)} x {args.processes}",
        flush=True,
    )
    seeds = list(configuration.load_tier(args.tier)["train"]["seeds"])
    work = [Work(job, settings.data_folder(job.dataset), settings.name, list(seeds)) for job in picked]
    if args.steps is not None:
        for item in work:
            item.recorded = True  # a trial: its seeds are trained, nothing is recorded
            item.job = workflow.Training(
                item.job.name, item.job.dataset, (*item.job.arguments, "--steps", str(args.steps))
            )
    farm = Farm(
        work,
        gpus,
        args.processes,
        args.limit_s - (time.monotonic() - began),
        target=Target(f"{settings.results}/logs/trainings"),
        seeds=len(seeds),
        start=args.start,
        say=lambda line: print(line, flush=True),
    )
    finished = farm.run()
    if args.steps is None:
        write_receipts(settings, work, len(seeds))
    print(f"{time.monotonic() - began:6.1f} s  {sum(len(item.done) for item in work)} seeds trained", flush=True)
    if failed := [item.job.name for item in work if item.failed]:
        print(
            f"error: {len(failed)} jobs failed: {', '.join(failed)}; see {settings.results}/logs/trainings",
            file=sys.stderr,
        )
        return 1
    return 0 if finished else OUT_OF_TIME


if __name__ == "__main__":
    sys.exit(main())
