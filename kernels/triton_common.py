"""What the Triton kernels of every op share: the device-side tile list and small load and store helpers.

A jagged kernel gets one program per (tile of rows,
head). Which tiles exist depends on offsets that live on the device, so the
list of tiles is written there by one small kernel,
and the main kernel is launched over an upper bound that follows from
static sizes alone: sum_b ceil(l_b / block) <= (T + (B + 1) (block - 1)) / block. Programs past the real
count return at once.
No maximum length enters, and nothing is copied to the host.

Rows past offsets[-1] belong to one pseudo-sequence, number B,
which has rows but no partners: the kernels write its zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.ragged_tma import create_ragged_descriptor, load_ragged, to_ragged_indices

from .kept import kept

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@triton.jit
def _tiles_per_sequence(offsets, offsets_stride, index, batch, total, BLOCK: tl.constexpr):
    start = tl.load(offsets + index.to(tl.int64) * offsets_stride, mask=index <= batch, other=0).to(tl.int64)
    end = tl.load(offsets + (index + 1).to(tl.int64) * offsets_stride, mask=index < batch, other=0).to(tl.int64)
    end = tl.where(index == batch, total, end)
    return tl.where(index <= batch, (end - start + BLOCK - 1) // BLOCK, 0).to(tl.int32)


@triton.jit(do_not_specialize=["batch", "total"])
def tile_list_kernel(
    offsets, offsets_stride, tiles, count, batch, total, BLOCK: tl.constexpr, SEQUENCES: tl.constexpr
):  # fmt: skip
    """tiles[i] = (sequence, tile) in the order of the rows; count[0] = their number. SEQUENCES sequences a program."""
    first = tl.program_id(0) * SEQUENCES
    lane = tl.arange(0, SEQUENCES)
    before = tl.zeros([SEQUENCES], dtype=tl.int32)
    for chunk in range(0, first, SEQUENCES):
        before += _tiles_per_sequence(offsets, offsets_stride, chunk + lane, batch, total, BLOCK)
    position = tl.sum(before, 0)
    mine = _tiles_per_sequence(offsets, offsets_stride, first + lane, batch, total, BLOCK)
    place = position + tl.cumsum(mine, 0) - mine
    for tile in range(tl.max(mine, 0)):
        here = tile < mine
        tl.store(tiles + 2 * place.to(tl.int64), first + lane, mask=here)
        tl.store(tiles + 2 * place.to(tl.int64) + 1, tile, mask=here)
        place += 1
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(count, position + tl.sum(mine, 0))


def max_tiles(total: int, batch: int, block: int) -> int:
    """Upper bound of the number of tiles of `batch` sequences and the rest behind them, `total` rows in all."""
    return (total + (batch + 1) * (block - 1)) // block


def _make_tile_list(_, offsets, total, block):
    batch = offsets.numel() - 1
    bound = max_tiles(total, batch, block)
    tiles = torch.empty((max(bound, 1), 2), dtype=torch.int32, device=offsets.device)
    count = torch.empty(1, dtype=torch.int32, device=offsets.device)
    sequences = 128
    tile_list_kernel[(triton.cdiv(batch + 1, sequences),)](
        offsets, offsets.stride(0), tiles, count, batch, total, BLOCK=block, SEQUENCES=sequences, num_warps=4
    )
    return tiles, count, bound


def tile_list(offsets: torch.Tensor, total: int, block: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tiles of `block` rows of every sequence, built on the device without a synchronisation, once per offsets tensor.

    offsets [B+1] int32 or int64, any stride; total = rows of the tensor (>= offsets[-1]). Returns (tiles int32 [bound,
    2] of (sequence, tile index), count int32 [1], bound). Entries past count are unset. Sequence B is the rest past
    offsets[-1].
    """
    return kept(_make_tile_list, None, offsets, total, block)


@triton.jit
def sequence_range(offsets, offsets_stride, sequence, batch, total):
    """(first row, number of rows) of a sequence; the pseudo-sequence `batch` has the rows up to `total`."""
    place = offsets + sequence.to(tl.int64) * offsets_stride
    real = sequence < batch
    start = tl.load(place).to(tl.int64)
    end = tl.load(place + offsets_stride, mask=real, other=0).to(tl.int64)
    return start, (tl.where(real, end, total) - start).to(tl.int32)


@triton.jit
def load_rows(
    base, first, rows, columns, stride, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr
):
    """Rows first + rows of a sequence at `base` [length, HEAD_DIM]; MASKED: zeros from `length` on, nothing read.

    64-bit row arithmetic: `first` is a scalar,
    so the long product is computed once a tile. Columns past HEAD_DIM give 0.
    """
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    if MASKED:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=(first + rows < length)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(first + rows < length)[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def tile_rows(source, start, first, head, rows, columns, stride, length,
              HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr,
              MASKED: tl.constexpr):  # fmt: skip
    """Rows first.. of a sequence, zeros from `length` on: by a descriptor of the whole tensor, in which the sequence
    begins at row `start`, or by (predicated) loads from `source`, the sequence's first row."""
    if TMA:
        place = [tl.cast(first, tl.int32), tl.cast(head, tl.int32), 0]
        tile = load_ragged(source, tl.cast(start, tl.int32), length, place)
        return tl.reshape(tile, [BLOCK, BLOCK_D])
    else:
        return load_rows(source, first, rows, columns, stride, length, HEAD_DIM, BLOCK_D, MASKED)


@triton.jit
def store_rows(base, first, rows, columns, stride, length, value, HEAD_DIM: tl.constexpr):
    """Store a tile into rows first + rows < length of a sequence at `base`; nothing outside it is written."""
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + columns[None, :])
    mask = (first + rows < length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointers, value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(target, base, start, first, head, rows, columns, stride, length, value,
               HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """`store_rows` to `base`, the sequence's first row, or by the descriptor `target` of the whole tensor, in which the
    sequence begins at row `start`."""
    if TMA:
        far, end, row = to_ragged_indices(tl.cast(start, tl.int32), length, tl.cast(first, tl.int32))
        tile = tl.reshape(value.to(base.dtype.element_ty), [1, 1, BLOCK, 1, BLOCK_D])
        target.store([far, end, row, tl.cast(head, tl.int32), 0], tile)
    else:
        store_rows(base, first, rows, columns, stride, length, value, HEAD_DIM)


def precision_of(dtype: torch.dtype) -> str:
    """input_precision of tl.dot: exact fp32 products for fp32 inputs; 16-bit inputs have one way only."""
    return "ieee" if dtype == torch.float32 else "tf32"


def describable(x: torch.Tensor) -> bool:
    """Can the copy engine read x [T, H, D]? 16-bit values, rows and heads 16-byte aligned, 1 <= T <= 2^30."""
    aligned = x.data_ptr() % 16 == 0 and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:2])
    return x.is_cuda and x.element_size() == 2 and aligned and 0 < x.shape[0] <= 2**30


def descriptors(tma: bool | None, block: int, *tensors: torch.Tensor) -> tuple:
    """(use descriptors?, the tensors or descriptors of boxes of `block` rows of one head). tma None: where possible."""
    if tma is None:
        tma = all(describable(x) for x in tensors)
    if not tma:
        return False, *tensors
    return True, *(
        create_ragged_descriptor(x, [block, 1, max(16, triton.next_power_of_2(x.shape[2]))]) for x in tensors
    )
