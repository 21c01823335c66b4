"""What two ranks run for tests/parallel/test_collectives.py, on gloo and on NCCL."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gem.bench import collectives as bench
from gem.bench.ranks import Job
from gem.parallel import collectives
from gem.parallel.collectives import CopyEngineGather, GatherThenQuantise, QuantiseThenGather


class Clock:
    """A clock of which every rank has its own: call n took n + 10 * rank ms."""

    def __init__(self, rank: int):
        self.rank = rank

    def run(self, calls):
        for call in calls:
            call()
        return [index + 1 + 10.0 * (self.rank == index % 2) for index in range(len(calls))]


def plain(rank) -> dict[str, list[bool]]:
    """Each collective of the benchmark: right as it is, and its check sees a wrong buffer."""
    found = {}
    calls = bench.plain_calls(4096, rank.world_size, rank.rank, rank.device)
    for name, (call, check) in calls.items():
        call()
        found[name] = [check()]
    for name in ("all_gather", "reduce_scatter", "all_to_all"):
        call, check = calls[name]
        call()
        size = 2048 // rank.world_size if name == "reduce_scatter" else 2048
        buffer = next(c.cell_contents for c in call.__closure__ if getattr(c.cell_contents, "shape", 0) == (size,))
        buffer.view(-1)[-1] += 1
        found[name].append(check())
    return found


def low_precision(rank) -> dict:
    shard = torch.randn(6, 32, generator=torch.Generator().manual_seed(rank.rank)).to(rank.device)
    after, before = GatherThenQuantise(shard), QuantiseThenGather(shard)
    (a, scale_a), (b, scale_b) = after(), (part.flatten(0, 1) for part in before())
    whole = torch.cat([torch.randn(6, 32, generator=torch.Generator().manual_seed(r)) for r in range(rank.world_size)])
    error = (b.float() * scale_b).cpu() - whole
    return {
        "equal": torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and torch.equal(scale_a, scale_b),
        "error": float(error.norm() / whole.norm()),
        "bytes": (after.bytes_sent, before.bytes_sent),
    }


def timing(rank) -> dict:
    job = Job(rank, "gpu2", "gpu2", {"bench": {}}, float("inf"), Clock(rank.rank))
    made = []
    found = job.time(lambda: made.append(1), 4, warmup=2)
    return {
        "p50": found.p50,
        "n": found.n,
        "calls": len(made),
        "largest": job.largest(rank.rank + 0.5),
        "gathered": job.gathered(rank.rank + 0.5),
        "agree": (job.agree(True), job.agree(rank.rank == 0)),
        "late": (
            job.is_late,
            Job(rank, "", "", {}, -rank.rank * float("inf") if rank.rank else 1e18, Clock(0)).is_late,
        ),
    }


def everything(rank) -> dict:
    return {"plain": plain(rank), "low_precision": low_precision(rank), "timing": timing(rank)}


def on_gpus(rank) -> dict:
    """NCCL, copy engines, and held multiprocessors."""
    found = {"plain": plain(rank), "low_precision": low_precision(rank)}
    gather = CopyEngineGather(1000, torch.bfloat16)
    right = []
    for turn in range(3):
        gather.shard.fill_(10 * turn + rank.rank)
        gather.start()
        full = gather.wait().clone()
        right.append(all(bool((full[peer] == 10 * turn + peer).all()) for peer in range(rank.world_size)))
    found["copies"] = right
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        big = CopyEngineGather(2**24, torch.bfloat16)
        big.start()
        big.wait()
        torch.cuda.synchronize()
    found["kernels"] = sorted({event.name for event in profile.events() if str(event.device_type).endswith("CUDA")})
    a = torch.randn(4096, 4096, device=rank.device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    times = {}
    for sms in (0, 66):
        torch.mm(a, a, out=out)
        torch.cuda.synchronize()
        with collectives.occupied(sms):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                torch.mm(a, a, out=out)
            end.record()
            end.synchronize()
            times[sms] = begin.elapsed_time(end)
    found["times"] = times
    group = collectives.limited_group(2)
    value = torch.ones(8, device=rank.device)
    dist.all_reduce(value, group=group)
    found["limited"] = value.tolist()
    return found
