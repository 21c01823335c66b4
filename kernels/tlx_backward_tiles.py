"""Backward of jagged attention and of GDPA on Hopper, key tiles of one (sequence, head) on neighbouring programs.

Source: for large batch x heads a backward without sequence parallelism wins. Here 128-key tiles are the unit of work.
Five products a pair of tiles, as in tlx_backward.py, and the same ragged descriptors, but other roles:

- A producer warp streams q, dO (and lse, delta), k and v.
- Two consumer warp groups own 64 keys each: S^T = K Q^T, dP^T = V dO^T, then dV += P^T dO and dK += dS^T Q. dS goes
  through shared memory, where each group reads both halves for its 64 columns of dQ = dS K. That product lags a query
  tile behind, so that no group waits for the other: one computes scores while the other multiplies.
- Two sender warps pass the parts of dQ on, one for each half of the columns.

The tiles of a (sequence, head) run at the same time, so that its q, dO and dQ stay in the L2 cache. Their parts of dQ
meet in an FP32 sum. Each tile begins at another query tile, and a counter per query tile keeps the order in which
parts are added the same in every run: the result depends on the sequence alone, without waiting for one another.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .tlx_activations import value_and_slope, value_factor
from .tlx_common import add_ragged, load_ragged, my_tiles, store_ragged, zigzag


@triton.jit
def wait_for_count(counter, count):
    """Until `count` parts have been added to a query tile of dQ; then TMA may add the next."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .u32 v;
        AGAIN:
        ld.acquire.gpu.global.u32 v, [$1];
        shfl.sync.idx.b32 v, v, 0, 31, -1;
        setp.lt.u32 p, v, $2;
        @p bra AGAIN;
        fence.proxy.async.global;
        mov.u32 $0, v;
        }""",
        "=r,l,r",
        [counter.to(tl.uint64, bitcast=True), count],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bulk_writes_done():
    """Wait until this thread's bulk stores and reductions are complete, not merely read out of shared memory."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async.global; mov.b32 $0, $1;",
        "=r,r",
        [tl.program_id(0)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def count_up(counter):
    """One part more has been added, says every lane of a sender warp (a choice of one would cost uniform registers)."""
    tl.inline_asm_elementwise(
        "bar.warp.sync -1; red.release.gpu.global.add.u32 [$1], 1; mov.u32 $0, 0;",
        "=r,l",
        [counter.to(tl.uint64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def entry_of(table, n, H, OWNER: tl.constexpr):
    """Row of the table for a program's n-th piece of work, a key tile or with OWNER all key tiles of a (sequence,
    head): first kv row, kv rows, first q row, q rows, first output row, first tile, key tiles, counters, index.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = zigzag(n, program, programs) if OWNER else n * programs + program
    slot = table + (index // H) * 8
    kv_first = tl.load(slot)
    kv_size = tl.load(slot + 1)
    q_first = tl.load(slot + 2)
    q_size = tl.load(slot + 3)
    out_first = tl.load(slot + 4)
    start = tl.load(slot + 5)
    tiles = tl.load(slot + 6)
    counters = tl.load(slot + 7)
    return kv_first, kv_size, q_first, q_size, out_first, start, tiles, counters, index


@triton.jit
def place_of(index, start, tiles, H, OWNER: tl.constexpr):
    """(head, key tile) of a table index; with OWNER the first key tile."""
    if OWNER:
        return index % H, 0
    else:
        place = index - start * H
        head = place // tiles
        return head, place - head * tiles


@triton.jit
def first_query_tile(tile, tiles, query_tiles, limit):
    """Where key tile `tile` begins: spread evenly, so that no two tiles of a sequence want one query tile at a time.

    With fewer query tiles than key tiles that cannot be, and a sequence with more key tiles than programs runs in
    several rounds: both begin at 0 everywhere, and a tile waits for earlier ones only. limit: how many tiles may.
    """
    return tl.where(tiles <= tl.minimum(limit, query_tiles), (tile * query_tiles) // tiles, 0)


@triton.jit
def parts_before(query_tile, first, tile, tiles, query_tiles, limit):
    """How many key tiles add to this query tile before `tile` does; see first_query_tile."""
    begun = ((query_tile + 1) * tiles + query_tiles - 1) // query_tiles  # key tiles that begin at or before it
    turn = tl.where(query_tile >= first, begun - 1 - tile, tiles - 1 - tile + begun)
    return tl.where(tiles <= tl.minimum(limit, query_tiles), turn, tile)


@triton.jit
def last_from(tile, tiles, query_tiles, limit):
    """From which step on `tile` is the last to add: its remaining query tiles have had all others."""
    begin = (tile * query_tiles) // tiles
    before = (tl.where(tile == 0, tiles - 1, tile - 1) * query_tiles) // tiles
    mine = tl.where(tile == 0, query_tiles - before, begin - before)
    alone = tl.where(tile == tiles - 1, 0, query_tiles)
    return tl.where(tiles <= tl.minimum(limit, query_tiles), query_tiles - mine, alone)


@triton.jit
def multiply_dq(
    desc_dq,
    dq_buffers,
    sum_buffers,
    ds_buffers,
    k_buffers,
    ds_full,
    ds_empty,
    sum_full,
    sum_empty,
    q_empty,
    k_stage,
    dq_count,
    tiles,
    final,
    scale,
    cid: tl.constexpr,
    DIRECT: tl.constexpr,
    FINAL: tl.constexpr,
    HALF: tl.constexpr,
    Q_STAGES: tl.constexpr,
    RELEASE: tl.constexpr,
):
    """A group's 64 columns of a part of dQ = dS K, left in shared memory for the sender.

    RELEASE: dV and dK of the next query tile are in flight; free its q and dO as soon as they are done.
    """
    QUERIES: tl.constexpr = 64
    KEYS: tl.constexpr = 64
    stage, phase = get_bufidx_phase(dq_count, 2)
    k_low = tlx.local_reshape(k_buffers[k_stage * 2], [KEYS, 2 * HALF])
    k_high = tlx.local_reshape(k_buffers[k_stage * 2 + 1], [KEYS, 2 * HALF])
    tlx.barrier_wait(ds_full[(1 - cid) * 2 + stage], phase)
    part = tlx.async_dot(tlx.local_trans(ds_buffers[stage]), tlx.local_slice(k_low, [0, cid * HALF], [KEYS, HALF]))
    part = tlx.async_dot(
        tlx.local_trans(ds_buffers[2 + stage]), tlx.local_slice(k_high, [0, cid * HALF], [KEYS, HALF]), part
    )
    if RELEASE:
        part = tlx.async_dot_wait(2, part)
        q_stage, _ = get_bufidx_phase(dq_count + 1, Q_STAGES)
        tlx.barrier_arrive(q_empty[q_stage], 1)
    part = tlx.async_dot_wait(0, part)
    tlx.barrier_arrive(ds_empty[(1 - cid) * 2 + stage], 1)
    part = part * scale
    tlx.barrier_wait(sum_empty[cid], dq_count & 1)
    if DIRECT and final:
        if FINAL and tiles > 1:
            part += tlx.local_load(tlx.local_reshape(sum_buffers[cid], [QUERIES, HALF]))
            tlx.named_barrier_wait(11 + cid, 128)  # all have read before anybody writes there
        tlx.local_store(tlx.local_reshape(dq_buffers[2 * cid], [QUERIES, HALF]), part.to(tlx.dtype_of(desc_dq)))
    else:
        tlx.local_store(tlx.local_reshape(sum_buffers[cid], [QUERIES, HALF]), part)
    tlx.fence_async_shared()
    tlx.barrier_arrive(sum_full[cid], 1)


@triton.jit
def send_dq(
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
    half: tl.constexpr,
    DIRECT: tl.constexpr,
    FINAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    OWNER: tl.constexpr,
):
    """The sender of one half of the columns: adds every part to the sum in its tile's turn."""
    QUERIES: tl.constexpr = 64
    sent = 0
    for n in range(mine):
        _, _, _, q_size, out_first, start, tiles, counter, index = entry_of(table, n, H, OWNER)
        head, first_tile = place_of(index, start, tiles, H, OWNER)
        for t in range(tiles if OWNER else 1):
            tile = first_tile + t
            query_tiles = (q_size + QUERIES - 1) // QUERIES
            first = first_query_tile(tile, tiles, query_tiles, limit)
            if FINAL:
                final_from = last_from(tile, tiles, query_tiles, limit)
            else:
                final_from = tl.where(tiles == 1, 0, query_tiles)
            place = counters + (head * 2 + half).to(tl.int64) * counter_stride + counter
            column = head * HEAD_DIM + half * (HEAD_DIM // 2)
            for i in range(query_tiles):
                m = first + i
                m = tl.where(m >= query_tiles, m - query_tiles, m)
                final = DIRECT and i >= final_from
                turn = parts_before(m, first, tile, tiles, query_tiles, limit)
                if FINAL and final and tiles > 1:
                    # The last part: the sum so far comes back to the group, which rounds and sends dQ itself.
                    wait_for_count(place + m, turn * 32)
                    tlx.barrier_expect_bytes(sum_empty[half], 4 * QUERIES * (HEAD_DIM // 2))
                    load_ragged(desc_sums, sum_buffers[half], sum_empty[half], out_first, q_size, m * QUERIES, column)
                else:
                    tlx.barrier_arrive(sum_empty[half], 1)
                    if turn > 0:
                        wait_for_count(place + m, turn * 32)
                tlx.barrier_wait(sum_full[half], sent & 1)
                sent += 1
                if final:
                    store_ragged(desc_dq, dq_buffers[2 * half], out_first, q_size, m * QUERIES, column)
                elif turn == 0:
                    store_ragged(desc_sums, sum_buffers[half], out_first, q_size, m * QUERIES, column)
                else:
                    add_ragged(desc_sums, sum_buffers[half], out_first, q_size, m * QUERIES, column)
                tlx.async_descriptor_store_wait(0)
                if tiles > 1 and not final:
                    # While the group works on the next part: this one has landed, another tile may add.
                    bulk_writes_done()
                    count_up(place + m)
    bulk_writes_done()


@triton.jit
def consume(
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
    cid: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    Q_STAGES: tl.constexpr,
    K_STAGES: tl.constexpr,
    V_STAGES: tl.constexpr,
    RESIDENT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DIRECT: tl.constexpr,
    FINAL: tl.constexpr,
    OWNER: tl.constexpr,
    PINGPONG: tl.constexpr,
    LEAN: tl.constexpr,
):
    """The consumer warp group that owns the keys [64 cid, 64 cid + 64) of every tile."""
    KEYS: tl.constexpr = 64
    TILE: tl.constexpr = 128
    QUERIES: tl.constexpr = 64
    HALF: tl.constexpr = HEAD_DIM // 2
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    dtype: tl.constexpr = tlx.dtype_of(desc_dk)
    DEFER: tl.constexpr = LEAN and K_STAGES > 1
    log2_scale = scale * 1.4426950408889634
    if PINGPONG > 0:
        if cid == 1:
            tlx.named_barrier_arrive(9, 256)
    q_count = 0
    ds_count = 0
    kv_count = 0
    for n in range(mine):
        kv_first, kv_size, _, q_size, _, start, tiles, _, index = entry_of(table, n, H, OWNER)
        head, first_tile = place_of(index, start, tiles, H, OWNER)
        for t in range(tiles if OWNER else 1):
            tile = first_tile + t
            k_stage, k_phase = get_bufidx_phase(kv_count, K_STAGES)
            query_tiles = (q_size + QUERIES - 1) // QUERIES
            if FINAL:
                final_from = last_from(tile, tiles, query_tiles, limit)
            else:
                final_from = tl.where(tiles == 1, 0, query_tiles)
            tlx.barrier_wait(k_full[k_stage], k_phase)
            dk = tl.zeros([KEYS, HEAD_DIM], tl.float32)
            dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
            k_tile = tlx.local_reshape(k_buffers[k_stage * 2 + cid], [KEYS, HEAD_DIM])
            v_stage, v_phase = get_bufidx_phase(kv_count, V_STAGES)
            v_tile = tlx.local_reshape(v_buffers[v_stage * 2 + cid], [KEYS, HEAD_DIM])
            if query_tiles == 0:
                tlx.barrier_wait(v_full[v_stage], v_phase)
            for i in range(query_tiles):
                stage, phase = get_bufidx_phase(q_count if RESIDENT else ds_count, Q_STAGES)
                ds_stage, ds_phase = get_bufidx_phase(ds_count, 2)
                q_tile = tlx.local_reshape(q_buffers[stage], [QUERIES, HEAD_DIM])
                do_tile = tlx.local_reshape(do_buffers[stage], [QUERIES, HEAD_DIM])
                if PINGPONG > 0:
                    # One group's scores and dS beside the other's dV, dK and dQ.
                    tlx.named_barrier_wait(9 + cid, 256)
                else:
                    tlx.named_barrier_wait(9 + cid, 128)
                tlx.barrier_wait(q_full[stage], phase)
                s = tlx.async_dot(k_tile, tlx.local_trans(q_tile))
                tlx.barrier_wait(do_full[stage], phase)
                if i == 0:
                    tlx.barrier_wait(v_full[v_stage], v_phase)
                dp = tlx.async_dot(v_tile, tlx.local_trans(do_tile))
                if SOFTMAX:
                    tlx.barrier_wait(stat_full[stage], phase)
                    row_lse = tlx.local_load(lse_buffers[stage])
                s = tlx.async_dot_wait(1, s)
                if SOFTMAX:
                    value = tl.math.exp2(s * log2_scale - row_lse[None, :])
                    if tile * TILE + TILE > kv_size:
                        keys = tile * TILE + cid * KEYS + tl.arange(0, KEYS)
                        value = tl.where((keys < kv_size)[:, None], value, 0.0)
                else:
                    value, slope = value_and_slope(s, scale, ACTIVATION)
                p = value.to(dtype)
                dp = tlx.async_dot_wait(0, dp)
                if PINGPONG == 2:
                    tlx.named_barrier_arrive(10 - cid, 256)
                if LEAN:
                    if i == query_tiles - 1:
                        tlx.barrier_arrive(v_empty[v_stage], 1)
                if SOFTMAX:
                    row_delta = tlx.local_load(delta_buffers[stage])
                    ds = (value * (dp - row_delta[None, :])).to(dtype)
                else:
                    ds = (dp * slope).to(dtype)
                dv = tlx.async_dot(p, do_tile, dv)
                if DEFER:
                    if i == 0 and kv_count > 0:  # the last tile's dV and dK have left
                        tlx.async_descriptor_store_wait(0)
                        tlx.barrier_arrive(k_empty[(kv_count - 1) % K_STAGES], 1)
                tlx.barrier_wait(ds_empty[cid * 2 + ds_stage], ds_phase ^ 1)
                tlx.local_store(ds_buffers[cid * 2 + ds_stage], ds)
                tlx.fence_async_shared()
                tlx.barrier_arrive(ds_full[cid * 2 + ds_stage], 1)
                if PINGPONG == 1:
                    tlx.named_barrier_arrive(10 - cid, 256)
                dk = tlx.async_dot(ds, q_tile, dk)
                if not RESIDENT:
                    if i > 0:
                        # dQ lags a query tile behind, so that neither group waits for the other's dS.
                        multiply_dq(
                            desc_dq,
                            dq_buffers,
                            sum_buffers,
                            ds_buffers,
                            k_buffers,
                            ds_full,
                            ds_empty,
                            sum_full,
                            sum_empty,
                            q_empty,
                            k_stage,
                            ds_count - 1,
                            tiles,
                            i - 1 >= final_from,
                            scale,
                            cid,
                            DIRECT,
                            FINAL,
                            HALF,
                            Q_STAGES,
                            True,
                        )
                dv = tlx.async_dot_wait(0, dv)
                dk = tlx.async_dot_wait(0, dk)
                if i == 0:
                    if RESIDENT:
                        if t == tiles - 1:
                            tlx.barrier_arrive(q_empty[stage], 1)
                    else:
                        tlx.barrier_arrive(q_empty[stage], 1)
                ds_count += 1
            if query_tiles > 0:
                multiply_dq(
                    desc_dq,
                    dq_buffers,
                    sum_buffers,
                    ds_buffers,
                    k_buffers,
                    ds_full,
                    ds_empty,
                    sum_full,
                    sum_empty,
                    q_empty,
                    k_stage,
                    ds_count - 1,
                    tiles,
                    final_from < query_tiles,
                    scale,
                    cid,
                    DIRECT,
                    FINAL,
                    HALF,
                    Q_STAGES,
                    False,
                )
            row = tile * TILE + cid * KEYS
            if LEAN:
                # Leave through the group's own K and dS, once the other group has read both for its last dQ.
                if query_tiles == 0:
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                    if DEFER and kv_count > 0:
                        tlx.async_descriptor_store_wait(0)
                        tlx.barrier_arrive(k_empty[(kv_count - 1) % K_STAGES], 1)
                for d in tl.static_range(2):
                    ds_stage, ds_phase = get_bufidx_phase(ds_count + d, 2)
                    tlx.barrier_wait(ds_empty[cid * 2 + ds_stage], ds_phase ^ 1)
                tlx.local_store(k_tile, (dv * value_factor(scale, ACTIVATION)).to(dtype))
                tlx.local_store(tlx.local_reshape(dk_buffers[cid], [KEYS, HEAD_DIM]), (dk * scale).to(dtype))
                tlx.fence_async_shared()
                store_ragged(desc_dv, k_buffers[k_stage * 2 + cid], kv_first, kv_size, row, head * HEAD_DIM)
                store_ragged(desc_dk, dk_buffers[cid], kv_first, kv_size, row, head * HEAD_DIM)
                if not DEFER:
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(k_empty[k_stage], 1)
            else:
                tlx.barrier_arrive(k_empty[k_stage], 1)
                # Leave through the group's own V tile, which nobody else reads.
                tlx.local_store(v_tile, (dv * value_factor(scale, ACTIVATION)).to(dtype))
                tlx.fence_async_shared()
                store_ragged(desc_dv, v_buffers[v_stage * 2 + cid], kv_first, kv_size, row, head * HEAD_DIM)
                tlx.async_descriptor_store_wait(0)
                tlx.local_store(v_tile, (dk * scale).to(dtype))
                tlx.fence_async_shared()
                store_ragged(desc_dk, v_buffers[v_stage * 2 + cid], kv_first, kv_size, row, head * HEAD_DIM)
                tlx.async_descriptor_store_wait(0)
                tlx.barrier_arrive(v_empty[v_stage], 1)
            kv_count += 1
        if RESIDENT:
            q_count += tl.where((tiles > 0) & (q_size > 0), 1, 0)
    tlx.async_descriptor_store_wait(0)


@triton.jit
def backward_tiles_kernel(
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
    FINAL: tl.constexpr,
    OWNER: tl.constexpr,
    PINGPONG: tl.constexpr,
    LEAN: tl.constexpr,
):
    KEYS: tl.constexpr = 64  # key rows of a consumer group
    TILE: tl.constexpr = 128
    QUERIES: tl.constexpr = 64
    HALF: tl.constexpr = HEAD_DIM // 2
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count) * H
    if OWNER:
        mine = my_tiles(total, program, programs)
    else:
        mine = (total - program + programs - 1) // programs
    limit = 0 if OWNER else programs  # how many tiles may begin at different query tiles

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
                FINAL,
                OWNER,
                PINGPONG,
                LEAN,
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
                FINAL,
                OWNER,
                PINGPONG,
                LEAN,
            )

        with tlx.async_task(num_warps=1, registers=SPARE):  # producer
            q_count = 0
            kv_count = 0
            for n in range(mine):
                kv_first, kv_size, q_first, q_size, out_first, start, tiles, _, index = entry_of(table, n, H, OWNER)
                head, first_tile = place_of(index, start, tiles, H, OWNER)
                for t in range(tiles if OWNER else 1):
                    tile = first_tile + t
                    column = head * HEAD_DIM
                    query_tiles = (q_size + QUERIES - 1) // QUERIES
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
                    # v follows the first q and dO: its buffer is free only when the last tile's dK and dV have left it.
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
                            load_ragged(
                                desc_do, do_buffers[stage], do_full[stage], out_first, q_size, m * QUERIES, column
                            )
                            if SOFTMAX:
                                queries = m * QUERIES + tl.arange(0, QUERIES)
                                where = head.to(tl.int64) * stat_stride + (out_first + queries)
                                row_lse = tl.load(lse + where, mask=queries < q_size, other=float("inf"))
                                row_delta = tl.load(delta + where, mask=queries < q_size, other=0.0)
                                tlx.local_store(lse_buffers[stage], row_lse * 1.4426950408889634)
                                tlx.local_store(delta_buffers[stage], row_delta)
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
                FINAL,
                HEAD_DIM,
                OWNER,
            )


@triton.jit
def finish_kernel(
    sums,
    dq,
    units,
    width,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DENSE: tl.constexpr,
    FINAL: tl.constexpr,
):
    """dq = sums in the output type where dQ was summed over several key tiles; zeros for queries without keys."""
    unit = units + tl.program_id(0) * 8
    size = tl.load(unit + 1)
    keys = tl.load(unit + 3)
    first = tl.load(unit + 4).to(tl.int64)
    columns = tl.arange(0, COLUMNS)[None, :]
    if (keys > TILE and not DENSE and not FINAL) or keys == 0:
        for row in range(tl.program_id(1) * 8, size, tl.num_programs(1) * 8):
            rows = row + tl.arange(0, 8)[:, None]
            place = (first + row) * width + (rows - row) * width + columns
            keep = (rows < size) & (columns < width)
            if keys == 0:
                if DENSE:
                    tl.store(sums + place, tl.zeros([8, COLUMNS], tl.float32), mask=keep)
                else:
                    tl.store(dq + place, tl.zeros([8, COLUMNS], dq.dtype.element_ty), mask=keep)
            else:
                value = tl.load(sums + place, mask=keep, other=0.0)
                tl.store(dq + place, value.to(dq.dtype.element_ty), mask=keep)
