"""The pipeline that TLX attention and GDPA share: what the producer warp streams, how a consumer issues its products.

Tiles come in the zigzag order of tlx_common.py. Keys and values have rings of their own, because a consumer asks for
the first keys of tile i + 1 while it still needs the last values of tile i.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .tlx_common import load_ragged, tile_entry, zigzag


@triton.jit
def first_block(row, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key block that a tile starting at query `row` needs."""
    if WINDOW is None:
        return 0
    else:
        return tl.maximum(row - WINDOW, 0) // BLOCK_N


@triton.jit
def num_blocks(row, kv_size, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many key blocks, from first_block on; at least one, so that every tile runs the same pipeline."""
    last = kv_size
    if WINDOW is not None:
        last = tl.minimum(kv_size, row + BLOCK_M + WINDOW)
    return tl.maximum((last + BLOCK_N - 1) // BLOCK_N - first_block(row, WINDOW, BLOCK_N), 1)


@triton.jit
def stream_tiles(
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
    WINDOW: tl.constexpr,
):
    """The producer: q, k and v of every tile of this program, in the order in which the consumers wait for them."""
    ROWS: tl.constexpr = 64
    BLOCK_M: tl.constexpr = ROWS * GROUPS
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    k_count = 0
    v_count = 0
    # One tile more than there are: the consumers' last look-ahead finds a score product to issue.
    for i in range(mine + 1):
        index = tl.minimum(zigzag(tl.minimum(i, tl.maximum(mine - 1, 0)), program, programs), tl.maximum(total - 1, 0))
        q_first, q_size, kv_first, kv_size, _, head, row = tile_entry(table, index, H, BLOCK_M)
        column = head * HEAD_DIM
        stage, phase = get_bufidx_phase(i, Q_STAGES)
        for g in tl.static_range(GROUPS):
            place = stage * GROUPS + g
            tlx.barrier_wait(q_empty[place], phase ^ 1)
            tlx.barrier_expect_bytes(q_full[place], 2 * ROWS * HEAD_DIM)
            load_ragged(desc_q, q_buffers[place], q_full[place], q_first, q_size, row + g * ROWS, column)
        blocks = num_blocks(row, kv_size, WINDOW, BLOCK_M, BLOCK_N)
        key = first_block(row, WINDOW, BLOCK_N) * BLOCK_N
        if i == mine:
            blocks = 1
        for j in range(blocks):
            stage, phase = get_bufidx_phase(k_count, KV_STAGES)
            tlx.barrier_wait(k_empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(k_full[stage], 2 * BLOCK_N * HEAD_DIM)
            load_ragged(desc_k, k_buffers[stage], k_full[stage], kv_first, kv_size, key + j * BLOCK_N, column)
            k_count += 1
            if i < mine:
                stage, phase = get_bufidx_phase(v_count, KV_STAGES)
                tlx.barrier_wait(v_empty[stage], phase ^ 1)
                tlx.barrier_expect_bytes(v_full[stage], 2 * BLOCK_N * HEAD_DIM)
                load_ragged(desc_v, v_buffers[stage], v_full[stage], kv_first, kv_size, key + j * BLOCK_N, column)
                v_count += 1


@triton.jit
def first_scores(q_buffer, k_buffer, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr):
    """q k^T of the very first tile; there is nothing to overlap it with."""
    scores = tlx.async_dot(
        tlx.local_reshape(q_buffer, [64, HEAD_DIM]), tlx.local_trans(tlx.local_reshape(k_buffer, [BLOCK_N, HEAD_DIM]))
    )
    return tlx.async_dot_wait(0, scores)


@triton.jit
def issue_products(
    q_buffer,
    k_buffer,
    v_buffer,
    p,
    acc,
    CONSUMER: tl.constexpr,
    PINGPONG: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Issue the next q k^T and this block's p v in this consumer's turn -> (scores, acc), both in flight.

    Two consumers share the tensor cores. Taking turns keeps one's products together, so that the other works on its
    scores meanwhile; the turn passes on as soon as the products are issued. Named barriers 9 and 10, all 256 threads.
    """
    if PINGPONG:
        if CONSUMER == 0:
            tlx.named_barrier_wait(9, 256)
        else:
            tlx.named_barrier_wait(10, 256)
    scores = tlx.async_dot(
        tlx.local_reshape(q_buffer, [64, HEAD_DIM]), tlx.local_trans(tlx.local_reshape(k_buffer, [BLOCK_N, HEAD_DIM]))
    )
    acc = tlx.async_dot(p, tlx.local_reshape(v_buffer, [BLOCK_N, HEAD_DIM]), acc)
    if PINGPONG:
        if CONSUMER == 0:
            tlx.named_barrier_arrive(10, 256)
        else:
            tlx.named_barrier_arrive(9, 256)
    return scores, acc


@triton.jit
def store_tile(desc_o, o_buffer, acc, first, size, row, column, HEAD_DIM: tl.constexpr):
    """Send a finished tile [64, HEAD_DIM] to its sequence through shared memory; rows past the end are dropped."""
    tlx.async_descriptor_store_wait(0)  # the buffer's previous tile has left
    tlx.local_store(tlx.local_reshape(o_buffer, [64, HEAD_DIM]), acc.to(tlx.dtype_of(desc_o)))
    tlx.fence_async_shared()
    tlx.async_descriptor_store(desc_o, o_buffer, [1073741824, first + size, 1073741824 - size + row, column])
