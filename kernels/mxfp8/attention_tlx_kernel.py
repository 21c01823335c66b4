"""The pipeline of 8-bit attention on Hopper in TLX: a producer warp, two consumer warp groups, a zigzag list of tiles.

As in jfa/v4_tlx.py and gdpa/tlx.py, with values that come transposed (8-bit operands are K-major) from their sequence's
padded start, and scales loaded beside the tiles. attention_tlx_tile.py holds the arithmetic of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from ..tlx_common import load_ragged, my_tiles, tile_entry, zigzag
from ..tlx_pipeline import store_tile
from .attention_tlx_tile import added, operand, pinned, row_factor_of, tile_scales, weights


@triton.jit
def stream(
    desc_q,
    desc_k,
    desc_v,
    q_buffers,
    k_buffers,
    v_buffers,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    table,
    total,
    mine,
    H,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_STAGES: tl.constexpr,
    Q_STAGES: tl.constexpr,
):
    """The producer; see tlx_pipeline.stream_tiles. Values come transposed, from their sequence's padded start."""
    ROWS: tl.constexpr = 64
    BLOCK_M: tl.constexpr = ROWS * GROUPS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    k_count = 0
    v_count = 0
    for i in range(mine + 1):
        index = tl.minimum(zigzag(tl.minimum(i, tl.maximum(mine - 1, 0)), program, programs), tl.maximum(total - 1, 0))
        q_first, q_size, kv_first, kv_size, _, head, row = tile_entry(table, index, H, BLOCK_M)
        padded_first = tl.load(table + (index // H) * 8 + 7)
        column = head * HEAD_DIM
        stage, phase = get_bufidx_phase(i, Q_STAGES)
        for g in tl.static_range(GROUPS):
            place = stage * GROUPS + g
            tlx.barrier_wait(q_empty[place], phase ^ 1)
            tlx.barrier_expect_bytes(q_full[place], ROWS * HEAD_DIM)
            load_ragged(desc_q, q_buffers[place], q_full[place], q_first, q_size, row + g * ROWS, column)
        blocks = tl.maximum((kv_size + BLOCK_N - 1) // BLOCK_N, 1)
        if i == mine:
            blocks = 1
        for j in range(blocks):
            stage, phase = get_bufidx_phase(k_count, KV_STAGES)
            tlx.barrier_wait(k_empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[stage], BLOCK_N * HEAD_DIM)
            load_ragged(desc_k, k_buffers[stage], k_full[stage], kv_first, kv_size, j * BLOCK_N, column)
            k_count += 1
            if i < mine:
                stage, phase = get_bufidx_phase(v_count, KV_STAGES)
                tlx.barrier_wait(v_empty[stage], phase ^ 1)
                tlx.barrier_expect_bytes(v_full[stage], BLOCK_N * HEAD_DIM)
                tlx.async_descriptor_load(
                    desc_v, v_buffers[stage], [column, padded_first + j * BLOCK_N], v_full[stage]
                )  # fmt: skip
                v_count += 1


@triton.jit
def take_turn(CONSUMER: tl.constexpr, PINGPONG: tl.constexpr):
    """Wait for this consumer's turn at the tensor cores."""
    if PINGPONG:
        if CONSUMER == 0:
            tlx.named_barrier_wait(9, 256)
        else:
            tlx.named_barrier_wait(10, 256)


@triton.jit
def pass_turn(CONSUMER: tl.constexpr, PINGPONG: tl.constexpr):
    """Give the turn to the other consumer."""
    if PINGPONG:
        if CONSUMER == 0:
            tlx.named_barrier_arrive(10, 256)
        else:
            tlx.named_barrier_arrive(9, 256)


@triton.jit
def score_product(q_buffer, k_buffer, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """q k^T of the elements, in flight."""
    return tlx.async_dot(
        tlx.local_reshape(q_buffer, [64, HEAD_DIM]), tlx.local_trans(tlx.local_reshape(k_buffer, [BLOCK_N, HEAD_DIM]))
    )


@triton.jit(do_not_specialize=["q_stride", "k_stride", "v_stride", "lse_stride"])
def attention8_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
    q_scale,
    k_scale,
    v_scale,
    lse,
    q_stride,
    k_stride,
    v_stride,
    lse_stride,
    table,
    count,
    H,
    scale,
    HEAD_DIM: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_STAGES: tl.constexpr,
    Q_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    PINGPONG: tl.constexpr,
    APART: tl.constexpr,
    OVERLAP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FINE: tl.constexpr,
):
    tl.static_assert(KV_STAGES > 1 and Q_STAGES > 1, "consumers wait for the next keys before they free a buffer")
    ROWS: tl.constexpr = 64
    BLOCK_N: tl.constexpr = 128
    BLOCK_M: tl.constexpr = ROWS * GROUPS
    low: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count) * H
    mine = my_tiles(total, program, programs)

    q_buffers = tlx.local_alloc((1, 1, ROWS, HEAD_DIM), low, GROUPS * Q_STAGES)
    k_buffers = tlx.local_alloc((1, 1, BLOCK_N, HEAD_DIM), low, KV_STAGES)
    v_buffers = tlx.local_alloc((HEAD_DIM, BLOCK_N), low, KV_STAGES)
    o_buffers = tlx.local_alloc((1, 1, ROWS, HEAD_DIM), tlx.dtype_of(desc_o), GROUPS)
    q_full = tlx.alloc_barriers(num_barriers=GROUPS * Q_STAGES, arrive_count=1)
    q_empty = tlx.alloc_barriers(num_barriers=GROUPS * Q_STAGES, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    k_empty = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=GROUPS)
    v_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    v_empty = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=GROUPS)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream(
                desc_q,
                desc_k,
                desc_v,
                q_buffers,
                k_buffers,
                v_buffers,
                q_full,
                q_empty,
                k_full,
                k_empty,
                v_full,
                v_empty,
                table,
                total,
                mine,
                H,
                HEAD_DIM,
                BLOCK_N,
                GROUPS,
                KV_STAGES,
                Q_STAGES,
            )

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=GROUPS):
            cid: tl.constexpr = tlx.async_task_replica_id()
            keys = tl.arange(0, BLOCK_N)
            channels = tl.arange(0, HEAD_DIM)
            if PINGPONG:
                if cid == 1:
                    tlx.named_barrier_arrive(9, 256)
            index = tl.minimum(zigzag(0, program, programs), tl.maximum(total - 1, 0))
            q_first, q_size, _, kv_size, out_first, head, row = tile_entry(table, index, H, BLOCK_M)
            first_tile = tl.load(table + (index // H) * 8 + 7) // BLOCK_N
            factor = row_factor_of(q_scale, q_first, q_size, row + cid * ROWS, head, q_stride, scale, ACTIVATION)
            shift = 0
            fade = 1.0
            v_top = 0
            if FINE:
                ks = tl.load(k_scale + head.to(tl.int64) * k_stride + first_tile * BLOCK_N + keys)
            else:
                ks, v_top, shift, _ = tile_scales(k_scale, v_scale, first_tile, head, k_stride, v_stride, 0)
            tlx.barrier_wait(q_full[cid], 0)
            tlx.barrier_wait(k_full[0], 0)
            s = tlx.async_dot_wait(0, score_product(q_buffers[cid], k_buffers[0], HEAD_DIM, BLOCK_N))
            tlx.barrier_arrive(k_empty[0], 1)
            m = tl.zeros([ROWS], tl.float32) - float("inf")
            p, m, alpha, l = weights(s, ks, factor, m, shift, 0, kv_size, BLOCK_N, ACTIVATION, FINE)
            k_count = 1
            v_count = 0
            for i in range(mine):
                q_stage, _ = get_bufidx_phase(i, Q_STAGES)
                acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
                blocks = tl.maximum((kv_size + BLOCK_N - 1) // BLOCK_N, 1)
                v_place = v_scale + first_tile.to(tl.int64) * v_stride + head * HEAD_DIM
                k_place = k_scale + head.to(tl.int64) * k_stride + first_tile * BLOCK_N
                k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                tlx.barrier_wait(k_full[k_stage], k_phase)
                for j in range(1, blocks):
                    k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                    v_stage, v_phase = get_bufidx_phase(v_count, KV_STAGES)
                    if FINE:
                        ks = tl.load(k_place + j * BLOCK_N + keys)
                        vs = tl.load(v_place + channels)
                    else:
                        vs = 1.0
                    p8 = operand(p, BLOCK_N)
                    tlx.barrier_wait(v_full[v_stage], v_phase)
                    take_turn(cid, PINGPONG)
                    if OVERLAP:
                        s = score_product(q_buffers[q_stage * GROUPS + cid], k_buffers[k_stage], HEAD_DIM, BLOCK_N)
                    part = tlx.async_dot(p8, tlx.local_trans(v_buffers[v_stage]))
                    if APART:
                        part = tlx.async_dot_wait(0, part)
                        tlx.barrier_arrive(v_empty[v_stage], 1)
                        acc = added(acc, part, vs, alpha, fade, ACTIVATION, FINE)
                    if not OVERLAP:
                        s = score_product(q_buffers[q_stage * GROUPS + cid], k_buffers[k_stage], HEAD_DIM, BLOCK_N)
                    pass_turn(cid, PINGPONG)
                    new_fade = 1.0
                    if not FINE:
                        ks, v_top, shift, new_fade = tile_scales(
                            k_scale, v_scale, first_tile + j, head, k_stride, v_stride, v_top
                        )  # fmt: skip
                    if OVERLAP:
                        s = tlx.async_dot_wait(1, s)
                        tlx.barrier_arrive(k_empty[k_stage], 1)
                    elif not APART:
                        # The value product is promoted while the score product runs: three tiles of registers, not
                        # four.
                        part = tlx.async_dot_wait(1, part)
                        tlx.barrier_arrive(v_empty[v_stage], 1)
                        acc = added(acc, part, vs, alpha, fade, ACTIVATION, FINE)
                    if not OVERLAP:
                        s = tlx.async_dot_wait(0, s)
                        tlx.barrier_arrive(k_empty[k_stage], 1)
                    p, m, new_alpha, row_sum = weights(
                        s, ks, factor, m, shift, j * BLOCK_N, kv_size, BLOCK_N, ACTIVATION, FINE
                    )  # fmt: skip
                    k_count += 1
                    k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                    if OVERLAP:
                        p = pinned(p)
                    tlx.barrier_wait(k_full[k_stage], k_phase)
                    if OVERLAP:
                        part = tlx.async_dot_wait(0, part)
                        tlx.barrier_arrive(v_empty[v_stage], 1)
                        acc = added(acc, part, vs, alpha, fade, ACTIVATION, FINE)
                    if ACTIVATION == "softmax":
                        l = l * new_alpha[:, None] + row_sum
                        if FINE:
                            alpha = new_alpha
                        else:
                            alpha = new_alpha * new_fade
                    else:
                        alpha = new_alpha
                        fade = new_fade
                    v_place += v_stride
                    v_count += 1
                # Last value product of this tile, together with the first score product of the next one.
                out_row = row + cid * ROWS
                out_size = q_size
                out_column = head * HEAD_DIM
                store_first = out_first
                lse_row = lse + head.to(tl.int64) * lse_stride + store_first
                old_m = m
                old_l = tl.sum(l, 1)
                has_keys = kv_size > 0
                if FINE:
                    vs = tl.load(v_place + channels)
                    unit = 1.0
                else:
                    vs = 1.0
                    unit = tl.where(v_top == 0, 0x400000, v_top << 23).to(tl.float32, bitcast=True)
                index = tl.minimum(zigzag(tl.minimum(i + 1, mine - 1), program, programs), tl.maximum(total - 1, 0))
                q_first, q_size, _, kv_size, out_first, head, row = tile_entry(table, index, H, BLOCK_M)
                first_tile = tl.load(table + (index // H) * 8 + 7) // BLOCK_N
                factor = row_factor_of(q_scale, q_first, q_size, row + cid * ROWS, head, q_stride, scale, ACTIVATION)
                if FINE:
                    ks = tl.load(k_scale + head.to(tl.int64) * k_stride + first_tile * BLOCK_N + keys)
                else:
                    ks, v_top, shift, _ = tile_scales(k_scale, v_scale, first_tile, head, k_stride, v_stride, 0)
                next_stage, next_phase = get_bufidx_phase(i + 1, Q_STAGES)
                k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                v_stage, v_phase = get_bufidx_phase(v_count, KV_STAGES)
                p8 = operand(p, BLOCK_N)
                tlx.barrier_wait(v_full[v_stage], v_phase)
                tlx.barrier_wait(q_full[next_stage * GROUPS + cid], next_phase)
                take_turn(cid, PINGPONG)
                part = tlx.async_dot(p8, tlx.local_trans(v_buffers[v_stage]))
                if APART:
                    part = tlx.async_dot_wait(0, part)
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                    acc = added(acc, part, vs, alpha, fade, ACTIVATION, FINE)
                s = score_product(q_buffers[next_stage * GROUPS + cid], k_buffers[k_stage], HEAD_DIM, BLOCK_N)
                pass_turn(cid, PINGPONG)
                if not APART:
                    part = tlx.async_dot_wait(1, part)
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                    acc = added(acc, part, vs, alpha, fade, ACTIVATION, FINE)
                if ACTIVATION == "softmax":
                    acc = acc * tl.where(old_l > 0, unit / old_l, 0.0)[:, None]
                elif not FINE:
                    acc = acc * unit
                if not has_keys:  # its key tile was another sequence's, whose NaN would survive a weight of zero
                    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
                store_tile(desc_o, o_buffers[cid], acc, store_first, out_size, out_row, out_column, HEAD_DIM)
                if ACTIVATION == "softmax":
                    log_sum = (old_m - 8.0 + tl.math.log2(old_l)) * 0.6931471805599453
                    rows = out_row + tl.arange(0, ROWS)
                    tl.store(lse_row + rows, tl.where(old_l > 0, log_sum, float("inf")), mask=rows < out_size)
                s = tlx.async_dot_wait(0, s)
                tlx.barrier_arrive(k_empty[k_stage], 1)
                tlx.barrier_arrive(q_empty[q_stage * GROUPS + cid], 1)
                m = tl.zeros([ROWS], tl.float32) - float("inf")
                p, m, alpha, l = weights(s, ks, factor, m, shift, 0, kv_size, BLOCK_N, ACTIVATION, FINE)
                fade = 1.0
                k_count += 1
                v_count += 1
            tlx.async_descriptor_store_wait(0)
