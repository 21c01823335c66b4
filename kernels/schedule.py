"""Which program of a persistent kernel works on which tile, and how uneven the result is.

A tile is `block_m` query rows of one sequence; its work is the number of `block_n` key blocks that it visits. A batch
of ragged sequences gives tiles of very different work, so the order in which tiles are dealt to programs decides how
long the last program runs. The source's remedy, computed on the host where lengths are known: keep valid tiles only,
sort them by work and deal them in zigzag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ORDERS = ("grid", "valid", "zigzag")


@dataclass(frozen=True)
class Schedule:
    """Program p owns tiles[program_offsets[p] : program_offsets[p + 1]], in that order.

    tiles: int32 [n, 2], (sequence, tile index within it). program_offsets: int32 [P + 1]. work: int64 [P], key blocks
    per program. block_m, block_n: the tile that it was built for; a kernel with another tile must not use it.
    """

    tiles: torch.Tensor
    program_offsets: torch.Tensor
    work: torch.Tensor | None
    block_m: int
    block_n: int
    order: str

    @property
    def num_programs(self) -> int:
        return self.program_offsets.shape[0] - 1

    def to(self, device: torch.device | str) -> Schedule:
        """The same schedule with its tensors on `device`."""
        moved = [
            t if t is None else t.to(device, non_blocking=True) for t in (self.tiles, self.program_offsets, self.work)
        ]
        return Schedule(*moved, self.block_m, self.block_n, self.order)


class Skew(NamedTuple):
    """Unevenness of the programs' work; 1.0 is perfect. max_over_min is inf when a program has nothing to do."""

    max_over_mean: float
    max_over_min: float


def skew(work: torch.Tensor) -> Skew:
    """Unevenness of work [P]. Without any work it is (1.0, 1.0)."""
    work = work.double()
    if work.numel() == 0 or work.max() == 0:
        return Skew(1.0, 1.0)
    high, low = work.max().item(), work.min().item()
    return Skew(high / work.mean().item(), high / low if low > 0 else float("inf"))


def tile_schedule(
    q_lengths: torch.Tensor,
    kv_lengths: torch.Tensor,
    block_m: int,
    block_n: int,
    num_programs: int,
    order: str = "zigzag",
) -> Schedule:
    """Deal the query tiles of a batch to `num_programs` programs. Vectorised on the host.

    q_lengths, kv_lengths: [B] integers on the CPU. Orders:
    - grid: the plain launch, sequence-major over ceil(longest / block_m) tiles of every sequence, dealt in turn; a slot
      whose tile lies past its sequence's end is spent but holds no work, so it is absent from `tiles`.
    - valid: the same without those slots.
    - zigzag: valid tiles by falling work, dealt to 0..P-1, then P-1..0, and so on.
    Every order holds the same tiles once each. Tiles of queries without keys stay (work 0): their rows need their
    zeros.
    """
    if order not in ORDERS:
        raise ValueError(f"order: {order!r}; allowed: {', '.join(ORDERS)}")
    for name, size in (("block_m", block_m), ("block_n", block_n), ("num_programs", num_programs)):
        if size < 1:
            raise ValueError(f"{name}: {size}; allowed: >= 1")
    q_lengths, kv_lengths = (torch.as_tensor(x).to("cpu", torch.int64) for x in (q_lengths, kv_lengths))
    if q_lengths.dim() != 1 or q_lengths.shape != kv_lengths.shape:
        shapes = f"{tuple(q_lengths.shape)}, {tuple(kv_lengths.shape)}"
        raise ValueError(f"q_lengths, kv_lengths: shapes {shapes}; allowed: (B,) both")
    num_tiles = -(q_lengths // -block_m)
    key_blocks = -(kv_lengths // -block_n)
    sequence = torch.repeat_interleave(num_tiles)
    total = sequence.shape[0]
    tile = torch.arange(total) - (num_tiles.cumsum(0) - num_tiles)[sequence]
    work = key_blocks[sequence]
    if order == "grid":
        slot = sequence * (int(num_tiles.max()) if total else 0) + tile
        program, rank = slot % num_programs, slot
    elif order == "valid":
        rank = torch.arange(total)
        program = rank % num_programs
    else:
        rank = torch.empty(total, dtype=torch.int64)
        rank[torch.argsort(work, descending=True, stable=True)] = torch.arange(total)
        column = rank % num_programs
        program = torch.where(rank // num_programs % 2 == 0, column, num_programs - 1 - column)
    # One stable key: by program, then by the order in which the program received its tiles.
    chosen = torch.argsort(program * (int(rank.max()) + 1 if total else 1) + rank)
    program_offsets = torch.zeros(num_programs + 1, dtype=torch.int32)
    program_offsets[1:] = torch.bincount(program, minlength=num_programs).cumsum(0)
    load = torch.zeros(num_programs, dtype=torch.int64).index_add_(0, program, work)
    tiles = torch.stack([sequence, tile], dim=1)[chosen].int()
    return Schedule(tiles, program_offsets, load, block_m, block_n, order)


def flatten(schedule: Schedule | None) -> tuple[torch.Tensor | None, torch.Tensor | None, list[int]]:
    """A schedule as arguments of a torch.library op: (tiles, program_offsets, [block_m, block_n])."""
    if schedule is None:
        return None, None, []
    return schedule.tiles, schedule.program_offsets, [schedule.block_m, schedule.block_n]


def restore(tiles: torch.Tensor | None, program_offsets: torch.Tensor | None, blocks: list[int]) -> Schedule | None:
    """Inverse of `flatten`, without the load per program, which kernels do not need."""
    return None if tiles is None else Schedule(tiles, program_offsets, None, blocks[0], blocks[1], "given")
