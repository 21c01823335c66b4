"""Block attention for Hopper in TLX: a producer warp streams blocks through TMA, two warp groups compute on them.

A persistent program walks the list of 64-row blocks; its two consumer warp groups take a block each, with all of its
heads in turn. One unit of the pipeline is a (block, head): the tiles q, k, v (and dO) of it in one of STAGES slots of
shared memory. The producer runs up to STAGES units ahead, so that loads are in flight whatever the consumers do.
Results leave through the tiles they were computed from (o through q; dv through dO, dk through q, dq through k), and
the slot goes back to the producer when TMA has read them.

Rotary: a block's tables go to the registers of its consumer once and serve all heads. Tiles are read, turned and
written back in the layout of the tensor cores' accumulators, in which both columns of a pair belong to one thread, for
interleaved pairs and for half pairs alike: no value changes its thread, on the way in or on the way out.
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
def stream(
    descs, tables, buffers, table_buffers, full, empty, table_full, table_empty, table, total, mine, H,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, EVICT_FIRST: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """The producer: tables and units of two blocks at a time, in the order in which the consumers reach them."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    unit = 0
    for pair in range((mine + 1) // 2):
        both = tl.minimum(mine - 2 * pair, 2)
        slot0 = program + 2 * pair * programs
        slot1 = tl.minimum(slot0 + programs, total - 1)
        _, _, first0, size0, row0 = block_entry(table, slot0)
        _, _, first1, size1, row1 = block_entry(table, slot1)
        for head in range(H):
            for c in tl.static_range(2):
                first = first0 if c == 0 else first1
                size = size0 if c == 0 else size1
                row = row0 if c == 0 else row1
                if c < both:
                    if ROTARY:
                        if head == 0:  # the tables' one buffer: the other consumer has taken what was in it
                            tlx.barrier_wait(table_empty[1 - c], (pair + 1 + c) & 1)
                            tlx.barrier_expect_bytes(table_full[c], 2 * 4 * 64 * (HEAD_DIM // 2))
                            for i in tl.static_range(2):
                                load_ragged(tables[i], table_buffers[i], table_full[c], first, size, row, 0)
                    stage, phase = get_bufidx_phase(unit, STAGES)
                    place, _ = get_bufidx_phase(pair * H + head, STAGES)
                    tlx.barrier_wait(empty[stage], phase ^ 1)
                    tlx.barrier_expect_bytes(full[c * STAGES + place], len(descs) * 2 * 64 * HEAD_DIM)
                    for i in tl.static_range(len(descs)):
                        tlx.async_descriptor_load(
                            descs[i],
                            buffers[i][stage],
                            [1073741824, first + size, 1073741824 - size + row, head * HEAD_DIM],
                            full[c * STAGES + place],
                            eviction_policy="evict_first" if EVICT_FIRST else "",
                        )
                    unit += 1


@triton.jit
def forward_kernel(
    desc_q, desc_k, desc_v, desc_o, desc_cos, desc_sin, table, count, H, scale,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, REGISTERS: tl.constexpr, EVICT_FIRST: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = HEAD_DIM // 2
    ANGLES: tl.constexpr = table_layout(PAIRS, INTERLEAVED)
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count)
    mine = (tl.maximum(total - program, 0) + programs - 1) // programs

    q_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    k_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    v_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    full = tlx.alloc_barriers(num_barriers=2 * STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    table_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    table_empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    if ROTARY:
        table_buffers = tlx.local_alloc((1, 1, 64, PAIRS), tl.float32, 2)
    else:
        table_buffers = q_buffers

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream(
                (desc_q, desc_k, desc_v), (desc_cos, desc_sin), (q_buffers, k_buffers, v_buffers), table_buffers, full,
                empty, table_full, table_empty, table, total, mine, H, HEAD_DIM, STAGES, EVICT_FIRST, ROTARY,
            )  # fmt: skip

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            base = 0
            for pair in range((mine + 1 - cid) // 2):
                both = tl.minimum(mine - 2 * pair, 2)
                first, rows, _, size, row = block_entry(table, program + (2 * pair + cid) * programs)
                keys = tl.where(size > 0, size - row, 64)
                cos, sin = 0.0, 0.0
                if ROTARY:
                    tlx.barrier_wait(table_full[cid], pair & 1)
                    cos = tlx.local_load(tlx.local_reshape(table_buffers[0], [64, PAIRS]), layout=ANGLES)
                    sin = tlx.local_load(tlx.local_reshape(table_buffers[1], [64, PAIRS]), layout=ANGLES)
                    tlx.barrier_arrive(table_empty[cid], 1)
                for head in range(H):
                    stage, _ = get_bufidx_phase(base + head * both + cid, STAGES)
                    place, phase = get_bufidx_phase(pair * H + head, STAGES)
                    q = tlx.local_reshape(q_buffers[stage], [64, HEAD_DIM])
                    k = tlx.local_reshape(k_buffers[stage], [64, HEAD_DIM])
                    v = tlx.local_reshape(v_buffers[stage], [64, HEAD_DIM])
                    tlx.barrier_wait(full[cid * STAGES + place], phase)
                    if ON_Q:
                        turn_tile(q_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                    if ON_K:
                        turn_tile(k_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                    if ON_Q or ON_K:
                        tlx.fence_async_shared()
                    s = tlx.async_dot(q, tlx.local_trans(k))
                    if ON_V:
                        turn_tile(v_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                        tlx.fence_async_shared()
                    s = tlx.async_dot_wait(0, s)
                    p, norm = weights(s, keys, scale)
                    o = tlx.async_dot(p.to(dtype), v)
                    o = tlx.async_dot_wait(0, o)
                    o = o * (1.0 / norm)[:, None]
                    tlx.named_barrier_wait(9 + cid, 128)  # the whole group is done with q
                    tlx.local_store(q, o.to(dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_o, q_buffers[stage], first, rows, row, head * HEAD_DIM)
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(empty[stage], 1)
                base += both * H


@triton.jit
def backward_kernel(
    desc_q, desc_k, desc_v, desc_do, desc_dq, desc_dk, desc_dv, desc_cos, desc_sin, table, count, H, scale,
    HEAD_DIM: tl.constexpr, STAGES: tl.constexpr, REGISTERS: tl.constexpr, EVICT_FIRST: tl.constexpr,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr,
):  # fmt: skip
    PAIRS: tl.constexpr = HEAD_DIM // 2
    ANGLES: tl.constexpr = table_layout(PAIRS, INTERLEAVED)
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count)
    mine = (tl.maximum(total - program, 0) + programs - 1) // programs

    q_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    k_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    v_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    do_buffers = tlx.local_alloc((1, 1, 64, HEAD_DIM), dtype, STAGES)
    full = tlx.alloc_barriers(num_barriers=2 * STAGES, arrive_count=1)
    empty = tlx.alloc_barriers(num_barriers=STAGES, arrive_count=1)
    table_full = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    table_empty = tlx.alloc_barriers(num_barriers=2, arrive_count=1)
    if ROTARY:
        table_buffers = tlx.local_alloc((1, 1, 64, PAIRS), tl.float32, 2)
    else:
        table_buffers = q_buffers
    if HEAD_DIM == 64:
        ds_buffers = tlx.local_alloc((64, 64), dtype, 2)
    else:
        ds_buffers = q_buffers

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream(
                (desc_q, desc_k, desc_v, desc_do), (desc_cos, desc_sin),
                (q_buffers, k_buffers, v_buffers, do_buffers), table_buffers, full, empty, table_full, table_empty,
                table, total, mine, H, HEAD_DIM, STAGES, EVICT_FIRST, ROTARY,
            )  # fmt: skip

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=2):
            cid: tl.constexpr = tlx.async_task_replica_id()
            base = 0
            for pair in range((mine + 1 - cid) // 2):
                both = tl.minimum(mine - 2 * pair, 2)
                first, rows, _, size, row = block_entry(table, program + (2 * pair + cid) * programs)
                keys = tl.where(size > 0, size - row, 64)
                cos, sin = 0.0, 0.0
                if ROTARY:
                    tlx.barrier_wait(table_full[cid], pair & 1)
                    cos = tlx.local_load(tlx.local_reshape(table_buffers[0], [64, PAIRS]), layout=ANGLES)
                    sin = tlx.local_load(tlx.local_reshape(table_buffers[1], [64, PAIRS]), layout=ANGLES)
                    tlx.barrier_arrive(table_empty[cid], 1)
                for head in range(H):
                    stage, _ = get_bufidx_phase(base + head * both + cid, STAGES)
                    place, phase = get_bufidx_phase(pair * H + head, STAGES)
                    column = head * HEAD_DIM
                    q = tlx.local_reshape(q_buffers[stage], [64, HEAD_DIM])
                    k = tlx.local_reshape(k_buffers[stage], [64, HEAD_DIM])
                    v = tlx.local_reshape(v_buffers[stage], [64, HEAD_DIM])
                    do = tlx.local_reshape(do_buffers[stage], [64, HEAD_DIM])
                    if HEAD_DIM == 64:
                        p_tile = v
                        ds_tile = ds_buffers[cid]
                    else:
                        p_tile = tlx.local_slice(v, [0, 0], [64, 64])
                        ds_tile = tlx.local_slice(v, [0, 64], [64, 64])
                    tlx.barrier_wait(full[cid * STAGES + place], phase)
                    if ON_Q:
                        turn_tile(q_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                    if ON_K:
                        turn_tile(k_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                    if ON_Q or ON_K:
                        tlx.fence_async_shared()
                    s = tlx.async_dot(q, tlx.local_trans(k))
                    if ON_V:
                        turn_tile(v_buffers[stage], cos, sin, INTERLEAVED, HEAD_DIM)
                        tlx.fence_async_shared()
                    dp = tlx.async_dot(do, tlx.local_trans(v))
                    s = tlx.async_dot_wait(1, s)
                    p, norm = weights(s, keys, scale)
                    p = p * (1.0 / norm)[:, None]
                    dp = tlx.async_dot_wait(0, dp)
                    # Rows past the end have dO = 0: dp = 0, so ds = 0, and p meets zeros in dv.
                    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(dtype)
                    tlx.named_barrier_wait(9 + cid, 128)  # the whole group is done with v
                    tlx.local_store(p_tile, p.to(dtype))
                    tlx.local_store(ds_tile, ds)
                    tlx.fence_async_shared()
                    dv = tlx.async_dot(tlx.local_trans(p_tile), do)
                    dk = tlx.async_dot(tlx.local_trans(ds_tile), q)
                    dv = tlx.async_dot_wait(1, dv)
                    tlx.named_barrier_wait(9 + cid, 128)  # ... with dO
                    tlx.local_store(do, turned_back(dv, cos, sin, ON_V, INTERLEAVED, dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dv, do_buffers[stage], first, rows, row, column)
                    dq = tlx.async_dot(ds_tile, k)
                    dk = tlx.async_dot_wait(1, dk)
                    tlx.named_barrier_wait(9 + cid, 128)  # ... with q
                    tlx.local_store(q, turned_back(dk, cos, sin, ON_K, INTERLEAVED, dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dk, q_buffers[stage], first, rows, row, column)
                    dq = tlx.async_dot_wait(0, dq)
                    tlx.named_barrier_wait(9 + cid, 128)  # ... with k
                    tlx.local_store(k, turned_back(dq, cos, sin, ON_Q, INTERLEAVED, dtype))
                    tlx.fence_async_shared()
                    store_ragged(desc_dq, k_buffers[stage], first, rows, row, column)
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(empty[stage], 1)
                base += both * H
