"""Collectives between the GPUs of one host: by size, beside GEMMs, on copy engines, in FP8 (experiment topology).

    python -m gem.bench.collectives --tier gpu2
    python -m gem.bench.collectives --tier gpu --ranks 1 --parts held      what one GPU can show

Results are compared with what they must be before anything is timed; a wrong one gets no time but status failed.
comm_bytes: what a rank sends. Cases bytes<n>: n bytes of the whole buffer, in bfloat16.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from gem.bench import ranks
from gem.bench.ranks import Job, add_time
from gem.bench.timing import Timing
from gem.parallel import collectives
from gem.parallel.collectives import CopyEngineGather, GatherThenQuantise, QuantiseThenGather

EXPERIMENT = "topology"
SOURCES = (
    "gem/bench/collectives.py",
    "gem/bench/ranks.py",
    "gem/parallel/collectives.py",
    "gem/parallel/sm_holder.py",
    "gem/parallel/fp8_rows.py",
)
SIZES = tuple(2**power for power in (16, 20, 23, 26, 28, 29))
FEATURES = 4096  # of a row of weights that is quantised
GEMM = 8192
GEMMS = 8
HELD = (1, 4, 8, 16, 24, 32, 66)
CTAS = (1, 2, 4, 8, 16, 24)
GATHER_BYTES = 2**28  # a rank's shard in a gather beside GEMMs
ROWS = (2048, 4096, 8192)  # of a layer's input: its GEMM takes about 1, 2 and 4 times as long as the gather beside it
LAYERS = 8
REPEATS = 20


limited_group = functools.cache(collectives.limited_group)  # a communicator costs a second and memory


def base(case: str, subject: str, impl: str = "nccl") -> dict:
    return {"case": case, "subject": subject, "impl": impl, "phase": "step"}


def sent(name: str, size: int, world: int) -> float:
    """Bytes that a rank sends of a buffer of `size` bytes; rings for all-reduce."""
    return size * (world - 1) / world * (2 if name == "all_reduce" else 1)


def plain_calls(size: int, world: int, rank: int, device) -> dict[str, tuple[Callable, Callable]]:
    """Collective -> (call, check) over buffers of `size` bytes in all."""
    full = torch.empty(size // 2, dtype=torch.bfloat16, device=device)
    shard = torch.full((full.numel() // world,), float(rank + 1), dtype=torch.bfloat16, device=device)
    whole = torch.arange(1, world + 1, device=device, dtype=torch.bfloat16).repeat_interleave(shard.numel())
    out = torch.empty_like(shard)
    exchanged = torch.empty_like(full)

    def is_sum(tensor: torch.Tensor, value: torch.Tensor) -> bool:
        return torch.equal(tensor, value.expand_as(tensor))

    def reduce_sum():
        dist.all_reduce(exchanged)

    total = torch.tensor(float(sum(range(1, world + 1))), dtype=torch.bfloat16, device=device)

    def check_all_reduce() -> bool:
        exchanged.fill_(rank + 1)
        reduce_sum()
        right = is_sum(exchanged, total)
        exchanged.zero_()  # so that repeated sums stay finite
        return right

    return {
        "all_gather": (
            lambda: dist.all_gather_into_tensor(full, shard),
            lambda: torch.equal(full, whole),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(out, whole),
            lambda: is_sum(out, torch.tensor(float(world * (rank + 1)), dtype=out.dtype, device=device)),
        ),
        "all_reduce": (reduce_sum, check_all_reduce),
        "all_to_all": (
            lambda: dist.all_to_all_single(exchanged, whole),
            lambda: is_sum(exchanged, torch.tensor(float(rank + 1), dtype=out.dtype, device=device)),
        ),
    }


def measured(job: Job, run, row: dict, call: Callable, check: Callable, size: float | None, note: str = "") -> None:
    """Check a collective on all ranks, then time it."""
    call()
    torch.cuda.current_stream().synchronize()
    right = job.agree(bool(check()))
    run.add(**row, metric="correct", p50=float(right), note="" if right else "a rank has a wrong result")
    if not right:
        run.add(**row, metric="time_ms", status="failed", note="a rank has a wrong result")
        return
    add_time(run, row, job.time(call, REPEATS), note)
    if size is not None:
        run.add(**row, metric="comm_bytes", p50=size)


def by_size(job: Job) -> None:
    """Plain collectives of NCCL, and the gather by copy engines, over sizes."""
    world, rank, device = job.rank.world_size, job.rank.rank, job.rank.device
    run = job.open_run(EXPERIMENT, "collectives", SOURCES, {"sizes": SIZES, "repeats": REPEATS})
    for size in SIZES:
        for name, (call, check) in plain_calls(size, world, rank, device).items():
            measured(job, run, base(f"bytes{size}", name), call, check, sent(name, size, world))
        gather = CopyEngineGather(size // 2 // world, torch.bfloat16)
        gather.shard.fill_(rank + 1)
        whole = torch.arange(1, world + 1, device=device, dtype=torch.bfloat16)[:, None]

        def call(gather=gather):
            gather.start()
            gather.wait()

        def check(gather=gather, whole=whole) -> bool:
            return torch.equal(gather.full, whole.expand_as(gather.full))

        row = base(f"bytes{size}", "gather_copy_engine", "copy_engine")
        measured(job, run, row, call, check, sent("all_gather", size, world))
    for name, reason in collectives.NOT_ATTEMPTED.items():
        run.add(**base("all", name), metric="time_ms", status="unsupported", note=reason)
    write(job, run)


def low_precision(job: Job) -> None:
    """Weights in FP8 on every rank: bfloat16 gathered and then quantised, against shards quantised before."""
    world, rank, device = job.rank.world_size, job.rank.rank, job.rank.device
    run = job.open_run(EXPERIMENT, "low_precision", SOURCES, {"features": FEATURES, "repeats": REPEATS})
    for size in [size for size in SIZES if size >= 2**20]:
        rows = size // 2 // world // FEATURES
        shard = torch.randn(rows, FEATURES, device=device, generator=torch.Generator(device).manual_seed(rank))
        slow, fast = GatherThenQuantise(shard), QuantiseThenGather(shard)

        def check(slow=slow, fast=fast) -> bool:
            (a, scale_a), (b, scale_b) = slow(), fast()
            same = torch.equal(a.view(torch.uint8), b.flatten(0, 1).view(torch.uint8))
            return same and torch.equal(scale_a, scale_b.flatten(0, 1))

        for subject, call, impl in (
            ("all_gather_bf16", slow, "quantise_after"),
            ("all_gather_fp8", fast, "quantise_before"),
        ):
            note = f"{call.bytes_sent} bytes sent a rank; ends with FP8 weights and scales on every rank"
            size_sent = call.bytes_sent if subject == "all_gather_fp8" else None  # the other's are those of all_gather
            measured(job, run, base(f"bytes{size}", subject, impl), call, check, size_sent, note)
    write(job, run)


class Gemms:
    """`GEMMS` products of GEMM^3 in bfloat16 on the current stream, into memory that is there already."""

    def __init__(self, device):
        self.a, self.b = (torch.randn(GEMM, GEMM, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.out = torch.empty_like(self.a)

    def __call__(self) -> None:
        for _ in range(GEMMS):
            torch.mm(self.a, self.b, out=self.out)


def held(job: Job) -> None:
    """GEMMs alone, and beside a kernel that holds multiprocessors. One GPU is enough."""
    sms = torch.cuda.get_device_properties(job.rank.device).multi_processor_count
    settings = {"held": HELD, "gemm": GEMM, "gemms": GEMMS, "sms": sms}
    run = job.open_run(EXPERIMENT, "held", SOURCES, settings)
    gemms, case = Gemms(job.rank.device), f"gemm{GEMM}x{GEMMS}"
    add_time(run, base(case, "gemm_alone", "torch_mm"), job.time(gemms, 8))
    for count in HELD:
        dist.barrier()
        torch.cuda.synchronize()
        with collectives.occupied(count):
            times = job.clock.run([gemms] * 8)  # no collective within: its kernel might find no multiprocessor
        found = torch.tensor(times, device=job.rank.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        add_time(run, base(case, f"gemm_beside_{count}_sms", "held"), Timing.of(found.tolist(), 0))
    write(job, run)


def contention(job: Job) -> None:
    """GEMMs beside as many gathers, by NCCL and by copy engines."""
    settings = {"ctas": CTAS, "gemm": GEMM, "gemms": GEMMS, "shard_bytes": GATHER_BYTES}
    run = job.open_run(EXPERIMENT, "contention", SOURCES, settings)
    gemms, case, world = Gemms(job.rank.device), f"gemm{GEMM}x{GEMMS}", job.rank.world_size
    # alone in this very part too: the clock of a GPU that has computed for a while is another
    add_time(run, base(case, "gemm_alone", "torch_mm"), job.time(gemms, 8))
    numel = GATHER_BYTES // 2
    shard = torch.full((numel,), 1.0, dtype=torch.bfloat16, device=job.rank.device)
    full = torch.empty(world * numel, dtype=torch.bfloat16, device=job.rank.device)
    groups = {"nccl": dist.group.WORLD} | {f"nccl_ctas{n}": limited_group(n) for n in CTAS}
    for impl, group in groups.items():
        gather = partial(dist.all_gather_into_tensor, full, shard, group=group)
        row = base(f"bytes{world * GATHER_BYTES}", "gather_limited", impl)
        add_time(run, row, job.time(gather, 8), "all-gather alone")
        beside = partial(beside_nccl, gemms, full, shard, group)
        add_time(run, base(case, "gemm_beside_gather", impl), job.time(beside, 8))
    copy = CopyEngineGather(numel, torch.bfloat16)
    timing = job.time(lambda: beside_copies(gemms, copy), 8)
    add_time(run, base(case, "gemm_beside_gather", "copy_engine"), timing, f"{GEMMS} gathers beside {GEMMS} GEMMs")
    bytes_sent = sent("all_gather", world * GATHER_BYTES, world)
    run.add(**base(case, "gather_beside_gemm"), metric="comm_bytes", p50=bytes_sent)
    write(job, run)


def beside_nccl(gemms: Gemms, full: torch.Tensor, shard: torch.Tensor, group) -> None:
    """As many all-gathers as GEMMs, on NCCL's stream; both have ended when the current stream goes on."""
    works = [dist.all_gather_into_tensor(full, shard, group=group, async_op=True) for _ in range(GEMMS)]
    gemms()
    for work in works:
        work.wait()


def beside_copies(gemms: Gemms, gather: CopyEngineGather) -> None:
    for _ in range(GEMMS):
        gather.start()
    gemms()
    gather.wait()


class LayeredStep:
    """LAYERS products x @ W as under FSDP: the weights of the next layer are gathered while this one is computed.

    Two buffers of whole weights take turns. Weights are square, GEMM wide; their shards are set up beforehand.
    """

    def __init__(self, rows: int, device, how: str):
        world = dist.get_world_size()
        numel = GEMM * GEMM // world
        generator = torch.Generator(device).manual_seed(dist.get_rank())
        self.x = torch.randn(
            rows, GEMM, device=device, dtype=torch.bfloat16, generator=torch.Generator(device).manual_seed(7)
        )
        self.out, self.how = torch.empty_like(self.x), how
        shards = [torch.randn(numel, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2)]
        if how == "copy_engine":
            self.gathers = [CopyEngineGather(numel, torch.bfloat16) for _ in range(2)]
            for gather, shard in zip(self.gathers, shards, strict=True):
                gather.shard.copy_(shard)
            self.full = [gather.full.view(GEMM, GEMM) for gather in self.gathers]
        else:
            self.shards = shards
            self.full = [torch.empty(GEMM, GEMM, device=device, dtype=torch.bfloat16) for _ in range(2)]
            self.group = dist.group.WORLD
            if how.startswith("nccl_ctas"):
                self.group = limited_group(int(how.removeprefix("nccl_ctas")))
            for place in range(2):
                dist.all_gather_into_tensor(self.full[place].view(-1), self.shards[place], group=self.group)

    def start(self, place: int):
        if self.how == "copy_engine":
            self.gathers[place].start()
            return self.gathers[place]
        if self.how == "none":
            return None
        flat = self.full[place].view(-1)
        return dist.all_gather_into_tensor(flat, self.shards[place], group=self.group, async_op=True)

    def __call__(self) -> torch.Tensor:
        pending = self.start(0)
        for layer in range(LAYERS):
            place = layer % 2
            if pending is not None:
                pending.wait()
            # the gather overwrites the buffer of the layer before: it starts when that layer's product is queued
            pending = self.start(1 - place) if layer + 1 < LAYERS else None
            torch.mm(self.x, self.full[place], out=self.out)
        return self.out


def layered_step(job: Job) -> None:
    """Steps of GEMM layers whose weights are gathered one layer ahead, by NCCL and by copy engines."""
    settings = {"rows": ROWS, "width": GEMM, "layers": LAYERS, "repeats": REPEATS}
    run = job.open_run(EXPERIMENT, "layered_step", SOURCES, settings)
    names = {"none": "step_no_gather", "copy_engine": "step_copy_engine_gather"}
    for rows in ROWS:
        right = None
        for how in ("none", "nccl", "nccl_ctas4", "nccl_ctas8", "copy_engine"):
            step = LayeredStep(rows, job.rank.device, how)
            result = step().clone()
            right = result if right is None else right
            row = base(f"rows{rows}", names.get(how, "step_nccl_gather"), how)
            measured(job, run, row, step, partial(torch.equal, result, right), None)
            del step
            torch.cuda.empty_cache()
    write(job, run)


def write(job: Job, run) -> None:
    if job.rank.is_first:
        run.write()
    dist.barrier()


PARTS = {
    "collectives": by_size,
    "held": held,
    "contention": contention,
    "layered_step": layered_step,
    "low_precision": low_precision,
}


def main(argv: list[str] | None = None) -> int:
    return ranks.main("gem.bench.collectives", __doc__.split("\n")[0], PARTS, argv)


if __name__ == "__main__":
    sys.exit(main())
