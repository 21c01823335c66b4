"""Collectives and the multiprocessors they take: NCCL with a limit on its blocks, and an all-gather by copy engines.

The source: all-gather and reduce-scatter kernels hold about 24 SMs and cost up to 15 % of the GEMMs beside them, more
than their share because the last wave of tiles no longer fits; moved to the copy engines inside a host, an all-gather
leaves them one SM, about 5 % of the throughput of a large job. Its all-reduce inside the switch (NVLink SHARP) is not
attempted: it needs multicast, which is off here.

Everything but `low_gather` needs CUDA and says so in one line where there is none; nothing falls back. NVLink multicast
is switched off before a process group is made (gem.parallel.launch.NO_MULTICAST): shared hosts withhold the fabric
manager that it needs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from gem.parallel import fp8_rows
from gem.parallel.fp8_rows import FLOAT8
from gem.parallel.launch import NO_MULTICAST
from gem.parallel.sm_holder import hold

# In-switch reduction: what records say of it.
NOT_ATTEMPTED = {"in_switch_all_reduce": "needs NVLink multicast, which is switched off on this host"}


def without_multicast() -> None:
    """Switch NVLink multicast off for NCCL, symmetric memory and NVSHMEM. Before the process group is made.

    RuntimeError if a process group exists that was made with multicast allowed: the setting would come too late.
    """
    late = [name for name, value in NO_MULTICAST.items() if os.environ.get(name) != value]
    if late and dist.is_initialized() and "nccl" in dist.get_backend_config():
        raise RuntimeError(f"collectives: {', '.join(late)} set after the group was made; allowed: before")
    os.environ |= NO_MULTICAST


def need_cuda(what: str) -> None:
    """ValueError, in one line, where there is no GPU."""
    if not torch.cuda.is_available():
        raise ValueError(f"collectives: {what} needs CUDA, and torch finds no GPU; allowed: a machine with NVIDIA GPUs")


def limited_group(max_ctas: int, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A NCCL group whose kernels take at most `max_ctas` thread blocks, one an SM. Collective over all ranks.

    ranks: members, None = all. ValueError: max_ctas outside 1..64, or no CUDA.
    """
    if isinstance(max_ctas, bool) or not isinstance(max_ctas, int) or not 1 <= max_ctas <= 64:
        raise ValueError(f"collectives: max_ctas is {max_ctas!r}; allowed: a whole number from 1 to 64")
    need_cuda("a NCCL group")
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = 1
    options.config.max_ctas = max_ctas
    return dist.new_group(ranks, backend="nccl", pg_options=options)


class CopyEngineGather:
    """All-gather inside a host by the GPUs' copy engines: each rank copies its peers' shards over NVLink.

    `full` [ranks, numel] lies in symmetric memory; this rank's shard is `full[rank]`, so nothing is copied locally.
    `start()` has the copies queued on a side stream behind what the current stream has done, `wait()` lets the current
    stream use `full`. Two barriers, of one thread block each, stand around the copies: no rank copies before all have
    written their shards, and no rank writes its own again before all have copied it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None):
        if numel < 1:
            raise ValueError(f"collectives: a shard of {numel} elements; allowed: at least 1")
        need_cuda("a gather by copy engines")
        import torch.distributed._symmetric_memory as symmetric

        group = group or dist.group.WORLD
        self.rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        device = torch.device("cuda", torch.cuda.current_device())
        self.full = symmetric.empty(ranks, numel, dtype=dtype, device=device)
        self.handle = symmetric.rendezvous(self.full, group)
        others = [(self.rank + step) % ranks for step in range(1, ranks)]
        self.peers = {peer: self.handle.get_buffer(peer, (ranks, numel), dtype)[peer] for peer in others}
        self.stream = torch.cuda.Stream(priority=-1)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part, [numel]: write it before `start`."""
        return self.full[self.rank]

    def start(self) -> None:
        """Queue the copies. Collective."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.handle.barrier(channel=0)
            for peer, source in self.peers.items():
                self.full[peer].copy_(source, non_blocking=True)
            self.handle.barrier(channel=1)

    def wait(self) -> torch.Tensor:
        """`full`, for use on the current stream."""
        torch.cuda.current_stream().wait_stream(self.stream)
        return self.full


class GatherThenQuantise:
    """Weights in FP8 on every rank, the costly way: gather bfloat16, then each rank quantises all of it."""

    def __init__(self, shard: torch.Tensor, group: dist.ProcessGroup | None = None):
        self.shard, self.group = shard, group or dist.group.WORLD
        ranks = dist.get_world_size(self.group)
        self.full = shard.new_empty(ranks * shard.shape[0], shard.shape[1], dtype=torch.bfloat16)
        self.bytes_sent = (ranks - 1) * shard.numel() * 2

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        dist.all_gather_into_tensor(self.full, self.shard.to(torch.bfloat16), group=self.group)
        return fp8_rows.quantise_rows(self.full)


class QuantiseThenGather:
    """The same from 1 byte and a bit an element: each rank quantises its own shard, in one pass over it, and sends
    elements and scales as one message.

    Gives views on what arrived, [ranks, rows, features] and [ranks, rows, 1]: the elements of a rank lie together, and
    its scales behind them.
    """

    def __init__(self, shard: torch.Tensor, group: dist.ProcessGroup | None = None):
        self.shard, self.group = shard, group or dist.group.WORLD
        ranks, (rows, features) = dist.get_world_size(self.group), shard.shape
        if features % 4:
            raise ValueError(f"collectives: a shard of {features} features; allowed: a multiple of 4")
        size, split = fp8_rows.message_bytes(rows, features), rows * features
        self.message = torch.empty(size, dtype=torch.uint8, device=shard.device)
        self.own = fp8_rows.parts_of(self.message, rows, features)
        self.full = torch.empty(ranks, size, dtype=torch.uint8, device=shard.device)
        self.data = self.full[:, :split].view(FLOAT8).view(ranks, rows, features)
        self.scale = self.full[:, split:].view(torch.float32).view(ranks, rows, 1)
        self.bytes_sent = (ranks - 1) * size

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        fp8_rows.quantise_rows(self.shard, *self.own, through_bf16=True)
        dist.all_gather_into_tensor(self.full.view(-1), self.message, group=self.group)
        return self.data, self.scale


@contextlib.contextmanager
def occupied(sms: int, limit_s: float = 5.0) -> Iterator[None]:
    """Within the block `sms` multiprocessors are held by a kernel that does nothing, as a collective's kernel holds
    them. RuntimeError if they could not all be taken. ValueError: more than the device has, or no CUDA."""
    need_cuda("holding multiprocessors")
    there = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    if not 0 <= sms < there:
        raise ValueError(f"collectives: {sms} multiprocessors to hold; allowed: 0 to {there - 1}")
    if sms == 0:
        yield
        return
    with hold(sms, limit_s):
        yield
