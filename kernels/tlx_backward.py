"""Backward of jagged attention and of GDPA on Hopper with explicit warp specialisation: one kernel, five GEMMs.

Source: for large batch x heads a backward without sequence parallelism wins. Here one persistent program owns a
(sequence, head): it walks that pair's key tiles (128 rows) and, inside, its query tiles (64 rows). dK and dV stay in
registers for a key tile; dQ is summed over key tiles in FP32 by the owner alone, so that there are no atomics and the
order of the sum is fixed.

A producer warp streams q, dO (two buffers) and k, v through TMA. Two consumer warp groups own 64 key rows each:
    S^T = K Q^T, dP^T = V dO^T, then P and dS in registers, dV += P^T dO, dK += dS^T Q.
dS goes to shared memory, where each group reads both halves for its 64 columns of dQ = dS K. Ragged ends load as
zeros: an
activation's P and dS vanish there by themselves; softmax masks the last key tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .tlx_activations import value_and_slope, value_factor
from .tlx_backward_tiles import backward_tiles_kernel, finish_kernel
from .tlx_common import (
    add_ragged,
    kept,
    load_ragged,
    my_tiles,
    num_sms,
    packed_heads,
    ragged_descriptor,
    store_ragged,
    zigzag,
)

KEY_ROWS = 128
QUERY_ROWS = 64


@dataclass(frozen=True)
class Config:
    """q_stages buffers of (q, dO); registers per consumer thread."""

    q_stages: int = 2
    registers: int = 240
    scheme: str = "owner"
    k_stages: int = 2
    v_stages: int = 1
    resident: bool = False
    spare: int = 24
    owner: bool = False
    pingpong: int = 0
    lean: bool = False
    final: bool = False


@triton.jit
def bulk_writes_done():
    """Wait until this thread's bulk stores and reductions are complete, not merely read out of shared memory."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def backward_kernel(
    desc_q,
    desc_do,
    desc_k,
    desc_v,
    desc_dk,
    desc_dv,
    desc_dq,
    desc_sums,
    lse,
    delta,
    stat_stride,
    units,
    num_units,
    H,
    scale,
    HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DIRECT: tl.constexpr,
):
    KEYS: tl.constexpr = 64  # key rows of a consumer group
    TILE: tl.constexpr = 128
    QUERIES: tl.constexpr = 64
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    mine = my_tiles(num_units * H, program, programs)

    q_buffers = tlx.local_alloc((1, 1, QUERIES, HEAD_DIM), dtype, Q_STAGES)
    do_buffers = tlx.local_alloc((1, 1, QUERIES, HEAD_DIM), dtype, Q_STAGES)
    k_buffers = tlx.local_alloc((1, 1, KEYS, HEAD_DIM), dtype, 2)
    v_buffers = tlx.local_alloc((1, 1, KEYS, HEAD_DIM), dtype, 2)
    ds_buffers = tlx.local_alloc((KEYS, QUERIES), dtype, 2)
    dq_buffers = tlx.local_alloc((1, 1, QUERIES, HALF), dtype, 2)
    sum_buffers = tlx.local_alloc((1, 1, QUERIES, HALF), tl.float32, 2)
    q_full = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=2)
    kv_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    kv_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            q_count = 0
            kv_count = 0
            for n in range(mine):
                index = zigzag(n, program, programs)
                unit = units + (index // H) * 8
                column = (index % H) * HEAD_DIM
                q_first = tl.load(unit)
                q_size = tl.load(unit + 1)
                kv_first = tl.load(unit + 2)
                kv_size = tl.load(unit + 3)
                for t in range(tl.maximum((kv_size + TILE - 1) // TILE, 1)):
                    tlx.barrier_wait(kv_empty[0], (kv_count & 1) ^ 1)
                    tlx.barrier_expect_bytes(kv_full[0], 2 * 2 * TILE * HEAD_DIM)
                    for g in tl.static_range(2):
                        load_ragged(desc_k, k_buffers[g], kv_full[0], kv_first, kv_size, t * TILE + g * KEYS, column)
                        load_ragged(desc_v, v_buffers[g], kv_full[0], kv_first, kv_size, t * TILE + g * KEYS, column)
                    kv_count += 1
                    for i in range((q_size + QUERIES - 1) // QUERIES):
                        stage, phase = get_bufidx_phase(q_count, Q_STAGES)
                        tlx.barrier_wait(q_empty[stage], phase ^ 1)
                        tlx.barrier_expect_bytes(q_full[stage], 2 * QUERIES * HEAD_DIM)
                        load_ragged(desc_q, q_buffers[stage], q_full[stage], q_first, q_size, i * QUERIES, column)
                        tlx.barrier_expect_bytes(do_full[stage], 2 * QUERIES * HEAD_DIM)
                        load_ragged(
                            desc_do, do_buffers[stage], do_full[stage], tl.load(unit + 4), q_size, i * QUERIES, column
                        )
                        q_count += 1

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            log2_scale = scale * 1.4426950408889634
            q_count = 0
            kv_count = 0
            for n in range(mine):
                index = zigzag(n, program, programs)
                unit = units + (index // H) * 8
                head = index % H
                q_size = tl.load(unit + 1)
                kv_first = tl.load(unit + 2)
                kv_size = tl.load(unit + 3)
                out_first = tl.load(unit + 4)
                tiles = tl.maximum((kv_size + TILE - 1) // TILE, 1)
                for t in range(tiles):
                    tlx.barrier_wait(kv_full[0], kv_count & 1)
                    kv_count += 1
                    dk = tl.zeros([KEYS, HEAD_DIM], tl.float32)
                    dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
                    for i in range((q_size + QUERIES - 1) // QUERIES):
                        stage, phase = get_bufidx_phase(q_count, Q_STAGES)
                        q_tile = tlx.local_reshape(q_buffers[stage], [QUERIES, HEAD_DIM])
                        do_tile = tlx.local_reshape(do_buffers[stage], [QUERIES, HEAD_DIM])
                        k_tile = tlx.local_reshape(k_buffers[cid], [KEYS, HEAD_DIM])
                        v_tile = tlx.local_reshape(v_buffers[cid], [KEYS, HEAD_DIM])
                        tlx.barrier_wait(q_full[stage], phase)
                        s = tlx.async_dot(k_tile, tlx.local_trans(q_tile))
                        tlx.barrier_wait(do_full[stage], phase)
                        dp = tlx.async_dot(v_tile, tlx.local_trans(do_tile))
                        s = tlx.async_dot_wait(1, s)
                        if ACTIVATION == "softmax":
                            queries = i * QUERIES + tl.arange(0, QUERIES)
                            place = head.to(tl.int64) * stat_stride + (out_first + queries)
                            row_lse = tl.load(lse + place, mask=queries < q_size, other=float("inf"))
                            row_delta = tl.load(delta + place, mask=queries < q_size, other=0.0)
                            value = tl.math.exp2(s * log2_scale - (row_lse * 1.4426950408889634)[None, :])
                            if t * TILE + TILE > kv_size:
                                keys = t * TILE + cid * KEYS + tl.arange(0, KEYS)
                                value = tl.where((keys < kv_size)[:, None], value, 0.0)
                            p = value.to(dtype)
                            dp = tlx.async_dot_wait(0, dp)
                            ds = (value * (dp - row_delta[None, :])).to(dtype)
                        else:
                            value, slope = value_and_slope(s, scale, ACTIVATION)
                            p = value.to(dtype)
                            dp = tlx.async_dot_wait(0, dp)
                            ds = (dp * slope).to(dtype)
                        # The other group has read this buffer in the last step: both passed the barrier below since.
                        tlx.local_store(ds_buffers[cid], ds)
                        tlx.fence_async_shared()
                        dv = tlx.async_dot(p, do_tile, dv)
                        dk = tlx.async_dot(ds, q_tile, dk)
                        tlx.named_barrier_wait(9, 256)  # both halves of dS are in shared memory
                        dv = tlx.async_dot_wait(1, dv)
                        dk = tlx.async_dot_wait(0, dk)
                        tlx.barrier_arrive(q_empty[stage], 1)
                        part = tlx.async_dot(
                            tlx.local_trans(ds_buffers[0]),
                            tlx.local_slice(
                                tlx.local_reshape(k_buffers[0], [KEYS, HEAD_DIM]), [0, cid * HALF], [KEYS, HALF]
                            ),
                        )
                        part = tlx.async_dot(
                            tlx.local_trans(ds_buffers[1]),
                            tlx.local_slice(
                                tlx.local_reshape(k_buffers[1], [KEYS, HEAD_DIM]), [0, cid * HALF], [KEYS, HALF]
                            ),
                            part,
                        )
                        part = tlx.async_dot_wait(0, part)
                        tlx.named_barrier_wait(10, 256)  # both groups have read dS
                        part = part * scale
                        tlx.async_descriptor_store_wait(0)  # the staging buffer's previous tile has left
                        column = head * HEAD_DIM + cid * HALF
                        if DIRECT and tiles == 1:
                            tlx.local_store(tlx.local_reshape(dq_buffers[cid], [QUERIES, HALF]), part.to(dtype))
                            tlx.fence_async_shared()
                            store_ragged(desc_dq, dq_buffers[cid], out_first, q_size, i * QUERIES, column)
                        else:
                            tlx.local_store(tlx.local_reshape(sum_buffers[cid], [QUERIES, HALF]), part)
                            tlx.fence_async_shared()
                            if t == 0:
                                store_ragged(desc_sums, sum_buffers[cid], out_first, q_size, i * QUERIES, column)
                            else:
                                add_ragged(desc_sums, sum_buffers[cid], out_first, q_size, i * QUERIES, column)
                        q_count += 1
                    # The next key tile adds to the same rows of dQ: what was written so far must have landed.
                    bulk_writes_done()
                    # Leave through the group's own V tile, which nobody else reads.
                    stage_tile = tlx.local_reshape(v_buffers[cid], [KEYS, HEAD_DIM])
                    row = t * TILE + cid * KEYS
                    tlx.local_store(stage_tile, (dv * value_factor(scale, ACTIVATION)).to(dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dv, v_buffers[cid], kv_first, kv_size, row, head * HEAD_DIM)
                    tlx.async_descriptor_store_wait(0)
                    tlx.local_store(stage_tile, (dk * scale).to(dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dk, v_buffers[cid], kv_first, kv_size, row, head * HEAD_DIM)
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(kv_empty[0], 1)


@triton.jit
def round_kernel(sums, dq, units, width, QUERIES: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr):
    """dq = sums in the output type, for the units whose dQ was summed over several key tiles."""
    unit = units + tl.program_id(0) * 8
    size = tl.load(unit + 1)
    first = tl.load(unit + 4).to(tl.int64)
    if tl.load(unit + 3) > TILE:
        columns = tl.arange(0, COLUMNS)[None, :]
        for row in range(tl.program_id(1) * 8, size, tl.num_programs(1) * 8):
            rows = row + tl.arange(0, 8)[:, None]
            keep = (rows < size) & (columns < width)
            value = tl.load(sums + (first + row) * width + (rows - row) * width + columns, mask=keep, other=0.0)
            tl.store(
                dq + (first + row) * width + (rows - row) * width + columns, value.to(dq.dtype.element_ty), mask=keep
            )


TILES = Config(scheme="tiles")
DEFAULT = Config()


def default_config(dense_rows: int | None) -> Config:
    """By what every sequence of a call shares, never by a batch's lengths."""
    return Config() if dense_rows is not None and dense_rows <= QUERY_ROWS else DEFAULT


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
    sums = torch.empty((rows, heads, head_dim), dtype=torch.float32, device=q.device)
    dk, dv = (
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
    )
    if not rows or not k.shape[0]:  # a tensor without rows has no address that a descriptor could hold
        for gradient in (dq, sums, dk, dv):
            gradient.zero_()
    else:
        units = kept(unit_table, q_offsets, kv_offsets, q.shape[0], k.shape[0])
        statistics = sums if lse is None else lse
        launch = launch_tiles if config.scheme == "tiles" else launch_owner
        launch(
            config,
            do,
            q,
            k,
            v,
            dq,
            dk,
            dv,
            sums,
            q_offsets,
            kv_offsets,
            units,
            activation,
            scale,
            statistics,
            statistics if delta is None else delta,
        )
    if dense:
        dq = sums.view(-1, q.shape[0], heads, head_dim).sum(0).to(q.dtype)
    return dq, dk, dv


def launch_owner(config, do, q, k, v, dq, dk, dv, sums, q_offsets, kv_offsets, units, activation, scale, lse, delta):
    """backward_kernel over (sequence, head) owners."""
    heads, head_dim = q.shape[1:]
    dense = q_offsets is None
    backward_kernel[(min(num_sms(q.device), units.shape[0] * heads),)](
        ragged_descriptor(q, QUERY_ROWS),
        ragged_descriptor(do, QUERY_ROWS),
        ragged_descriptor(k, 64),
        ragged_descriptor(v, 64),
        ragged_descriptor(dk, 64),
        ragged_descriptor(dv, 64),
        ragged_descriptor(do if dense else dq, QUERY_ROWS, head_dim // 2),
        ragged_descriptor(sums, QUERY_ROWS, head_dim // 2),
        lse,
        delta,
        lse.stride(0),
        units,
        units.shape[0],
        heads,
        scale,
        HEAD_DIM=head_dim,
        Q_STAGES=config.q_stages,
        REGISTERS=config.registers,
        ACTIVATION=activation,
        DIRECT=not dense,
        num_warps=4,
        num_stages=1,
    )
    if not dense:
        width = heads * head_dim
        round_kernel[(units.shape[0], 16)](
            sums,
            dq,
            units,
            width,
            QUERIES=QUERY_ROWS,
            TILE=KEY_ROWS,
            COLUMNS=triton.next_power_of_2(width),
            num_warps=8,
        )


def launch_tiles(config, do, q, k, v, dq, dk, dv, sums, q_offsets, kv_offsets, units, activation, scale, lse, delta):
    """backward_tiles_kernel over key tiles."""
    heads, head_dim = q.shape[1:]
    dense = q_offsets is None
    build = unit_list if config.owner else tile_list
    table, count = kept(build, q_offsets, kv_offsets, q.shape[0], k.shape[0])
    slots = do.shape[0] // QUERY_ROWS + units.shape[0] + 1
    counters = torch.zeros((2 * heads, slots), dtype=torch.int32, device=q.device)
    backward_tiles_kernel[(min(num_sms(q.device), table.shape[0] * heads),)](
        ragged_descriptor(q, QUERY_ROWS),
        ragged_descriptor(do, QUERY_ROWS),
        ragged_descriptor(k, 64),
        ragged_descriptor(v, 64),
        ragged_descriptor(dk, 64),
        ragged_descriptor(dv, 64),
        ragged_descriptor(do if dense else dq, QUERY_ROWS, head_dim // 2),
        ragged_descriptor(sums, QUERY_ROWS, head_dim // 2),
        lse,
        delta,
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
        FINAL=config.final and not dense,
        OWNER=config.owner,
        PINGPONG=config.pingpong,
        LEAN=config.lean,
        num_warps=4,
        num_stages=1,
    )
    width = heads * head_dim
    finish_kernel[(units.shape[0], 16)](
        sums,
        sums if dense else dq,
        units,
        width,
        TILE=KEY_ROWS,
        COLUMNS=triton.next_power_of_2(width),
        DENSE=dense,
        FINAL=config.final,
        num_warps=8,
    )
