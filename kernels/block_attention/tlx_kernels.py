"""Block attention for Hopper in TLX: a producer warp streams blocks through TMA, two warp groups compute on them.

A persistent program walks the list of 64-row blocks. One unit of its pipeline is a (block, head): the tiles q, k, v
(and dO) of it in one of STAGES slots of shared memory. The producer runs up to STAGES units ahead, so that loads are in
flight whatever the consumers do; the two consumer warp groups take units in turn. Results leave through the tiles they
were computed from (o through q; dv through dO, dk through q, dq through k), and the slot goes back to the producer when
TMA has read them. A consumer has full-barriers of its own, because the units of the other one that pass through the
same slot would otherwise turn a barrier's phase behind its back.

Rotary: a block's tables go to the registers of both consumers and serve all heads. Tiles are read, turned and written
back in the layout of the tensor cores' accumulators, in which both columns of a pair belong to one thread, for
interleaved pairs and for half pairs alike: no value changes its thread, on the way in or on the way out. The tiles are
turned, and dv and dk formed, in loops whose counts are arguments: unrolled, the straight-line code of both consumers
(80 KB) is slower than its loops (TUNING.md).
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from ..tlx_common import load_ragged, store_ragged


@triton.constexpr_function
def tile_layout(width):
    """Who holds what of a tile [64, width]: the accumulator of wgmma over four warps."""
    return tlx.layout(shape=((4, 8, 4), (2, 2, width // 8)), stride=((2, width, 16 * width), (1, 8 * width, 8)))


@triton.constexpr_function
def table_layout(pairs, interleaved):
    """Who holds the angle [64, pairs] of which pair, so that it meets the pair of `tile_layout(2 * pairs)`."""
    if not interleaved:
        return tile_layout(pairs)
    return tlx.layout(shape=((4, 8, 4), (2, pairs // 4)), stride=((1, pairs, 16 * pairs), (8 * pairs, 4)))


@triton.jit
def pairs_of(x, INTERLEAVED: tl.constexpr):
    """The two columns of every pair: [64, D] -> two [64, D / 2]."""
    if INTERLEAVED:
        return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def joined(a, b, INTERLEAVED: tl.constexpr):
    """The inverse of `pairs_of`."""
    if INTERLEAVED:
        return tl.reshape(tl.join(a, b), [a.shape[0], 2 * a.shape[1]])
    else:
        return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def turn_tile(buffer, cos, sin, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Turn a tile of shared memory in place, in float32."""
    tile = tlx.local_reshape(buffer, [64, HEAD_DIM])
    x = tlx.local_load(tile, layout=tile_layout(HEAD_DIM))
    a, b = pairs_of(x, INTERLEAVED)
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    y = joined((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), INTERLEAVED)
    tlx.local_store(tile, y)


@triton.jit
def turned_back(x, cos, sin, ON: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr):
    """A float32 gradient in the frame before the turn, rounded once."""
    if ON:
        a, b = pairs_of(x, INTERLEAVED)
        return joined((a * cos + b * sin).to(DTYPE), (b * cos - a * sin).to(DTYPE), INTERLEAVED)
    else:
        return x.to(DTYPE)


@triton.jit
def block_entry(table, slot):
    """(first row, rows, first row to read, rows to read, row of the block) of a block: rows past the last sequence are
    written but not read.
    """
    entry = table + slot * 8
    row = (slot - tl.load(entry + 4)) * 64
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), row


@triton.jit
def weights(s, keys, scale):
    """Softmax over the first `keys` columns: (exp2 values, row sums). The branch is uniform, for last blocks alone."""
    s = s * (scale * 1.4426950408889634)
    if keys < 64:
        s = tl.where((tl.arange(0, 64) < keys)[None, :], s, float("-inf"))
    p = tl.math.exp2(s - tl.max(s, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit
def head_of(turn, H):
    """The head that this program takes at a turn. Programs begin with different heads: all at the same one would ask
    memory for the same quarter of every row at the same time.
    """
    return (turn + tl.program_id(0)) % H


@triton.jit
def stream(
    descs, tables, buffers, table_buffers, full, empty, table_full, table_empty, table, total, mine, H,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The producer: each block's tables, then its units, dealt to the consumers in turn."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    for n in range(mine):
        _, _, first, size, row = block_entry(table, program + n * programs)
        if ROTARY:  # one buffer: both consumers have taken what was in it
            tlx.barrier_wait(table_empty[0], (n & 1) ^ 1)
            tlx.barrier_expect_bytes(table_full[0], 2 * 4 * 64 * (HEAD_DIM // 2))
            for i in tl.static_range(2):
                load_ragged(tables[i], table_buffers[i], table_full[0], first, size, row, 0)
        for turn in range(H):
            unit = n * H + turn
            stage, phase = get_bufidx_phase(unit, STAGES)
            place = (unit & 1) * STAGES + (unit // 2) % STAGES
            tlx.barrier_wait(empty[stage], phase ^ 1)
            tlx.barrier_expect_bytes(full[place], len(descs) * 2 * 64 * HEAD_DIM)
            column = head_of(turn, H) * HEAD_DIM
            for i in tl.static_range(len(descs)):
                load_ragged(descs[i], buffers[stage * len(descs) + i], full[place], first, size, row, column)


@triton.jit
def forward_kernel(
    desc_q, desc_k, desc_v, desc_o, desc_cos, desc_sin, table, count, H, scale, turns, order,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, REGISTERS: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr,
):  # fmt: skip
    """turns tiles of a unit are turned: their places among q, k, v are the 2-bit digits of order, lowest first."""
    PAIRS: tl.constexpr = HEAD_DIM // 2
    ANGLES: tl.constexpr = table_layout(PAIRS, INTERLEAVED)
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count)
    mine = (tl.maximum(total - program, 0) + programs - 1) // programs

    tiles = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, 3 * STAGES)
    full = tlx.alloc_barriers(num_barriers=2 * STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    table_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    table_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    if ROTARY:
        table_buffers = tlx.local_alloc((1, 1, 64, PAIRS), tl.float32, 2)
    else:
        table_buffers = tiles

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream(
                (desc_q, desc_k, desc_v), (desc_cos, desc_sin), tiles, table_buffers, full, empty, table_full,
                table_empty, table, total, mine, H, HEAD_DIM, STAGES, ROTARY,
            )  # fmt: skip

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            for n in range(mine):
                first, rows, _, size, row = block_entry(table, program + n * programs)
                keys = tl.where(size > 0, size - row, 64)
                cos, sin = 0.0, 0.0
                if ROTARY:
                    tlx.barrier_wait(table_full[0], n & 1)
                    cos = tlx.local_load(tlx.local_reshape(table_buffers[0], [64, PAIRS]), layout=ANGLES)
                    sin = tlx.local_load(tlx.local_reshape(table_buffers[1], [64, PAIRS]), layout=ANGLES)
                    tlx.barrier_arrive(table_empty[0], 1)
                for turn in range((n * H + cid) & 1, H, 2):
                    stage = (n * H + turn) % STAGES
                    place, phase = get_bufidx_phase((n * H + turn) // 2, STAGES)
                    column = head_of(turn, H) * HEAD_DIM
                    q = tlx.local_reshape(tiles[stage * 3], [64, HEAD_DIM])
                    k = tlx.local_reshape(tiles[stage * 3 + 1], [64, HEAD_DIM])
                    v = tlx.local_reshape(tiles[stage * 3 + 2], [64, HEAD_DIM])
                    tlx.barrier_wait(full[cid * STAGES + place], phase)
                    if ROTARY:
                        for i in range(turns):
                            turn_tile(tiles[stage * 3 + ((order >> (2 * i)) & 3)], cos, sin, INTERLEAVED, HEAD_DIM)
                        tlx.fence_async_shared()
                    s = tlx.async_dot(q, tlx.local_trans(k))
                    s = tlx.async_dot_wait(0, s)
                    p, norm = weights(s, keys, scale)
                    o = tlx.async_dot(p.to(dtype), v)
                    o = tlx.async_dot_wait(0, o)
                    o = o * (1.0 / norm)[:, None]
                    tlx.named_barrier_wait(9 + cid, 128)  # the whole group is done with q
                    tlx.local_store(q, o.to(dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_o, tiles[stage * 3], first, rows, row, column)
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(empty[stage], 1)


@triton.jit
def backward_kernel(
    desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, desc_cos, desc_sin, table, count, H, scale, turns,
    order, two,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, REGISTERS: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr,
):  # fmt: skip
    """turns, order: as in forward_kernel. two is 2; the compiler must not know (module text)."""
    PAIRS: tl.constexpr = HEAD_DIM // 2
    ANGLES: tl.constexpr = table_layout(PAIRS, INTERLEAVED)
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count)
    mine = (tl.maximum(total - program, 0) + programs - 1) // programs

    tiles = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, 4 * STAGES)
    full = tlx.alloc_barriers(num_barriers=2 * STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    table_full = tlx.alloc_barriers(num_barriers=1, arrive_count=1)
    table_empty = tlx.alloc_barriers(num_barriers=1, arrive_count=2)
    if ROTARY:
        table_buffers = tlx.local_alloc((1, 1, 64, PAIRS), tl.float32, 2)
    else:
        table_buffers = tiles
    if HEAD_DIM == 64:
        squares = tlx.local_alloc((64, 64), dtype, 4)
    else:  # the two halves of v hold P and dS
        squares = tlx.local_alloc((64, 64), dtype, 8 * STAGES, reuse=tiles)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream(
                (desc_q, desc_k, desc_v, desc_do), (desc_cos, desc_sin), tiles, table_buffers, full, empty,
                table_full, table_empty, table, total, mine, H, HEAD_DIM, STAGES, ROTARY,
            )  # fmt: skip

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            for n in range(mine):
                first, rows, _, size, row = block_entry(table, program + n * programs)
                keys = tl.where(size > 0, size - row, 64)
                cos, sin = 0.0, 0.0
                if ROTARY:
                    tlx.barrier_wait(table_full[0], n & 1)
                    cos = tlx.local_load(tlx.local_reshape(table_buffers[0], [64, PAIRS]), layout=ANGLES)
                    sin = tlx.local_load(tlx.local_reshape(table_buffers[1], [64, PAIRS]), layout=ANGLES)
                    tlx.barrier_arrive(table_empty[0], 1)
                for turn in range((n * H + cid) & 1, H, 2):
                    stage = (n * H + turn) % STAGES
                    place, phase = get_bufidx_phase((n * H + turn) // 2, STAGES)
                    column = head_of(turn, H) * HEAD_DIM
                    q = tlx.local_reshape(tiles[stage * 4], [64, HEAD_DIM])
                    k = tlx.local_reshape(tiles[stage * 4 + 1], [64, HEAD_DIM])
                    v = tlx.local_reshape(tiles[stage * 4 + 2], [64, HEAD_DIM])
                    do = tlx.local_reshape(tiles[stage * 4 + 3], [64, HEAD_DIM])
                    if HEAD_DIM == 64:
                        square = 2 * cid
                    else:
                        square = stage * 8 + 4
                    tlx.barrier_wait(full[cid * STAGES + place], phase)
                    if ROTARY:
                        for i in range(turns):
                            turn_tile(tiles[stage * 4 + ((order >> (2 * i)) & 3)], cos, sin, INTERLEAVED, HEAD_DIM)
                        tlx.fence_async_shared()
                    s = tlx.async_dot(q, tlx.local_trans(k))
                    dp = tlx.async_dot(do, tlx.local_trans(v))
                    s = tlx.async_dot_wait(1, s)
                    p, norm = weights(s, keys, scale)
                    p = p * (1.0 / norm)[:, None]
                    dp = tlx.async_dot_wait(0, dp)
                    # Rows past the end have dO = 0: dp = 0, so ds = 0, and p meets zeros in dv.
                    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(dtype)
                    tlx.named_barrier_wait(9 + cid, 128)  # the whole group is done with v
                    tlx.local_store(squares[square], p.to(dtype))
                    tlx.local_store(squares[square + 1], ds)
                    tlx.fence_async_shared()
                    if ON_V == ON_K:  # dv = P^T dO over dO, then dk = dS^T q over q
                        for i in range(two):
                            place = stage * 4 + 3 - 3 * i
                            own = tlx.local_reshape(tiles[place], [64, HEAD_DIM])
                            g = tlx.async_dot(tlx.local_trans(squares[square + i]), own)
                            g = tlx.async_dot_wait(0, g)
                            tlx.named_barrier_wait(9 + cid, 128)  # ... with this tile
                            tlx.local_store(own, turned_back(g, cos, sin, ON_V, INTERLEAVED, dtype))
                            tlx.fence_async_shared()
                            if i == 0:
                                store_ragged(desc_dv, tiles[place], first, rows, row, column)
                            else:
                                store_ragged(desc_dk, tiles[place], first, rows, row, column)
                        dq = tlx.async_dot(squares[square + 1], k)
                    else:
                        dv = tlx.async_dot(tlx.local_trans(squares[square]), do)
                        dk = tlx.async_dot(tlx.local_trans(squares[square + 1]), q)
                        dv = tlx.async_dot_wait(1, dv)
                        tlx.named_barrier_wait(9 + cid, 128)  # ... with dO
                        tlx.local_store(do, turned_back(dv, cos, sin, ON_V, INTERLEAVED, dtype))
                        tlx.fence_async_shared()
                        store_ragged(desc_dv, tiles[stage * 4 + 3], first, rows, row, column)
                        dq = tlx.async_dot(squares[square + 1], k)
                        dk = tlx.async_dot_wait(1, dk)
                        tlx.named_barrier_wait(9 + cid, 128)  # ... with q
                        tlx.local_store(q, turned_back(dk, cos, sin, ON_K, INTERLEAVED, dtype))
                        tlx.fence_async_shared()
                        store_ragged(desc_dk, tiles[stage * 4], first, rows, row, column)
                    dq = tlx.async_dot_wait(0, dq)
                    tlx.named_barrier_wait(9 + cid, 128)  # ... with k
                    tlx.local_store(k, turned_back(dq, cos, sin, ON_Q, INTERLEAVED, dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dq, tiles[stage * 4 + 1], first, rows, row, column)
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(empty[stage], 1)
