"""Benchmarks of several ranks: started under torchrun by the job itself, timed on every rank, recorded by the first.

A call that all ranks make together takes as long as its slowest rank: times are the largest of all ranks, call by call.
Every rank makes the same number of calls, fixed beforehand: a rank that stopped early would leave the others waiting in
a collective.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gem import record, workflow
from gem.bench.timing import CudaClock, Timing
from gem.cli import Parser
from gem.parallel import collectives, launch

RANKS = 2  # of tier gpu2
OUT_OF_TIME = 3


class StreamClock(CudaClock):
    """CUDA events as in CudaClock, but it waits for the current stream alone: kernels that hold multiprocessors, or
    collectives of other streams, go on meanwhile."""

    def settle(self) -> None:
        self.torch.cuda.current_stream().synchronize()


@dataclass
class Job:
    """What the parts of a benchmark share: who this rank is, where records go, when to stop."""

    rank: launch.Rank
    tier: str
    run_name: str
    config: dict
    deadline: float
    clock: StreamClock | None = None

    def __post_init__(self):
        if self.clock is None and self.rank.device.type == "cuda":
            self.clock = StreamClock()

    @property
    def is_late(self) -> bool:
        """Whether no further case may begin; the same answer on every rank."""
        late = torch.tensor([float(time.monotonic() > self.deadline)], device=self.rank.device)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        return bool(late)

    def time(self, call: Callable[[], object], repeats: int, *, warmup: int = 3) -> Timing:
        """Time of a call that all ranks make together."""
        for _ in range(warmup):
            self.clock.run([call])
        dist.barrier()
        times = torch.tensor(self.clock.run([call] * repeats), device=self.rank.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return Timing.of(times.tolist(), warmup)

    def largest(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor([float(value)], device=self.rank.device, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def gathered(self, value: float) -> list[float]:
        """Every rank's value."""
        found = torch.zeros(self.rank.world_size, device=self.rank.device, dtype=torch.float64)
        found[self.rank.rank] = value
        dist.all_reduce(found)
        return found.tolist()

    def agree(self, value: bool) -> bool:
        """True if it is true on every rank."""
        found = torch.tensor([float(value)], device=self.rank.device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return bool(found)

    def open_run(self, experiment: str, part: str, sources: tuple[str, ...], settings: Mapping) -> record.Run:
        """The part of the records of one part of the benchmark; only the first rank writes it."""
        config = {"bench": self.config["bench"], "settings": dict(settings), "multicast": launch.NO_MULTICAST}
        return record.Run(
            self.run_name,
            experiment,
            name=f"{experiment}-{part}",
            config=config,
            sources=sources,
            num_devices=self.rank.world_size,
        )


def add_time(run: record.Run, base: Mapping, timing: Timing, note: str = "") -> None:
    run.add(**base, metric="time_ms", p50=timing.p50, p20=timing.p20, p80=timing.p80, n=timing.n, note=note)


def main(module: str, description: str, parts: Mapping[str, Callable[[Job], None]], argv: list[str] | None) -> int:
    """Command line of a benchmark: --tier, --run, --parts, --ranks, --limit-s. Starts its own ranks when it is not one.

    parts: name -> what measures it; they run in the given order. A part that raises ends the job: its collectives may
    have left the ranks out of step.
    """
    parser = Parser(prog=f"python -m {module}", description=description)
    parser.add_argument("--tier", required=True, help="name of config/<tier>.yaml")
    parser.add_argument("--run", help="folder under results for the records (default: the tier's name)")
    parser.add_argument("--parts", default=",".join(parts), help=f"of {','.join(parts)} (default: all)")
    parser.add_argument("--ranks", type=int, default=RANKS, help=f"GPUs of this host (default {RANKS})")
    parser.add_argument("--limit-s", type=float, default=420.0, help="seconds after which nothing further begins")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    try:
        settings = workflow.load({"tier": args.tier})
        chosen = args.parts.split(",")
        for name in chosen:
            if name not in parts:
                raise ValueError(f"--parts: {name!r} is unknown; allowed: {', '.join(parts)}")
        collectives.need_cuda(f"python -m {module}")
        os.environ |= launch.NO_MULTICAST
        # inductor's own worker processes do not see the GPU beside TLX's Triton
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        if "RANK" not in os.environ and args.ranks != 1:
            if not 1 <= args.ranks <= torch.cuda.device_count():
                there = torch.cuda.device_count()
                raise ValueError(f"--ranks {args.ranks}; allowed: 1 to the GPUs of this host, {there}")
            return launch.main(["--standalone", "--nproc-per-node", str(args.ranks), "-m", "--", module, *argv])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    collectives.without_multicast()
    rank = launch.start("nccl", timeout_s=90.0)
    job = Job(rank, args.tier, args.run or settings.name, settings.config, time.monotonic() + args.limit_s)
    late = ""
    for name in chosen:
        if job.is_late:
            late = name
            break
        begin = time.monotonic()
        parts[name](job)
        torch.cuda.synchronize()
        if rank.is_first:
            print(f"{module} {name}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
    launch.stop()
    if late and rank.is_first:
        print(f"stopped after {args.limit_s:g} s, before {late}; the same command goes on there", file=sys.stderr)
    return OUT_OF_TIME if late else 0
