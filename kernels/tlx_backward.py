"""Backward of jagged attention and of GDPA on Hopper: the lists of work and the launch of tlx_backward_kernel.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .tlx_backward_kernel import backward_kernel, zero_kernel
from .tlx_common import kept, num_sms, packed_heads, ragged_descriptor

KEY_ROWS = 128
QUERY_ROWS = 64


@dataclass(frozen=True)
class Config:
    """Buffers of (q, dO), k and v (k: at least 2); registers a thread of the second consumer (the first takes the
    rest) and of producer and senders.

    resident: shared queries, at most QUERY_ROWS, stay on chip with their dQ; a program takes all key tiles of its
    (sequence, head). fold_scale: dS carries the scale of the scores (bf16, which loses nothing by it). chunks: parts of
    dQ pass through shared memory in the order of the registers that hold them.
    """

    q_stages: int = 2
    k_stages: int = 2
    v_stages: int = 1
    resident: bool = False
    fold_scale: bool = True
    chunks: bool = False
    registers: int = 240
    spare: int = 24


def default_config(dense_rows: int | None) -> Config:
    """By what every sequence of a call shares, never by a batch's lengths. Chosen on an H200 (bf16, H = 4, D = 128;
    jfa/TUNING.md).
    """
    if dense_rows is not None and dense_rows <= QUERY_ROWS:
        return Config(q_stages=1, v_stages=2, resident=True)
    return Config()


def unit_table(q_offsets, kv_offsets, q_rows: int, kv_rows: int) -> torch.Tensor:
    """int32 [B + 2, 8]: (first q row, q rows, first kv row, kv rows, first output row), the most pairs first.

    q_offsets None: q_rows dense queries shared by every sequence; their output rows are one block a sequence. The
    last two units are the rows past offsets[-1] of either side: queries without keys and keys without queries, whose
    gradients are zero.
    """
    batch = kv_offsets.numel() - 1
    kv_first, kv_size = kv_offsets[:-1].long(), (kv_offsets[1:] - kv_offsets[:-1]).long()
    if q_offsets is None:
        q_first = torch.zeros_like(kv_first)
        q_size = torch.full_like(kv_first, q_rows)
        out_first = torch.arange(batch, device=kv_offsets.device) * q_rows
        q_end = torch.zeros_like(kv_offsets[-1:]).long()
        q_rest = torch.zeros_like(q_end)
    else:
        q_first, q_size = q_offsets[:-1].long(), (q_offsets[1:] - q_offsets[:-1]).long()
        out_first = q_first
        q_end = q_offsets[-1:].long()
        q_rest = q_rows - q_end
    kv_end = kv_offsets[-1:].long()
    zero = torch.zeros_like(kv_end)
    order = torch.argsort(q_size * kv_size, descending=True, stable=True)
    rows = [
        torch.cat([q_first[order], q_end, zero]),
        torch.cat([q_size[order], q_rest, zero]),
        torch.cat([kv_first[order], zero, kv_end]),
        torch.cat([kv_size[order], zero, kv_rows - kv_end]),
        torch.cat([out_first[order], q_end, zero]),
    ]
    table = torch.zeros((batch + 2, 8), dtype=torch.int32, device=kv_offsets.device)
    table[:, :5] = torch.stack(rows, 1)
    return table


def unit_list(q_offsets, kv_offsets, q_rows: int, kv_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Units as a table of backward_tiles_kernel, the most pairs first: (int32 [B + 2, 8], int32 [1] = B + 2).

    Columns: first kv row, kv rows, first q row, q rows, first output row, key tiles before it, its key tiles, its
    first counter.
    """
    units = unit_table(q_offsets, kv_offsets, q_rows, kv_rows).long()
    tiles = (units[:, 3] + (KEY_ROWS - 1)) // KEY_ROWS
    # Counters of a sequence begin where no other sequence's, in whatever order they lie in memory, can reach.
    by_rows = torch.argsort(units[:, 4], stable=True)
    place = torch.empty_like(by_rows)
    place[by_rows] = torch.arange(by_rows.numel(), device=by_rows.device)
    columns = [units[:, 2], units[:, 3], units[:, 0], units[:, 1], units[:, 4], torch.cumsum(tiles, 0) - tiles, tiles]
    rows = torch.stack([*columns, units[:, 4] // QUERY_ROWS + place], 1).to(torch.int32)
    return rows.contiguous(), torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


def tile_list(q_offsets, kv_offsets, q_rows: int, kv_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of KEY_ROWS keys, those with the most queries first, as (table int32 [slots, 8], their number int32 [1]).

    The rows of unit_list, one a tile. slots is an upper bound that follows from shapes alone.
    """
    rows, _ = unit_list(q_offsets, kv_offsets, q_rows, kv_rows)
    rows = rows[torch.argsort(rows[:, 3], descending=True, stable=True)]
    ends = torch.cumsum(rows[:, 6], 0, dtype=torch.int32)
    rows[:, 5] = ends - rows[:, 6]
    slots = max((kv_rows + rows.shape[0] * (KEY_ROWS - 1)) // KEY_ROWS, 1)
    index = torch.searchsorted(ends, torch.arange(slots, dtype=torch.int32, device=ends.device), right=True)
    return rows[index.clamp_(max=rows.shape[0] - 1)].contiguous(), ends[-1:]


def backward_with(
    config: Config, do, q, k, v, q_offsets, kv_offsets, *, activation: str, scale: float, lse=None, delta=None
):
    """(dq, dk, dv). activation "softmax" needs lse and delta = rowsum(dO o), float32 [H, rows]. Dense q: dq summed
    over the batch.
    """
    heads, head_dim = q.shape[1:]
    dense = q_offsets is None
    do = do.reshape(-1, heads, head_dim)
    q, k, v, do = packed_heads(q), packed_heads(k), packed_heads(v), packed_heads(do)
    rows = do.shape[0]
    dq = torch.empty((0 if dense else rows, heads, head_dim), dtype=q.dtype, device=q.device)
    # The sums of dQ: a program's own (resident), a query tile's or, for many shared queries, a sequence's.
    programs = num_sms(q.device)
    chunks = config.chunks and not dense
    slots = rows // QUERY_ROWS + kv_offsets.numel() + 2  # query tiles, whatever the lengths
    sum_rows = programs * q.shape[0] if config.resident else slots * QUERY_ROWS if chunks else rows
    make = torch.zeros if config.resident else torch.empty
    sums = make((sum_rows, heads, head_dim), dtype=torch.float32, device=q.device)
    dk, dv = (
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
    )
    if not rows or not k.shape[0]:  # a tensor without rows has no address that a descriptor could hold
        for gradient in (dq, sums, dk, dv):
            gradient.zero_()
    else:
        units = kept(unit_table, q_offsets, kv_offsets, q.shape[0], k.shape[0])
        build = unit_list if config.resident else tile_list
        table, count = kept(build, q_offsets, kv_offsets, q.shape[0], k.shape[0])
        counters = torch.zeros((2 * heads, slots), dtype=torch.int32, device=q.device)
        lse = sums if lse is None else lse
        backward_kernel[(min(programs, table.shape[0] * heads),)](
            ragged_descriptor(q, QUERY_ROWS),
            ragged_descriptor(do, QUERY_ROWS),
            ragged_descriptor(k, 64),
            ragged_descriptor(v, 64),
            ragged_descriptor(dk, 64),
            ragged_descriptor(dv, 64),
            ragged_descriptor(do if dense else dq, QUERY_ROWS, head_dim // 2),
            ragged_descriptor(sums, QUERY_ROWS, head_dim // 2),
            lse,
            lse if delta is None else delta,
            lse.stride(0),
            table,
            count,
            counters,
            counters.stride(0),
            heads,
            scale,
            HEAD_DIM=head_dim,
            Q_STAGES=config.q_stages,
            K_STAGES=config.k_stages,
            V_STAGES=config.v_stages,
            RESIDENT=config.resident,
            REGISTERS=config.registers,
            SPARE=config.spare,
            ACTIVATION=activation,
            DIRECT=not dense,
            CHUNKS=chunks,
            FOLD=config.fold_scale and q.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=1,
        )
        width = heads * head_dim
        if not config.resident:
            zero_kernel[(units.shape[0], 16)](
                sums if dense else dq, units, width, COLUMNS=triton.next_power_of_2(width), num_warps=8
            )
    if dense:
        dq = sums.view(-1, q.shape[0], heads, head_dim).sum(0).to(q.dtype)
    return dq, dk, dv
