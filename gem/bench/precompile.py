"""Compile in several processes what a bench run will launch, so that a lent GPU does not wait for compilers.

    python -m gem.bench.precompile --tier gpu --processes 14 kernels=v4,tlx traffic=all

Takes the steps of `python -m gem.bench.session`. Every row and implementation runs forward and backward once on a batch
of 16 sequences or a few more, which leaves its kernels in the caches on disk (Triton's, inductor's); nothing is
checked, timed or recorded. Kernels are chosen by head size, dtype and kind, and Triton tells sizes that are multiples
of 16 from others: the small batch agrees with the full one in that, and so compiles what it needs. Peers that inductor
compiles for one shape (kernels.COMPILED) run at their full size and first, since they take longest; processes share the
GPU's memory, so ask for fewer of them at once where that is little.

Exit status: 0 also when an implementation cannot run here (it is named); 1 when one failed otherwise.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
import time
from collections.abc import Iterable

from gem import hardware, workflow
from gem.bench import kernels, session
from gem.cli import Parser
from gem.progress import Progress

BATCH = 16


def at_full_shape(impl: str) -> bool:
    """Whether an implementation compiles for the exact shapes of a row."""
    return bool(set(impl.split(":")) & kernels.COMPILED)


def small_batch(row: dict) -> int:
    """Sequences of the small batch: few, and as many beyond a multiple of 16 as the row's."""
    return BATCH + int(row["batch"]) % BATCH


def jobs_of(steps: Iterable[session.Step]) -> list[tuple[dict, str]]:
    """(row, implementation) once each, full shapes first, the rest in a fixed random order that spreads the load."""
    found = {(row["case"], impl): row for step in steps for row, impls in step.work for impl in impls}
    jobs = [(row, impl) for (_, impl), row in found.items()]
    random.Random(0).shuffle(jobs)
    return sorted(jobs, key=lambda job: not at_full_shape(job[1]))


def compile_one(row: dict, impl: str, device: str) -> tuple[str, str]:
    """Run one implementation of a row once; (status, reason), status ok, unsupported or failed."""
    from gem.bench import cases, peers

    place = hardware.open_device(device)
    small = row if at_full_shape(impl) else row | {"batch": str(small_batch(row))}
    try:
        case = cases.build(small, place)
        call = peers.prepare(case, impl)
        result = call.forward()
        if "bwd" in row["phases"].split(","):
            call.backward(result)
        hardware.synchronize(place)
        return "ok", ""
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        refused = isinstance(error, peers.Unsupported) or (isinstance(error, ValueError) and "allowed" in reason)
        return ("unsupported", reason) if refused else ("failed", f"{type(error).__name__}: {reason}")
    finally:
        case = call = result = None
        if place.type == "cuda":
            import torch

            torch.cuda.empty_cache()


def _work(job: tuple[dict, str, str]) -> tuple[str, str, float, str, str]:
    start = time.monotonic()
    status, reason = compile_one(*job)
    return job[0]["case"], job[1], time.monotonic() - start, status, reason


def run(jobs: list[tuple[dict, str]], device: str, processes: int) -> dict[str, int]:
    """Compile all jobs; prints those that are not ok and returns how many ended with each status."""
    count = dict.fromkeys(("ok", "unsupported", "failed"), 0)
    # Spawned, because a CUDA context does not survive a fork.
    pool = multiprocessing.get_context("spawn").Pool(min(processes, max(len(jobs), 1)))
    with pool, Progress(total=len(jobs), unit="kernels", label="precompile") as progress:
        for case, impl, seconds, status, reason in pool.imap_unordered(_work, [(*job, device) for job in jobs]):
            count[status] += 1
            if status != "ok":
                print(f"{status}: {case} {impl} ({seconds:.1f} s): {reason}", flush=True)
            progress.advance(1)
    return count


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m gem.bench.precompile", description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="+", metavar="EXPERIMENT=IMPLS[@CASES]", help="as of gem.bench.session")
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--processes", type=int, default=8, help="compilers at once (default 8)")
    args = parser.parse_args(argv)
    try:
        if args.processes < 1:
            raise ValueError(f"--processes {args.processes}; allowed: 1 or more")
        settings = workflow.load({"tier": args.tier})
        jobs = jobs_of(session.parse_step(text, settings) for text in args.steps)
        hardware.open_device(settings.config["device"])  # no GPU: one line here, not one a job
        count = run(jobs, settings.config["device"], args.processes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(", ".join(f"{number} {status}" for status, number in count.items()))
    return 1 if count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
