"""Backward kernels of jagged softmax attention; `triton_schemes.py` puts them together into schemes.

Two walks exist, each over one sequence and head: `_dq_walk` holds a query tile and passes over the keys (3 GEMMs a pair
of tiles), `_dkdv_walk` holds a key tile and passes over the queries (4 GEMMs, 5 when it also hands out dQ). Scores are
recomputed from lse: p = exp2(score - lse), ds = p (dp - delta), delta = rowsum(o do). Query rows past the end load
lse = +inf, so their p is 0 without a mask. The rows that a walk passes over come by descriptor (TMA) or by loads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.ragged_tma import to_ragged_indices

from ..triton_common import load_rows, sequence_range, store_rows, tile_rows
from .triton_forward import bias_bucket, key_range


@triton.jit(do_not_specialize=["rows"])
def delta_kernel(
    o, do, delta, rows, heads, so_t, so_h, sdo_t, sdo_h, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """delta[head, row] = sum over columns of o do, float32. Program: (block of rows, head)."""
    first = (tl.program_id(0) // heads) * BLOCK
    head = (tl.program_id(0) % heads).to(tl.int64)
    row, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    o_tile = load_rows(o + head * so_h, first, row, columns, so_t, rows, HEAD_DIM, BLOCK_D, True)
    do_tile = load_rows(do + head * sdo_h, first, row, columns, sdo_t, rows, HEAD_DIM, BLOCK_D, True)
    value = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
    tl.store(delta + head * rows + first + row, value, mask=first + row < rows)


@triton.jit
def _kept(p, i, j, kv_len, window, WINDOW: tl.constexpr):
    """Weights with 0 for keys past kv_len and outside the window."""
    seen = (j < kv_len)[None, :]
    if WINDOW:
        seen = seen & (tl.abs(i[:, None] - j[None, :]) <= window)
    return tl.where(seen, p, 0.0)


@triton.jit
def _dq_walk(
    dq, q_tile, do_tile, lse2, delta, k, v, lo, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns, sk_t,
    sv_t, scale_log2, window, table, times_k, buckets, dtable,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (without the scale) of one query tile from the keys [lo, hi); a bias adds its gradient to dtable [buckets].

    MASKED: as in `triton_forward._sweep`.
    """
    step = tl.arange(0, BLOCK_N)
    for n in tl.range(lo, hi, BLOCK_N):
        k_tile = tile_rows(
            k, kv_start, n, head, step, columns, sk_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKED == 1
        )
        v_tile = tile_rows(
            v, kv_start, n, head, step, columns, sv_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKED == 1
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale_log2
        j = n + step
        if BIAS != 0:
            t_j = tl.load(times_k + j, mask=j < kv_len, other=0) if BIAS == 2 else j
            bucket = bias_bucket(i[:, None], j[None, :], t_i[:, None], t_j[None, :], buckets, BIAS)
            s += tl.load(table + bucket) * 1.4426950408889634
        p = tl.exp2(s - lse2[:, None])
        if MASKED == 1:
            p = _kept(p, i, j, kv_len, window, WINDOW)
        elif MASKED == 2:
            if (n < whole_lo) | (n >= whole_hi):
                p = _kept(p, i, j, kv_len, window, WINDOW)
        dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
        if BIAS != 0:
            for b in range(tl.min(tl.min(bucket, 1), 0), tl.max(tl.max(bucket, 1), 0) + 1):
                tl.atomic_add(dtable + b, tl.sum(tl.sum(tl.where(bucket == b, ds, 0.0), 1), 0), sem="relaxed")
    return dq


@triton.jit
def _dq_tile(
    q, k, v, o, do, dq, lse, delta, q_offsets, kv_offsets, table, times, dtable, sq_off, skv_off, s_time, batch,
    total_q, rows,
    buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t, sdq_h, scale, scale_log2,
    sequence, first, head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    SHARED_Q: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, DELTA: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M query rows from `first` on. DELTA: compute delta here and store it for the key-side kernel."""
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, total_q)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, 0)
    kv_len = tl.where(sequence < batch, kv_len, 0)
    row, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    i = first + row
    q += head * sq_h + (0 if SHARED_Q else q_start * sq_t)
    q_tile = load_rows(q, first, row, columns, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
    do_tile = load_rows(do + q_start * sdo_t + head * sdo_h, first, row, columns, sdo_t, q_len, HEAD_DIM, BLOCK_D, True)
    at = head * rows + q_start + i
    lse2 = tl.load(lse + at, mask=i < q_len, other=float("inf")) * 1.4426950408889634
    if DELTA:
        o_tile = load_rows(o + q_start * so_t + head * so_h, first, row, columns, so_t, q_len, HEAD_DIM, BLOCK_D, True)
        tl.store(delta + at, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1), mask=i < q_len)
        tl.debug_barrier()
    # Read back in any case: a load may take the layout of the scores, where a row sum kept in registers made fbtriton
    # bring every tile of scores into the layout of the sum, through shared memory.
    d = tl.load(delta + at, mask=i < q_len, other=0.0)
    if not TMA:
        k += kv_start * sk_t + head * sk_h
        v += kv_start * sv_t + head * sv_h
    table += head * buckets
    dtable += head * buckets
    times_k = times + kv_start * s_time
    t_i = tl.load(times + q_start * s_time + i, mask=i < q_len, other=0) if BIAS == 2 else i

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    lo, hi, whole_lo, whole_hi = key_range(first, kv_len, window, BLOCK_M, BLOCK_N, WINDOW)
    if TMA:
        acc = _dq_walk(
            acc, q_tile, do_tile, lse2, d, k, v, lo, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns,
            sk_t, sv_t, scale_log2, window, table, times_k, buckets, dtable, HEAD_DIM, BLOCK_D, BLOCK_N, 2, WINDOW,
            BIAS, TMA, PRECISION)  # fmt: skip
    else:
        if WINDOW:
            acc = _dq_walk(
                acc, q_tile, do_tile, lse2, d, k, v, lo, whole_lo, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i,
                columns, sk_t, sv_t, scale_log2, window, table, times_k, buckets, dtable, HEAD_DIM, BLOCK_D, BLOCK_N, 1,
                True, BIAS, TMA, PRECISION)  # fmt: skip
        acc = _dq_walk(
            acc, q_tile, do_tile, lse2, d, k, v, whole_lo, whole_hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i,
            columns, sk_t, sv_t, scale_log2, window, table, times_k, buckets, dtable, HEAD_DIM, BLOCK_D, BLOCK_N, 0,
            False, BIAS, TMA, PRECISION)  # fmt: skip
        acc = _dq_walk(
            acc, q_tile, do_tile, lse2, d, k, v, whole_hi, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i,
            columns, sk_t, sv_t, scale_log2, window, table, times_k, buckets, dtable, HEAD_DIM, BLOCK_D,
            BLOCK_N if WINDOW else TAIL_N, 1, WINDOW, BIAS, TMA, PRECISION)  # fmt: skip
    store_rows(dq + q_start * sdq_t + head * sdq_h, first, row, columns, sdq_t, q_len, acc * scale, HEAD_DIM)


@triton.jit
def _dkdv_walk(
    dk, dv, k_tile, v_tile, q, do, lse, delta, dq, scratch, lo, hi, whole_lo, whole_hi, q_from, do_from, q_len, kv_len,
    head, j, t_j, columns, sq_t, sdo_t, sdq_t, ss_t, scale, scale_log2, window, table, times_q, buckets, fresh, final,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, MASK_ROWS: tl.constexpr,
    MASK_KEYS: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, DQ: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (without the scale) and dv of one key tile from the queries [lo, hi).

    MASK_ROWS: rows past q_len exist. WINDOW: mask it, 0: nowhere, 1: in every tile, 2: outside [whole_lo, whole_hi).
    MASK_KEYS: in the last key tile (`final`). DQ says where dQ of the tile pair goes. 0: nowhere. 1: by atomics into
    `scratch` (float32, scaled). 2: there by load, add, store. 3: as 2, but the first key tile (`fresh`) reads nothing
    and the last writes dq itself. 4: as 1, added by the copy engine (`scratch` is a descriptor).
    """
    step = tl.arange(0, BLOCK_M)
    for m in tl.range(lo, hi, BLOCK_M):
        q_tile = tile_rows(q, q_from, m, head, step, columns, sq_t, q_len, HEAD_DIM, BLOCK_M, BLOCK_D, TMA, MASK_ROWS)
        i = m + step
        if MASK_ROWS:
            lse2 = tl.load(lse + i, mask=i < q_len, other=float("inf")) * 1.4426950408889634
            d = tl.load(delta + i, mask=i < q_len, other=0.0)
        else:
            lse2 = tl.load(lse + i) * 1.4426950408889634
            d = tl.load(delta + i)
        st = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale_log2
        if BIAS != 0:
            t_i = tl.load(times_q + i, mask=i < q_len, other=0) if BIAS == 2 else i
            bucket = bias_bucket(i[None, :], j[:, None], t_i[None, :], t_j[:, None], buckets, BIAS)
            st += tl.load(table + bucket) * 1.4426950408889634
        pt = tl.exp2(st - lse2[None, :])
        if WINDOW == 1:
            pt = tl.where(tl.abs(i[None, :] - j[:, None]) <= window, pt, 0.0)
        elif WINDOW == 2:
            if (m < whole_lo) | (m >= whole_hi):
                pt = tl.where(tl.abs(i[None, :] - j[:, None]) <= window, pt, 0.0)
        if MASK_KEYS:
            if final != 0:
                pt = tl.where((j < kv_len)[:, None], pt, 0.0)
        do_tile = tile_rows(
            do, do_from, m, head, step, columns, sdo_t, q_len, HEAD_DIM, BLOCK_M, BLOCK_D, TMA, MASK_ROWS
        )
        dv = tl.dot(pt.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dpt = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        dst = (pt * (dpt - d[None, :])).to(q_tile.dtype)
        dk = tl.dot(dst, q_tile, dk, input_precision=PRECISION)
        if DQ != 0:
            part = tl.dot(tl.trans(dst), k_tile, input_precision=PRECISION) * scale
            if DQ != 4:
                at = scratch + tl.cast(m, tl.int64) * ss_t + (step[:, None] * ss_t + columns[None, :])
            inside = (i < q_len)[:, None] & (columns < HEAD_DIM)[None, :]
            if DQ == 4:
                x, y, z = to_ragged_indices(tl.cast(do_from, tl.int32), q_len, tl.cast(m, tl.int32))
                scratch.atomic_add([x, y, z, tl.cast(head, tl.int32), 0], tl.reshape(part, [1, 1, BLOCK_M, 1, BLOCK_D]))
            elif DQ == 1:
                tl.atomic_add(at, part, mask=inside, sem="relaxed")
            elif DQ == 2:
                tl.store(at, tl.load(at, mask=inside, other=0.0) + part, mask=inside)
            else:
                part += tl.load(at, mask=inside & (fresh == 0), other=0.0)
                tl.store(at, part, mask=inside & (final == 0))
                out = dq + tl.cast(m, tl.int64) * sdq_t + (step[:, None] * sdq_t + columns[None, :])
                tl.store(out, part.to(dq.dtype.element_ty), mask=inside & (final != 0))
    return dk, dv


@triton.jit
def _dkdv_tile(
    q, k, v, do, dq, scratch, dk, dv, lse, delta, q_offsets, kv_offsets, table, times, sq_off, skv_off, s_time, batch,
    total_kv,
    rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h, ss_t, ss_h, sdk_t, sdk_h,
    scale,
    scale_log2, sequence, first, head,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED_Q: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, DQ: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of BLOCK_N key rows from `first` on (and this tile's share of dq, see `_dkdv_walk`)."""
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, 0)
    q_len = tl.where(sequence < batch, q_len, 0)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, total_kv)
    key, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    j = first + key
    k_tile = load_rows(k + kv_start * sk_t + head * sk_h, first, key, columns, sk_t, kv_len, HEAD_DIM, BLOCK_D, True)
    v_tile = load_rows(v + kv_start * sv_t + head * sv_h, first, key, columns, sv_t, kv_len, HEAD_DIM, BLOCK_D, True)
    q_from = q_start * 0 if SHARED_Q else q_start
    if not TMA:
        q += head * sq_h + q_from * sq_t
        do += q_start * sdo_t + head * sdo_h
    dq += q_start * sdq_t + head * sdq_h
    if DQ != 4:
        scratch += q_start * ss_t + head * ss_h
    lse += head * rows + q_start
    delta += head * rows + q_start
    table += head * buckets
    times_q = times + q_start * s_time
    t_j = tl.load(times + kv_start * s_time + j, mask=j < kv_len, other=0) if BIAS == 2 else j
    fresh, final = (first == 0).to(tl.int32), (first + BLOCK_N >= kv_len).to(tl.int32)

    acc_k = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
    lo, hi, whole_lo, whole_hi = key_range(first, q_len, window, BLOCK_N, BLOCK_M, WINDOW)
    # Keys past the end only matter to dQ: their p is not 0, and p times a zero row of k is NaN once p overflows.
    if TMA:
        acc_k, acc_v = _dkdv_walk(
            acc_k, acc_v, k_tile, v_tile, q, do, lse, delta, dq, scratch, lo, hi, whole_lo, whole_hi, q_from, q_start,
            q_len, kv_len, head, j, t_j, columns, sq_t, sdo_t, sdq_t, ss_t, scale, scale_log2, window, table, times_q,
            buckets, fresh, final, HEAD_DIM, BLOCK_D, BLOCK_M, True, DQ != 0, 2 if WINDOW else 0, BIAS, DQ, TMA,
            PRECISION)  # fmt: skip
    else:
        if WINDOW:
            acc_k, acc_v = _dkdv_walk(
                acc_k, acc_v, k_tile, v_tile, q, do, lse, delta, dq, scratch, lo, whole_lo, whole_lo, whole_hi, q_from,
                q_start, q_len, kv_len, head, j, t_j, columns, sq_t, sdo_t, sdq_t, ss_t, scale, scale_log2, window,
                table, times_q, buckets, fresh, final, HEAD_DIM, BLOCK_D, BLOCK_M, True, DQ != 0, 1, BIAS, DQ, TMA,
                PRECISION)  # fmt: skip
        acc_k, acc_v = _dkdv_walk(
            acc_k, acc_v, k_tile, v_tile, q, do, lse, delta, dq, scratch, whole_lo, whole_hi, whole_lo, whole_hi,
            q_from, q_start, q_len, kv_len, head, j, t_j, columns, sq_t, sdo_t, sdq_t, ss_t, scale, scale_log2, window,
            table, times_q, buckets, fresh, final, HEAD_DIM, BLOCK_D, BLOCK_M, False, DQ != 0, 0, BIAS, DQ, TMA,
            PRECISION)  # fmt: skip
        acc_k, acc_v = _dkdv_walk(
            acc_k, acc_v, k_tile, v_tile, q, do, lse, delta, dq, scratch, whole_hi, hi, whole_lo, whole_hi, q_from,
            q_start, q_len, kv_len, head, j, t_j, columns, sq_t, sdo_t, sdq_t, ss_t, scale, scale_log2, window, table,
            times_q, buckets, fresh, final, HEAD_DIM, BLOCK_D, BLOCK_M, True, DQ != 0, 1 if WINDOW else 0, BIAS, DQ,
            TMA, PRECISION)  # fmt: skip
    store_rows(dk + kv_start * sdk_t + head * sdk_h, first, key, columns, sdk_t, kv_len, acc_k * scale, HEAD_DIM)
    store_rows(dv + kv_start * sdk_t + head * sdk_h, first, key, columns, sdk_t, kv_len, acc_v, HEAD_DIM)


SIZES = ["batch", "total_q", "total_kv", "rows", "window", "buckets", "q_programs"]


@triton.jit(do_not_specialize=SIZES)
def dq_kernel(
    q, k, v, o, do, dq, lse, delta, tiles, count, q_offsets, kv_offsets, table, times, dtable, sq_off, skv_off,
    s_time, batch,
    total_q, heads, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t, sdq_h,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    SHARED_Q: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Split scheme, query side: program (query tile, head) writes dq and delta."""
    place = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if place >= tl.load(count):
        return
    _dq_tile(
        q, k, v, o, do, dq, lse, delta, q_offsets, kv_offsets, table, times, dtable, sq_off, skv_off, s_time, batch,
        total_q, rows,
        buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t, sdq_h, scale, scale_log2,
        tl.load(tiles + 2 * place), tl.load(tiles + 2 * place + 1) * BLOCK_M, head,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, SHARED_Q, WINDOW, BIAS, True, TMA, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    q, k, v, do, dq, scratch, dk, dv, lse, delta, tiles, count, q_offsets, kv_offsets, table, times, sq_off, skv_off,
    s_time,
    batch, total_kv, heads, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h,
    ss_t, ss_h,
    sdk_t, sdk_h, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED_Q: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, DQ: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Split scheme, key side (DQ 0), or the atomic scheme (DQ 1): program (key tile, head) writes dk and dv."""
    place = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if place >= tl.load(count):
        return
    _dkdv_tile(
        q, k, v, do, dq, scratch, dk, dv, lse, delta, q_offsets, kv_offsets, table, times, sq_off, skv_off, s_time,
        batch,
        total_kv, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h, ss_t, ss_h,
        sdk_t,
        sdk_h, scale, scale_log2, tl.load(tiles + 2 * place), tl.load(tiles + 2 * place + 1) * BLOCK_N, head,
        HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, SHARED_Q, WINDOW, BIAS, DQ, TMA, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def fused_kernel(
    q, k, v, o, do, dq, dk, dv, lse, delta, q_tiles, q_count, kv_tiles, kv_count, q_offsets, kv_offsets, table, times,
    dtable,
    sq_off, skv_off, s_time, batch, total_q, total_kv, q_programs, heads, rows, buckets, window, sq_t, sq_h, sk_t,
    sk_h, sv_t,
    sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t, sdq_h, sdk_t, sdk_h, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    SHARED_Q: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Recompute scheme: one launch, sequence-parallel; the first programs own query tiles, the others key tiles."""
    program = tl.program_id(0)
    head = (program % heads).to(tl.int64)
    place = (program // heads).to(tl.int64)
    if place < q_programs:
        if place < tl.load(q_count):
            _dq_tile(
                q, k, v, o, do, dq, lse, delta, q_offsets, kv_offsets, table, times, dtable, sq_off, skv_off, s_time,
                batch,
                total_q, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t,
                sdq_h, scale, scale_log2, tl.load(q_tiles + 2 * place), tl.load(q_tiles + 2 * place + 1) * BLOCK_M,
                head, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, TAIL_N, SHARED_Q, WINDOW, BIAS, False, False,
                PRECISION)  # fmt: skip
    else:
        place -= q_programs
        if place < tl.load(kv_count):
            _dkdv_tile(
                q, k, v, do, dq, dq, dk, dv, lse, delta, q_offsets, kv_offsets, table, times, sq_off, skv_off, s_time,
                batch,
                total_kv, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h,
                sdq_t, sdq_h,
                sdk_t, sdk_h, scale, scale_log2, tl.load(kv_tiles + 2 * place),
                tl.load(kv_tiles + 2 * place + 1) * BLOCK_N,
                head, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, SHARED_Q, WINDOW, BIAS, 0, False, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def owner_kernel(
    q, k, v, do, dq, scratch, dk, dv, lse, delta, order, q_offsets, kv_offsets, table, times, sq_off, skv_off, s_time,
    batch,
    total_q, total_kv, heads, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h,
    ss_t, ss_h,
    sdk_t, sdk_h, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED_Q: tl.constexpr,
    WINDOW: tl.constexpr, BIAS: tl.constexpr, DQ: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Serial and owner schemes: program (sequence, head) walks over its key tiles; nobody else touches its dq."""
    sequence = tl.load(order + tl.program_id(0) // heads)
    head = (tl.program_id(0) % heads).to(tl.int64)
    _, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, total_kv)
    for first in tl.range(0, kv_len, BLOCK_N, num_stages=1):
        _dkdv_tile(
            q, k, v, do, dq, scratch, dk, dv, lse, delta, q_offsets, kv_offsets, table, times, sq_off, skv_off,
            s_time, batch,
            total_kv, rows, buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdo_t, sdo_h, sdq_t, sdq_h, ss_t,
            ss_h, sdk_t,
            sdk_h, scale, scale_log2, sequence, tl.cast(first, tl.int32), head,
            HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, SHARED_Q, WINDOW, BIAS, DQ, False, PRECISION)  # fmt: skip
        tl.debug_barrier()  # the next key tile reads what this one stored into the scratch
    if DQ == 3:
        # Queries without keys, and the rows behind the last sequence, got no key tile that wrote their dq.
        q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, total_q)
        if (kv_len == 0) | (sequence == batch):
            row, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
            zero = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            for first in tl.range(0, q_len, BLOCK_M):
                store_rows(dq + q_start * sdq_t + head * sdq_h, first, row, columns, sdq_t, q_len, zero, HEAD_DIM)
