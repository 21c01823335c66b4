"""Lists of work of the TLX kernels, each built by one launch: valid tiles of the forward, pieces of the backward.

A training step builds these for every pair of offsets, so a chain of sorts, sums and gathers would be hundreds of
launches a step, which cost the host more than the lists save the device. Here a program takes some sequences and
compares them with all: what comes before a sequence, by work and then by place, is counted, not sorted. That is
quadratic in the batch and still nothing at thousands of sequences (1,024: a million comparisons).

Plain Triton, so that the interpreter runs it as well. No synchronisation; sizes follow from shapes alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kept import kept

WIDTH = 8  # columns of a list
KEY_ROWS, QUERY_ROWS = 128, 64  # tiles of the backward
BLOCK, CHUNK = 32, 128  # sequences of a program, and those it compares with at a time


@triton.jit
def _queries(offsets, stride, index, batch, rows, DENSE_Q: tl.constexpr):
    """(first row, rows, first output row) of sequence `index`; index == batch is the rest past offsets[-1].

    DENSE_Q: the same `rows` for every sequence, none for the rest.
    """
    if DENSE_Q:
        return tl.zeros_like(index), tl.where(index < batch, rows, 0), index * rows
    else:
        first = tl.load(offsets + index.to(tl.int64) * stride, mask=index <= batch, other=0).to(tl.int32)
        end = tl.load(offsets + (index + 1).to(tl.int64) * stride, mask=index < batch, other=0).to(tl.int32)
        end = tl.where(index == batch, rows, end)
        return first, tl.where(index <= batch, end - first, 0), first


@triton.jit
def _keys(offsets, stride, index, batch):
    """(first row, rows) of sequence `index`, zeros from `batch` on."""
    first = tl.load(offsets + index.to(tl.int64) * stride, mask=index < batch, other=0).to(tl.int32)
    end = tl.load(offsets + (index + 1).to(tl.int64) * stride, mask=index < batch, other=0).to(tl.int32)
    return first, end - first


@triton.jit
def _row(column, a, b, c, d, e, f, g, h):
    """[BLOCK, 8] with these vectors as columns. column: [1, 8]."""
    low = tl.where(
        column == 0, a[:, None], tl.where(column == 1, b[:, None], tl.where(column == 2, c[:, None], d[:, None]))
    )
    high = tl.where(
        column == 4, e[:, None], tl.where(column == 5, f[:, None], tl.where(column == 6, g[:, None], h[:, None]))
    )
    return tl.where(column < 4, low, high)


@triton.jit
def _store_tiles(table, row, start, tiles, total, slots, column, TILES_COLUMN: tl.constexpr, BLOCK: tl.constexpr):
    """Row i in places start[i] .. start[i] + tiles[i]; past the last place rows without work but with one tile, so that
    nobody divides by zero."""
    for tile in range(tl.max(tiles, 0)):
        place = (start + tile).to(tl.int64)[:, None] * 8 + column
        tl.store(table + place, row, mask=(tile < tiles)[:, None])
    program, programs = tl.program_id(0), tl.num_programs(0)
    for first in range(total + program * BLOCK, slots, programs * BLOCK):
        slot = first + tl.arange(0, BLOCK)
        rest = tl.where(column == TILES_COLUMN, 1, 0) + tl.zeros([BLOCK, 8], tl.int32)
        tl.store(table + slot.to(tl.int64)[:, None] * 8 + column, rest, mask=(slot < slots)[:, None])


@triton.jit(do_not_specialize=["batch", "q_rows", "slots"])
def forward_list_kernel(
    q_offsets, kv_offsets, table, count, batch, q_rows, slots, q_stride, kv_stride, DENSE_Q: tl.constexpr,
    TILE_ROWS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """table[t] = (first q row, q rows, first kv row, kv rows, first tile of the sequence, its tiles, output row, 0)."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q_first, q_size, out_first = _queries(q_offsets, q_stride, mine, batch, q_rows, DENSE_Q)
    kv_first, kv_size = _keys(kv_offsets, kv_stride, mine, batch)
    start = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([1], tl.int32)
    for chunk in range(0, batch + 1, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        _, rows, _ = _queries(q_offsets, q_stride, other, batch, q_rows, DENSE_Q)
        _, keys = _keys(kv_offsets, kv_stride, other, batch)
        parts = (rows + TILE_ROWS - 1) // TILE_ROWS
        more = keys[None, :] > kv_size[:, None]
        same = (keys[None, :] == kv_size[:, None]) & (other[None, :] < mine[:, None])
        start += tl.sum(tl.where(more | same, parts[None, :], 0), 1)
        total += tl.sum(parts, 0)
    tiles = (q_size + TILE_ROWS - 1) // TILE_ROWS
    column = tl.arange(0, 8)[None, :]
    row = _row(column, q_first, q_size, kv_first, kv_size, start, tiles, out_first, tl.zeros_like(start))
    _store_tiles(table, row, start, tiles, tl.sum(total, 0), slots, column, 5, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(count + tl.arange(0, 1), total)


@triton.jit(do_not_specialize=["batch", "q_rows", "kv_rows", "slots"])
def backward_list_kernel(
    q_offsets, kv_offsets, units, table, count, batch, q_rows, kv_rows, slots, q_stride, kv_stride,
    DENSE_Q: tl.constexpr, RESIDENT: tl.constexpr, KEY_ROWS: tl.constexpr, QUERY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """What `backward_lists` returns. Sequence `batch` is queries without keys, batch + 1 keys without queries."""
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    q_first, q_size, out_first = _queries(q_offsets, q_stride, mine, batch, q_rows, DENSE_Q)
    kv_first, kv_size = _keys(kv_offsets, kv_stride, mine, batch)
    kv_end = tl.load(kv_offsets + batch.to(tl.int64) * kv_stride).to(tl.int32)
    last = mine == batch + 1
    q_first, out_first = tl.where(last, 0, q_first), tl.where(last, 0, out_first)
    kv_first, kv_size = tl.where(last, kv_end, kv_first), tl.where(last, kv_rows - kv_end, kv_size)
    start = tl.zeros([BLOCK], tl.int32)
    rank = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([1], tl.int32)
    for chunk in range(0, batch + 2, CHUNK):
        other = chunk + tl.arange(0, CHUNK)
        _, rows, _ = _queries(q_offsets, q_stride, other, batch, q_rows, DENSE_Q)
        _, keys = _keys(kv_offsets, kv_stride, other, batch)
        keys = tl.where(other == batch + 1, kv_rows - kv_end, keys)
        parts = (keys + KEY_ROWS - 1) // KEY_ROWS
        more = (rows[None, :] > q_size[:, None]) | (
            (rows[None, :] == q_size[:, None]) & (keys[None, :] > kv_size[:, None])
        )
        same = (rows[None, :] == q_size[:, None]) & (keys[None, :] == kv_size[:, None])
        before = (more | (same & (other[None, :] < mine[:, None]))) & (other[None, :] < batch + 2)
        start += tl.sum(tl.where(before, parts[None, :], 0), 1)
        rank += tl.sum(before.to(tl.int32), 1)
        total += tl.sum(parts, 0)
    tiles = (kv_size + KEY_ROWS - 1) // KEY_ROWS
    column = tl.arange(0, 8)[None, :]
    none = tl.zeros_like(start)
    live = (mine < batch + 2)[:, None]
    unit = _row(column, q_first, q_size, kv_first, kv_size, out_first, none, none, none)
    tl.store(units + mine.to(tl.int64)[:, None] * 8 + column, unit, mask=live)
    # Counters of a sequence begin where no other sequence's can reach: a tile cut by its end belongs to it alone.
    row = _row(column, kv_first, kv_size, q_first, q_size, out_first, start, tiles, out_first // QUERY_ROWS + mine)
    if RESIDENT:
        tl.store(table + rank.to(tl.int64)[:, None] * 8 + column, row, mask=live)
        number = tl.zeros([1], tl.int32) + batch + 2
    else:
        _store_tiles(table, row, start, tiles, tl.sum(total, 0), slots, column, 6, BLOCK)
        number = total
    if tl.program_id(0) == 0:
        tl.store(count + tl.arange(0, 1), number)


def build_forward_list(
    q_offsets: torch.Tensor | None, kv_offsets: torch.Tensor, q_rows: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Valid tiles of `block_rows` query rows, longest keys first: (int32 [slots, 8], their number int32 [1]).

    q_offsets None: q_rows dense queries shared by every sequence. Otherwise q_rows is the length of the packed axis
    and the rows past offsets[-1] form one more sequence without keys, whose zeros the kernel writes. Columns: see
    forward_list_kernel. slots is an upper bound that follows from shapes alone.
    """
    batch, dense = kv_offsets.numel() - 1, q_offsets is None
    bound = -(-q_rows // block_rows) * batch if dense else (q_rows + (batch + 1) * (block_rows - 1)) // block_rows
    slots = max(bound, 1)
    table = torch.empty((slots, WIDTH), dtype=torch.int32, device=kv_offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=kv_offsets.device)
    own = kv_offsets if dense else q_offsets
    forward_list_kernel[(triton.cdiv(batch + 1, BLOCK),)](
        own, kv_offsets, table, count, batch, q_rows, slots, own.stride(0), kv_offsets.stride(0), DENSE_Q=dense,
        TILE_ROWS=block_rows, BLOCK=BLOCK, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return table, count


def build_backward_lists(
    q_offsets: torch.Tensor | None, kv_offsets: torch.Tensor, q_rows: int, kv_rows: int, resident: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(units int32 [B + 2, 8], list int32 [slots, 8], its length int32 [1]) of a backward pass.

    A unit is a sequence, or the rows past offsets[-1] of either side: (first q row, q rows, first kv row, kv rows,
    first output row, 0, 0, 0). q_offsets None: q_rows dense queries shared by every sequence; their output rows are one
    block a sequence. The list names pieces of work, those with the most queries, then keys, first: tiles of KEY_ROWS
    keys, or with `resident` whole units. Its columns: first kv row, kv rows, first q row, q rows, first output row, key
    tiles before the unit, its key tiles, its first counter.
    """
    batch, dense = kv_offsets.numel() - 1, q_offsets is None
    bound = batch + 2 if resident else (kv_rows + (batch + 2) * (KEY_ROWS - 1)) // KEY_ROWS
    slots = max(bound, 1)
    units, table = (
        torch.empty((rows, WIDTH), dtype=torch.int32, device=kv_offsets.device) for rows in (batch + 2, slots)
    )
    count = torch.empty(1, dtype=torch.int32, device=kv_offsets.device)
    own = kv_offsets if dense else q_offsets
    backward_list_kernel[(triton.cdiv(batch + 2, BLOCK),)](
        own, kv_offsets, units, table, count, batch, q_rows, kv_rows, slots, own.stride(0), kv_offsets.stride(0),
        DENSE_Q=dense, RESIDENT=bool(resident), KEY_ROWS=KEY_ROWS, QUERY_ROWS=QUERY_ROWS, BLOCK=BLOCK, CHUNK=CHUNK,
        num_warps=4,
    )  # fmt: skip
    return units, table, count


def forward_list(q_offsets, kv_offsets, q_rows: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`build_forward_list`, built once per pair of offsets tensors."""
    return kept(build_forward_list, q_offsets, kv_offsets, q_rows, block_rows)


def backward_lists(
    q_offsets, kv_offsets, q_rows: int, kv_rows: int, *, resident: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`build_backward_lists`, built once per pair of offsets tensors."""
    return kept(build_backward_lists, q_offsets, kv_offsets, q_rows, kv_rows, int(resident))
