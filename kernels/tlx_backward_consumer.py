"""The consumer warp groups of the TLX backward: 64 keys each, five products a query tile.

S^T = K Q^T, dP^T = V dO^T, then P and dS in registers, dV += P^T dO, dK += dS^T Q. dS goes through shared memory, where
each group reads both halves for its 64 columns of dQ = dS K; that product lags a query tile behind, so that no group
waits for the other's dS. Ragged ends load as zeros: an activation's P and dS vanish there by themselves; softmax masks
the last key tile.

Barriers that consumers arrive at count threads, not groups: each thread says for itself that it has read or written,
without bringing its group together first.
"""

from __future__ import annotations

import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .tlx_activations import value_and_slope, value_factor
from .tlx_backward_order import entry_of, last_from, place_of
from .tlx_common import store_ragged


@triton.jit
def issue_dq(
    ds_buffers, k_buffers, ds_full, k_stage, dq_count, dq, cid: tl.constexpr, HALF: tl.constexpr, ADD: tl.constexpr
):
    """A group's 64 columns of a part of dQ = dS K, in flight. ADD: on top of dq."""
    KEYS: tl.constexpr = 64
    stage, phase = get_bufidx_phase(dq_count, 2)
    k_low = tlx.local_reshape(k_buffers[k_stage * 2], [KEYS, 2 * HALF])
    k_high = tlx.local_reshape(k_buffers[k_stage * 2 + 1], [KEYS, 2 * HALF])
    tlx.barrier_wait(ds_full[(1 - cid) * 2 + stage], phase)
    low = tlx.local_slice(k_low, [0, cid * HALF], [KEYS, HALF])
    if ADD:
        part = tlx.async_dot(tlx.local_trans(ds_buffers[stage]), low, dq)
    else:
        part = tlx.async_dot(tlx.local_trans(ds_buffers[stage]), low)
    return tlx.async_dot(
        tlx.local_trans(ds_buffers[2 + stage]), tlx.local_slice(k_high, [0, cid * HALF], [KEYS, HALF]), part
    )


@triton.jit
def to_chunks(part):
    """A part of dQ [64, 64] in an order in which each thread's values lie in chunks of 16 bytes, those of a warp side
    by side: stores to shared memory then meet no bank twice. The sum of parts has this order too.
    """
    return tl.reshape(tl.permute(tl.reshape(part, [4, 2, 8, 8, 4, 2]), [3, 0, 2, 4, 1, 5]), [64, 64])


@triton.jit
def from_chunks(x):
    """The order of rows and columns again."""
    return tl.reshape(tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5]), [64, 64])


@triton.jit
def stage_dq(
    desc_dq,
    dq_buffers,
    sum_buffers,
    sum_full,
    sum_empty,
    part,
    dq_count,
    tiles,
    final,
    scale,
    cid: tl.constexpr,
    DIRECT: tl.constexpr,
    FOLD: tl.constexpr,
    CHUNKS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Leave a part of dQ in shared memory for the sender."""
    QUERIES: tl.constexpr = 64
    if not FOLD:
        part = part * scale
    tlx.barrier_wait(sum_empty[cid], dq_count & 1)
    if DIRECT and final:
        if tiles > 1:
            before = tlx.local_load(tlx.local_reshape(sum_buffers[cid], [QUERIES, HALF]))
            part += from_chunks(before) if CHUNKS else before
            tlx.named_barrier_wait(11 + cid, 128)  # all have read before anybody writes there
        tlx.local_store(tlx.local_reshape(dq_buffers[2 * cid], [QUERIES, HALF]), part.to(tlx.dtype_of(desc_dq)))
    else:
        tlx.local_store(tlx.local_reshape(sum_buffers[cid], [QUERIES, HALF]), to_chunks(part) if CHUNKS else part)
    tlx.fence_async_shared()
    tlx.barrier_arrive(sum_full[cid], 1)


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
    FOLD: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The consumer warp group that owns the keys [64 cid, 64 cid + 64) of every tile."""
    KEYS: tl.constexpr = 64
    TILE: tl.constexpr = 128
    QUERIES: tl.constexpr = 64
    HALF: tl.constexpr = HEAD_DIM // 2
    SOFTMAX: tl.constexpr = ACTIVATION == "softmax"
    dtype: tl.constexpr = tlx.dtype_of(desc_dk)
    log2_scale = scale * 1.4426950408889634
    if not RESIDENT:
        if cid == 1:
            tlx.named_barrier_arrive(9, 256)
    q_count = 0
    ds_count = 0
    kv_count = 0
    for n in range(mine):
        kv_first, kv_size, _, q_size, _, start, tiles, _, index = entry_of(table, n, H, RESIDENT)
        head, first_tile = place_of(index, start, tiles, H, RESIDENT)
        dq = tl.zeros([QUERIES, HALF], tl.float32)
        for t in range(tiles if RESIDENT else 1):
            tile = first_tile + t
            k_stage, k_phase = get_bufidx_phase(kv_count, K_STAGES)
            query_tiles = 1 if RESIDENT else (q_size + QUERIES - 1) // QUERIES
            final_from = last_from(tile, tiles, query_tiles, limit)
            tlx.barrier_wait(k_full[k_stage], k_phase)
            dk = tl.zeros([KEYS, HEAD_DIM], tl.float32)
            dv = tl.zeros([KEYS, HEAD_DIM], tl.float32)
            k_tile = tlx.local_reshape(k_buffers[k_stage * 2 + cid], [KEYS, HEAD_DIM])
            v_stage, v_phase = get_bufidx_phase(kv_count, V_STAGES)
            v_tile = tlx.local_reshape(v_buffers[v_stage * 2 + cid], [KEYS, HEAD_DIM])
            if query_tiles == 0:
                tlx.barrier_wait(v_full[v_stage], v_phase)
            for i in range(1 if RESIDENT else query_tiles):
                stage, phase = get_bufidx_phase(q_count if RESIDENT else ds_count, Q_STAGES)
                ds_stage, ds_phase = get_bufidx_phase(ds_count, 2)
                q_tile = tlx.local_reshape(q_buffers[stage], [QUERIES, HEAD_DIM])
                do_tile = tlx.local_reshape(do_buffers[stage], [QUERIES, HEAD_DIM])
                # Here all warps of the group have read what the last step left in shared memory.
                if RESIDENT:
                    tlx.named_barrier_wait(9 + cid, 128)
                else:  # and it is this group's turn at S and dP, beside the other's dV, dK and dQ
                    tlx.named_barrier_wait(9 + cid, 256)
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
                    value, slope = value_and_slope(s, scale, scale if FOLD else 1.0, ACTIVATION)
                p = value.to(dtype)
                dp = tlx.async_dot_wait(0, dp)
                if not RESIDENT:
                    tlx.named_barrier_arrive(10 - cid, 256)
                if i == query_tiles - 1:
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                if SOFTMAX:
                    row_delta = tlx.local_load(delta_buffers[stage])
                    if FOLD:
                        ds = (value * (dp * scale - row_delta[None, :])).to(dtype)
                    else:
                        ds = (value * (dp - row_delta[None, :])).to(dtype)
                else:
                    ds = (dp * slope).to(dtype)
                dv = tlx.async_dot(p, do_tile, dv)
                if i == 0 and kv_count > 0:  # the last tile's dV and dK have left
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(k_empty[(kv_count - 1) % K_STAGES], 1)
                tlx.barrier_wait(ds_empty[cid * 2 + ds_stage], ds_phase ^ 1)
                tlx.local_store(ds_buffers[cid * 2 + ds_stage], ds)
                tlx.fence_async_shared()
                tlx.barrier_arrive(ds_full[cid * 2 + ds_stage], 1)
                dk = tlx.async_dot(ds, q_tile, dk)
                if not RESIDENT:
                    if i > 0:
                        # dQ lags a query tile behind, so that neither group waits for the other's dS.
                        part = issue_dq(ds_buffers, k_buffers, ds_full, k_stage, ds_count - 1, 0, cid, HALF, False)
                        part = tlx.async_dot_wait(2, part)  # dV and dK are done: free q and dO as soon as that
                        tlx.barrier_arrive(q_empty[stage], 1)
                        part = tlx.async_dot_wait(0, part)
                        tlx.barrier_arrive(ds_empty[(1 - cid) * 2 + (ds_count - 1) % 2], 1)
                        stage_dq(
                            desc_dq,
                            dq_buffers,
                            sum_buffers,
                            sum_full,
                            sum_empty,
                            part,
                            ds_count - 1,
                            tiles,
                            i - 1 >= final_from,
                            scale,
                            cid,
                            DIRECT,
                            FOLD,
                            CHUNKS,
                            HALF,
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
                # With RESIDENT dQ of the one query tile stays in registers over all key tiles of the (sequence, head).
                dq = issue_dq(ds_buffers, k_buffers, ds_full, k_stage, ds_count - 1, dq, cid, HALF, RESIDENT)
                dq = tlx.async_dot_wait(0, dq)
                tlx.barrier_arrive(ds_empty[(1 - cid) * 2 + (ds_count - 1) % 2], 1)
                if RESIDENT:
                    if t == tiles - 1:
                        stage_dq(
                            desc_dq,
                            dq_buffers,
                            sum_buffers,
                            sum_full,
                            sum_empty,
                            dq,
                            q_count,
                            tiles,
                            final_from < query_tiles,
                            scale,
                            cid,
                            DIRECT,
                            FOLD,
                            CHUNKS,
                            HALF,
                        )
                else:
                    stage_dq(
                        desc_dq,
                        dq_buffers,
                        sum_buffers,
                        sum_full,
                        sum_empty,
                        dq,
                        ds_count - 1,
                        tiles,
                        final_from < query_tiles,
                        scale,
                        cid,
                        DIRECT,
                        FOLD,
                        CHUNKS,
                        HALF,
                    )
            row = tile * TILE + cid * KEYS
            # Leave through the group's own K and dS, once the other group has read both for its last dQ.
            if query_tiles == 0:
                tlx.barrier_arrive(v_empty[v_stage], 1)
                if kv_count > 0:
                    tlx.async_descriptor_store_wait(0)
                    tlx.barrier_arrive(k_empty[(kv_count - 1) % K_STAGES], 1)
            for d in tl.static_range(2):
                ds_stage, ds_phase = get_bufidx_phase(ds_count + d, 2)
                tlx.barrier_wait(ds_empty[cid * 2 + ds_stage], ds_phase ^ 1)
            tlx.local_store(k_tile, (dv * value_factor(scale, ACTIVATION)).to(dtype))
            tlx.local_store(
                tlx.local_reshape(dk_buffers[cid], [KEYS, HEAD_DIM]), (dk if FOLD else dk * scale).to(dtype)
            )
            tlx.fence_async_shared()
            store_ragged(desc_dv, k_buffers[k_stage * 2 + cid], kv_first, kv_size, row, head * HEAD_DIM)
            store_ragged(desc_dk, dk_buffers[cid], kv_first, kv_size, row, head * HEAD_DIM)
            kv_count += 1
        if RESIDENT:
            q_count += tl.where(tiles > 0, 1, 0)
    tlx.async_descriptor_store_wait(0)
