"""Backward of jagged attention and of GDPA on Hopper with explicit warp specialisation: one kernel, five GEMMs.

Source: for large batch x heads a backward without sequence parallelism wins. Here tiles of 128 keys are the unit of
work, dealt to persistent programs so that all tiles of a (sequence, head) run side by side: its q, dO and dQ stay in
the L2 cache. (One program a (sequence, head), walking its key tiles, keeps 132 of them going at a time, far more than
L2 holds.) dK and dV stay in registers for a tile; parts of dQ meet in an FP32 sum (tlx_backward_order.py).

A producer warp streams q, dO (two buffers), k (two) and v through TMA, two consumer warp groups multiply
(tlx_backward_consumer.py), two sender warps pass the parts of dQ on. dV and dK leave through the buffers of k and dS
while the next tile begins.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .tlx_backward_consumer import consume
from .tlx_backward_order import entry_of, first_query_tile, place_of, send_dq
from .tlx_common import load_ragged, my_tiles


@triton.jit
def stream(
    desc_q,
    desc_do,
    desc_k,
    desc_v,
    lse,
    delta,
    stat_stride,
    q_buffers,
    do_buffers,
    k_buffers,
    v_buffers,
    lse_buffers,
    delta_buffers,
    q_full,
    do_full,
    q_empty,
    stat_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    table,
    mine,
    H,
    limit,
    factor,
    HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr,
    K_STAGES: tl.constexpr,
    V_STAGES: tl.constexpr,
    RESIDENT: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """The producer: k, then q, dO and what softmax needs of every query tile, and v, in the order of the consumers."""
    KEYS: tl.constexpr = 64
    TILE: tl.constexpr = 128
    QUERIES: tl.constexpr = 64
    q_count = 0
    kv_count = 0
    for n in range(mine):
        kv_first, kv_size, q_first, q_size, out_first, start, tiles, _, index = entry_of(table, n, H, RESIDENT)
        head, first_tile = place_of(index, start, tiles, H, RESIDENT)
        for t in range(tiles if RESIDENT else 1):
            tile = first_tile + t
            column = head * HEAD_DIM
            query_tiles = 1 if RESIDENT else (q_size + QUERIES - 1) // QUERIES
            first = first_query_tile(tile, tiles, query_tiles, limit)
            k_stage, k_phase = get_bufidx_phase(kv_count, K_STAGES)
            tlx.barrier_wait(k_empty[k_stage], k_phase ^ 1)
            tlx.barrier_expect_bytes(k_full[k_stage], 2 * TILE * HEAD_DIM)
            for g in tl.static_range(2):
                load_ragged(
                    desc_k,
                    k_buffers[k_stage * 2 + g],
                    k_full[k_stage],
                    kv_first,
                    kv_size,
                    tile * TILE + g * KEYS,
                    column,
                )
            for i in range(tl.maximum(query_tiles, 1)):
                m = first + i
                m = tl.where(m >= query_tiles, m - query_tiles, m)
                wanted = i < query_tiles
                if RESIDENT:  # one query tile, kept for all key tiles of the sequence
                    wanted = wanted and t == 0
                if wanted:
                    stage, phase = get_bufidx_phase(q_count, Q_STAGES)
                    tlx.barrier_wait(q_empty[stage], phase ^ 1)
                    tlx.barrier_expect_bytes(q_full[stage], 2 * QUERIES * HEAD_DIM)
                    load_ragged(desc_q, q_buffers[stage], q_full[stage], q_first, q_size, m * QUERIES, column)
                    tlx.barrier_expect_bytes(do_full[stage], 2 * QUERIES * HEAD_DIM)
                    load_ragged(desc_do, do_buffers[stage], do_full[stage], out_first, q_size, m * QUERIES, column)
                    if SOFTMAX:
                        queries = m * QUERIES + tl.arange(0, QUERIES)
                        where = head.to(tl.int64) * stat_stride + (out_first + queries)
                        row_lse = tl.load(lse + where, mask=queries < q_size, other=float("inf"))
                        row_delta = tl.load(delta + where, mask=queries < q_size, other=0.0)
                        tlx.local_store(lse_buffers[stage], row_lse * 1.4426950408889634)
                        tlx.local_store(delta_buffers[stage], row_delta * factor)
                        tlx.barrier_arrive(stat_full[stage], 1)
                    q_count += 1
                if i == 0:
                    v_stage, v_phase = get_bufidx_phase(kv_count, V_STAGES)
                    tlx.barrier_wait(v_empty[v_stage], v_phase ^ 1)
                    tlx.barrier_expect_bytes(v_full[v_stage], 2 * TILE * HEAD_DIM)
                    for g in tl.static_range(2):
                        load_ragged(
                            desc_v,
                            v_buffers[v_stage * 2 + g],
                            v_full[v_stage],
                            kv_first,
                            kv_size,
                            tile * TILE + g * KEYS,
                            column,
                        )
            kv_count += 1


@triton.jit(do_not_specialize=["stat_stride", "counter_stride"])
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
    table,
    count,
    counters,
    counter_stride,
    H,
    scale,
    HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr,
    K_STAGES: tl.constexpr,
    V_STAGES: tl.constexpr,
    RESIDENT: tl.constexpr,
    REGISTERS: tl.constexpr,
    SPARE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DIRECT: tl.constexpr,
    FOLD: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Producer, two consumers, two senders. RESIDENT: a sequence has at most one query tile, which stays, and a
    program takes all its key tiles; otherwise key tiles are dealt one by one.
    """
    KEYS: tl.constexpr = 64  # key rows of a consumer group
    QUERIES: tl.constexpr = 64
    HALF: tl.constexpr = HEAD_DIM // 2
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count) * H
    if RESIDENT:
        mine = my_tiles(total, program, programs)
    else:
        mine = (total - program + programs - 1) // programs
    limit = 0 if RESIDENT else programs  # how many tiles may begin at different query tiles

    q_buffers = tlx.local_alloc((1, 1, QUERIES, HEAD_DIM), dtype, Q_STAGES)
    do_buffers = tlx.local_alloc((1, 1, QUERIES, HEAD_DIM), dtype, Q_STAGES)
    k_buffers = tlx.local_alloc((1, 1, KEYS, HEAD_DIM), dtype, 2 * K_STAGES)
    v_buffers = tlx.local_alloc((1, 1, KEYS, HEAD_DIM), dtype, 2 * V_STAGES)
    ds_buffers = tlx.local_alloc((KEYS, QUERIES), dtype, 4)
    dk_buffers = tlx.local_alloc((1, 1, KEYS, HEAD_DIM), dtype, 2, reuse=ds_buffers)  # a group's two
    sum_buffers = tlx.local_alloc((1, 1, QUERIES, HALF), tl.float32, 2)
    dq_buffers = tlx.local_alloc((1, 1, QUERIES, HALF), dtype, 4, reuse=sum_buffers)  # 0 and 2: half as large
    lse_buffers = tlx.local_alloc((QUERIES,), tl.float32, Q_STAGES)
    delta_buffers = tlx.local_alloc((QUERIES,), tl.float32, Q_STAGES)
    q_full = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=1)
    do_full = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_warp_barrier(num_barriers=Q_STAGES, num_warps=4, num_arrivals=2)
    stat_full = tlx.alloc_barriers(num_barriers=Q_STAGES, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=K_STAGES, arrive_count=1)
    k_empty = tlx.alloc_warp_barrier(num_barriers=K_STAGES, num_warps=4, num_arrivals=2)
    v_full = tlx.alloc_barriers(num_barriers=V_STAGES, arrive_count=1)
    v_empty = tlx.alloc_warp_barrier(num_barriers=V_STAGES, num_warps=4, num_arrivals=2)
    ds_full = tlx.alloc_warp_barrier(num_barriers=4, num_warps=4)
    ds_empty = tlx.alloc_warp_barrier(num_barriers=4, num_warps=4)
    sum_full = tlx.alloc_warp_barrier(num_barriers=2, num_warps=4)
    sum_empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            consume(
                desc_dk,
                desc_dv,
                desc_dq,
                q_buffers,
                do_buffers,
                k_buffers,
                v_buffers,
                ds_buffers,
                dk_buffers,
                dq_buffers,
                sum_buffers,
                lse_buffers,
                delta_buffers,
                q_full,
                do_full,
                q_empty,
                stat_full,
                k_full,
                k_empty,
                v_full,
                v_empty,
                ds_full,
                ds_empty,
                sum_full,
                sum_empty,
                table,
                mine,
                H,
                limit,
                scale,
                0,
                HEAD_DIM,
                Q_STAGES,
                K_STAGES,
                V_STAGES,
                RESIDENT,
                ACTIVATION,
                DIRECT,
                FOLD,
                CHUNKS,
            )

        with tlx.async_task(num_warps=4, registers=REGISTERS):
            consume(
                desc_dk,
                desc_dv,
                desc_dq,
                q_buffers,
                do_buffers,
                k_buffers,
                v_buffers,
                ds_buffers,
                dk_buffers,
                dq_buffers,
                sum_buffers,
                lse_buffers,
                delta_buffers,
                q_full,
                do_full,
                q_empty,
                stat_full,
                k_full,
                k_empty,
                v_full,
                v_empty,
                ds_full,
                ds_empty,
                sum_full,
                sum_empty,
                table,
                mine,
                H,
                limit,
                scale,
                1,
                HEAD_DIM,
                Q_STAGES,
                K_STAGES,
                V_STAGES,
                RESIDENT,
                ACTIVATION,
                DIRECT,
                FOLD,
                CHUNKS,
            )

        with tlx.async_task(num_warps=1, registers=SPARE):  # producer
            stream(
                desc_q,
                desc_do,
                desc_k,
                desc_v,
                lse,
                delta,
                stat_stride,
                q_buffers,
                do_buffers,
                k_buffers,
                v_buffers,
                lse_buffers,
                delta_buffers,
                q_full,
                do_full,
                q_empty,
                stat_full,
                k_full,
                k_empty,
                v_full,
                v_empty,
                table,
                mine,
                H,
                limit,
                scale if FOLD else 1.0,
                HEAD_DIM,
                Q_STAGES,
                K_STAGES,
                V_STAGES,
                RESIDENT,
                SOFTMAX,
            )

        with tlx.async_task(num_warps=1, registers=SPARE, replicate=2):
            send_dq(
                desc_dq,
                desc_sums,
                dq_buffers,
                sum_buffers,
                sum_full,
                sum_empty,
                table,
                mine,
                counters,
                counter_stride,
                H,
                limit,
                tlx.async_task_replica_id(),
                DIRECT,
                CHUNKS,
                HEAD_DIM,
                RESIDENT,
            )


@triton.jit
def zero_kernel(out, units, width, COLUMNS: tl.constexpr):
    """Zeros in the rows of out whose queries have no keys, which no tile writes."""
    unit = units + tl.program_id(0) * 8
    size = tl.load(unit + 1)
    keys = tl.load(unit + 3)
    first = tl.load(unit + 4).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    if keys == 0:
        for row in range(tl.program_id(1) * 8, size, tl.num_programs(1) * 8):
            rows = row + tl.arange(0, 8)[:, None]
            place = (first + row) * width + (rows - row) * width + columns
            keep = (rows < size) & (columns < width)
            tl.store(out + place, tl.zeros([8, COLUMNS], out.dtype.element_ty), mask=keep)
