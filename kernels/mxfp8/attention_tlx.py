"""Jagged attention and GDPA forward on Hopper's 8-bit tensor cores (TLX): both products in E4M3, sums in float32.

The pipeline is that of jfa/v4_tlx.py and gdpa/tlx.py: a TMA producer warp, two consumer warp groups of 64 query rows in
ping-pong, a zigzag list of valid tiles. What 8 bits change:

- Scales of q and k belong to a row and head, those of v to a tile of 128 keys and a channel; all are powers of two. q's
  joins the factor of its score row, k's multiplies the score column, v's the partial product.
- wgmma adds 8-bit products with about 14 bits. Every value product therefore starts from zero and is added to the
  float32 accumulator in registers, key tile by key tile.
- P is quantised in registers. Softmax: exp2(s - running maximum) lies in [0, 1] and is stored times 2^8, below E4M3's
  largest element 448 and with 2^-9 / 2^8 its smallest; the sum of the row carries the same factor. GDPA: |act(s)| <=
  |s| <= |q| |k|, so a power of two per row from the norms keeps every element in range.
- The second product wants values with keys side by side (8-bit operands are K-major), so the quantiser stores v
  transposed, each sequence from a multiple of 128 on, and in the order of keys in which a thread already holds P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase
from triton.tools.tensor_descriptor import TensorDescriptor

from ..tlx_common import (
    GROUP_ROWS,
    kept,
    load_ragged,
    my_tiles,
    num_sms,
    ragged_descriptor,
    tile_entry,
    tile_table,
    zigzag,
)
from ..tlx_pipeline import store_tile
from .hopper_attention import TILE, Operands, padded_starts


@dataclass(frozen=True)
class Config:
    """GROUPS x 64 query rows, kv_stages key/value buffers, q_stages query buffers (two or more of each), registers of a
    consumer thread."""

    groups: int = 2
    kv_stages: int = 2
    q_stages: int = 2
    registers: int = 240
    pingpong: bool = True
    overlap: bool = False  # elementwise work runs beside the value product: more registers
    apart: bool = False  # the score product only after the value product before it: fewer registers


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


@triton.jit
def operand(p, BLOCK_N: tl.constexpr):
    """P [64, BLOCK_N] as the 8-bit operand, columns in the order of triton_kernels.key_order.

    A thread has rows r and r + 8. They are converted apart, so that the four results of one instruction pair are one
    register of the operand as they are.
    """
    ordered = tl.permute(tl.reshape(p, [4, 2, 8, BLOCK_N // 16, 2, 4, 2]), [0, 2, 3, 5, 4, 6, 1])
    low, high = tl.split(tl.reshape(ordered, [4, 8, BLOCK_N, 2]))
    return tl.reshape(tl.permute(tl.join(_packed(low), _packed(high)), [0, 3, 1, 2]), [64, BLOCK_N])


@triton.jit
def _packed(x):
    """E4M3 of x, four to a register. Not pure, so that it stays between the products (see gdpa/tlx.py)."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;"
        " mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [x],
        dtype=tl.float8e4nv,
        is_pure=False,
        pack=4,
    )


@triton.jit
def pinned(x):
    """x, computed before what follows in the program."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def exponent_of(scale):
    """Biased exponent of a power of two, int32; 0 for the smallest scale, which is a subnormal."""
    return scale.to(tl.int32, bitcast=True) >> 23


@triton.jit
def thread_sums(p, BLOCK_N: tl.constexpr):
    """Sums [64, 8] of the columns that a thread holds, every eighth; what threads hold is added up once a tile of
    queries."""
    return tl.sum(tl.reshape(p, [64, BLOCK_N // 8, 8]), 1)


@triton.jit
def row_maximum(s, BLOCK_N: tl.constexpr):
    """Largest of a row, in two chains a thread and row: one chain of dependent instructions would set the pace."""
    return tl.max(tl.max(tl.reshape(s, [64, BLOCK_N // 8, 8]), 1), 1)


@triton.jit
def weights(
    s, k_scale, factor, m, shift, key, kv_size, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, FINE: tl.constexpr
):
    """(P times a power of two, new maximum, row factor of the sums, row sums) of a tile of raw scores s.

    Softmax: factor [64] = scale * log2(e) * q's scale, m the running maximum, the row factor that of the old sums.
    GDPA: factor = scale * q's scale; the row factor takes the power of two back out of this tile's product. m and the
    row sum mean nothing there. k_scale: one a key (FINE), or the tile's, which joins the factor. shift <= 0: exponent
    of this tile's v scale below the largest so far, which P takes over (0 if FINE).
    """
    if FINE:
        s = s * k_scale[None, :]
    else:
        factor = factor * k_scale
    if ACTIVATION == "softmax":
        factor = tl.maximum(factor, 1.1754944e-38)  # scales of zeros may underflow, and -inf times 0 is no mask
        if key + BLOCK_N > kv_size:
            s = tl.where((key + tl.arange(0, BLOCK_N))[None, :] < kv_size, s, float("-inf"))
        m_new = tl.maximum(m, row_maximum(s, BLOCK_N) * factor)
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
        if FINE:
            p = tl.math.exp2(s * factor[:, None] - (reference - 8.0)[:, None])
            total = thread_sums(p, BLOCK_N)
        else:
            p = tl.math.exp2(s * factor[:, None] - (reference - (8 + shift).to(tl.float32))[:, None])
            total = thread_sums(p, BLOCK_N) * ((127 - shift) << 23).to(tl.float32, bitcast=True)
        return p, m_new, tl.math.exp2(m - reference), total
    else:
        top = row_maximum(tl.abs(s), BLOCK_N) * tl.abs(factor)
        exponent = (top.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -60), 100)
        up = ((134 - exponent + shift) << 23).to(tl.float32, bitcast=True)  # |P| <= top < 2^(exponent + 1): below 2^8
        square = factor * factor
        if ACTIVATION == "gelu_tanh":
            a = 0.7978845608028654 * factor
            b = 0.7978845608028654 * 0.044715 * factor * square
            h = s * (0.5 * factor * up)[:, None]
            p = tl.fma(h, _tanh(s * tl.fma(s * s, b[:, None], a[:, None])), h)
        elif ACTIVATION == "silu":
            h = s * (0.5 * factor * up)[:, None]
            p = tl.fma(h, _tanh(s * (0.5 * factor)[:, None]), h)
        elif ACTIVATION == "gelu_taylor6":
            y = s * s
            c2 = 0.3989422804014327 * square * up
            c4 = -0.06649038006690545 * square * square * up
            c6 = 0.009973557010035818 * square * square * square * up
            h = s * (0.5 * factor * up)[:, None]
            p = tl.fma(tl.fma(tl.fma(y, c6[:, None], c4[:, None]), y, c2[:, None]), y, h)
        else:
            p = tl.maximum(s * (factor * up)[:, None], 0.0)
        return p, m, ((120 + exponent) << 23).to(tl.float32, bitcast=True), tl.zeros([64, 8], tl.float32)


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def added(acc, part, v_scale, row_factor, fade, ACTIVATION: tl.constexpr, FINE: tl.constexpr):
    """The accumulator with one key tile's product: the promotion to float32. fade: what the unit of the accumulator,
    the largest v scale so far, has grown by (1 if FINE); softmax has it in its row factor."""
    if FINE:
        part = part * v_scale[None, :]
    if ACTIVATION == "softmax":
        return acc * row_factor[:, None] + part
    else:
        if not FINE:
            if fade != 1.0:
                acc = acc * fade
        return acc + part * row_factor[:, None]


@triton.jit
def tile_scales(k_scale, v_scale, tile, head, k_stride, v_stride, v_top):
    """Of a tile: k scale, new largest exponent of v's, that of its own below it, what the unit has grown by."""
    place = tile.to(tl.int64)
    ks = tl.load(k_scale + place * k_stride + head)
    exponent = exponent_of(tl.load(v_scale + place * v_stride + head))
    new_top = tl.maximum(v_top, exponent)
    fade = (tl.maximum(v_top - new_top + 127, 0) << 23).to(tl.float32, bitcast=True)
    return ks, new_top, tl.maximum(exponent - new_top, -32), fade


@triton.jit
def row_factor_of(q_scale, q_first, q_size, row, head, q_stride, scale, ACTIVATION: tl.constexpr):
    """`factor` of `weights` for 64 query rows from `row` on."""
    rows = row + tl.arange(0, 64)
    found = tl.load(q_scale + head.to(tl.int64) * q_stride + q_first + rows, mask=rows < q_size, other=0.0) * scale
    if ACTIVATION == "softmax":
        found *= 1.4426950408889634
    return found


@triton.jit
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


def padded_table(q_offsets, kv_offsets, q_rows: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`tile_table` whose last column is the first padded row of the tile's keys and values."""
    table, count = tile_table(q_offsets, kv_offsets, q_rows, block_rows)
    starts = padded_starts(kv_offsets)
    sequence = torch.searchsorted(kv_offsets.to(torch.int32), table[:, 2].contiguous(), right=True) - 1
    table = table.clone()
    table[:, 7] = starts[sequence.clamp_(0, kv_offsets.numel() - 1)].to(torch.int32)
    return table, count


def forward_with(
    config: Config, operands: Operands, q_offsets, kv_offsets, *, activation: str, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [Tq, H, D] of `dtype`, lse float32 [H, Tq]; lse is empty for GDPA). activation "softmax" or GDPA's."""
    q, k, v = operands.q, operands.k, operands.v
    rows, heads, dim = q.shape
    softmax, fine = activation == "softmax", operands.fine
    out = torch.empty((rows, heads, dim), dtype=dtype, device=q.device)
    lse = torch.empty((heads, rows if softmax else 0), dtype=torch.float32, device=q.device)
    if not rows or not k.shape[0]:
        return out.zero_(), lse.fill_(float("inf"))
    table, count = kept(padded_table, q_offsets, kv_offsets, rows, GROUP_ROWS * config.groups)
    attention8_kernel[(min(num_sms(q.device), table.shape[0] * heads),)](
        ragged_descriptor(q, GROUP_ROWS),
        ragged_descriptor(k, TILE),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [dim, TILE]),
        ragged_descriptor(out, GROUP_ROWS),
        operands.q_scale,
        operands.k_scale,
        operands.v_scale,
        lse,
        operands.q_scale.stride(0),
        operands.k_scale.stride(0),
        operands.v_scale.stride(0),
        lse.stride(0),
        table,
        count,
        heads,
        scale,
        HEAD_DIM=dim,
        GROUPS=config.groups,
        KV_STAGES=config.kv_stages,
        Q_STAGES=config.q_stages,
        REGISTERS=config.registers,
        PINGPONG=config.pingpong and config.groups == 2,
        APART=config.apart,
        OVERLAP=config.overlap and not fine,
        ACTIVATION=activation,
        FINE=fine,
        num_warps=4,
        num_stages=1,
    )
    return out, lse
