"""GDPA backward in Triton. With s = scale q·k, p = act(s), dp = dO·v:  dv = pT dO,  ds = dp act'(s),  dq = scale ds k,
dk = scale dsT q.

split: one kernel owns query tiles and computes dq (3 GEMMs), one owns key tiles and computes dk, dv (4 GEMMs).
Nothing is shared between programs. owner: one program owns a (sequence, head), keeps dk, dv of a key tile in
registers, loops over queries (5 GEMMs) and alone adds up dq, in float32, without atomics; with a single key tile dq
is written once, in its own type. Rows past the ends are zeros in q, k, v and dO: dp = 0 there, so act'(0) != 0 does
no harm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import load_rows, sequence_range, store_rows, tile_rows
from .triton_activations import activation_and_slope, activation_slope
from .triton_forward import key_range, query_range

SIZES = ["num_sequences", "q_rows", "kv_rows"]  # change with every batch: not worth a kernel of their own


@triton.jit(do_not_specialize=SIZES[:2])
def dq_kernel(
    DO, Q, K, V, DQ, q_offsets, kv_offsets, tiles, count,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdq_t, sdq_h, s_qo, s_ko, num_sequences, q_rows, num_heads, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq of one query tile. DQ has the rows of o (shared queries: one gradient a sequence, summed afterwards)."""
    slot = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    if slot < tl.load(count):
        sequence = tl.load(tiles + slot * 2)
        first = tl.load(tiles + slot * 2 + 1) * BLOCK_M
        q_start, o_start, q_len = query_range(q_offsets, s_qo, sequence, num_sequences, q_rows, SHARED_Q)
        k_start, k_len = key_range(kv_offsets, s_ko, sequence, num_sequences)
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        if not TMA:
            K += k_start * sk_t + head * sk_h
            V += k_start * sv_t + head * sv_h
        q = load_rows(Q + q_start * sq_t + head * sq_h, first, offs_m, offs_d, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
        do = load_rows(DO + o_start * sg_t + head * sg_h, first, offs_m, offs_d, sg_t, q_len, HEAD_DIM, BLOCK_D, True)
        dq = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        for n in tl.range(0, k_len, BLOCK_N, num_stages=STAGES):
            k = tile_rows(K, k_start, n, head, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True)
            v = tile_rows(V, k_start, n, head, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True)
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            if SCALED:
                s = s * scale
            ds = (dp * activation_slope(s, KIND, FAST)).to(Q.dtype.element_ty)
            dq = tl.dot(ds, k, dq, input_precision=PRECISION)
        if SCALED:
            dq = dq * scale
        store_rows(DQ + o_start * sdq_t + head * sdq_h, first, offs_m, offs_d, sdq_t, q_len, dq, HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def dkdv_kernel(
    DO, Q, K, V, DK, DV, q_offsets, kv_offsets, tiles, count,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdk_t, sdk_h, sdv_t, sdv_h, s_qo, s_ko,
    num_sequences, q_rows, kv_rows, num_heads, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv of one key tile."""
    slot = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    if slot < tl.load(count):
        sequence = tl.load(tiles + slot * 2)
        first = tl.load(tiles + slot * 2 + 1) * BLOCK_N
        k_start, k_len = sequence_range(kv_offsets, s_ko, sequence, num_sequences, kv_rows)
        q_start, o_start, q_len = query_range(q_offsets, s_qo, sequence, num_sequences, q_rows, SHARED_Q)
        q_len = tl.where(sequence < num_sequences, q_len, 0)
        offs_m = tl.arange(0, BLOCK_M)
        offs_n = tl.arange(0, BLOCK_N)
        offs_d = tl.arange(0, BLOCK_D)
        if not TMA:
            Q += q_start * sq_t + head * sq_h
            DO += o_start * sg_t + head * sg_h
        k = load_rows(K + k_start * sk_t + head * sk_h, first, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_D, True)
        v = load_rows(V + k_start * sv_t + head * sv_h, first, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_D, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        for m in tl.range(0, q_len, BLOCK_M, num_stages=STAGES):
            q = tile_rows(Q, q_start, m, head, offs_m, offs_d, sq_t, q_len, HEAD_DIM, BLOCK_M, BLOCK_D, TMA, True)
            do = tile_rows(DO, o_start, m, head, offs_m, offs_d, sg_t, q_len, HEAD_DIM, BLOCK_M, BLOCK_D, TMA, True)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if SCALED:
                s = s * scale
            p, slope = activation_and_slope(s, KIND, FAST)
            dv = tl.dot(p.to(K.dtype.element_ty), do, dv, input_precision=PRECISION)
            ds = (dp * slope).to(K.dtype.element_ty)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if SCALED:
            dk = dk * scale
        store_rows(DK + k_start * sdk_t + head * sdk_h, first, offs_n, offs_d, sdk_t, k_len, dk, HEAD_DIM)
        store_rows(DV + k_start * sdv_t + head * sdv_h, first, offs_n, offs_d, sdv_t, k_len, dv, HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def owner_kernel(
    DO, Q, K, V, DQ, SUM, DK, DV, q_offsets, kv_offsets, order,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdq_t, sdq_h, ss_t, ss_h, sdk_t, sdk_h, sdv_t, sdv_h, s_qo, s_ko,
    num_sequences, q_rows, kv_rows, num_heads, scale,
    KIND: tl.constexpr, FAST: tl.constexpr, SCALED: tl.constexpr, SHARED_Q: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SINGLE: tl.constexpr,
):  # fmt: skip
    """All gradients of one (sequence, head). SUM is the float32 running dq; SINGLE promises one key tile and no SUM.

    Programs num_sequences and num_sequences + 1 write the zeros past the last query and past the last key. Where SINGLE
    is wrong for a sequence, its gradients are NaN.
    """
    index = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    sequence = tl.load(order + index, mask=index < num_sequences, other=0)
    sequence = tl.where(index < num_sequences, sequence, index)
    real = sequence < num_sequences
    row = tl.minimum(sequence, num_sequences)
    q_start, o_start, q_len = query_range(q_offsets, s_qo, row, num_sequences, q_rows, SHARED_Q)
    k_start, k_len = sequence_range(kv_offsets, s_ko, row, num_sequences, kv_rows)
    if SHARED_Q:
        q_len = tl.where(real, q_len, 0)
    q_len = tl.where(sequence == num_sequences + 1, 0, q_len)
    k_len = tl.where(sequence == num_sequences, 0, k_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    q_base = Q + q_start * sq_t + head * sq_h
    g_base = DO + o_start * sg_t + head * sg_h
    dq_base = DQ + o_start * sdq_t + head * sdq_h
    sum_base = SUM + o_start * ss_t + head * ss_h
    k_base = K + k_start * sk_t + head * sk_h
    v_base = V + k_start * sv_t + head * sv_h
    dk_base = DK + k_start * sdk_t + head * sdk_h
    dv_base = DV + k_start * sdv_t + head * sdv_h
    poison = 0.0
    if SINGLE:
        poison = tl.where(real & (k_len > BLOCK_N), float("nan"), 0.0)

    if k_len == 0:
        for m in tl.range(0, q_len, BLOCK_M, num_stages=1):
            nothing = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
            store_rows(dq_base, m, offs_m, offs_d, sdq_t, q_len, nothing, HEAD_DIM)

    for n in tl.range(0, k_len, BLOCK_N, num_stages=1):
        k = load_rows(k_base, n, offs_n, offs_d, sk_t, k_len, HEAD_DIM, BLOCK_D, True)
        v = load_rows(v_base, n, offs_n, offs_d, sv_t, k_len, HEAD_DIM, BLOCK_D, True)
        dk = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], dtype=tl.float32)
        for m in tl.range(0, q_len, BLOCK_M, num_stages=STAGES):
            q = load_rows(q_base, m, offs_m, offs_d, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
            do = load_rows(g_base, m, offs_m, offs_d, sg_t, q_len, HEAD_DIM, BLOCK_D, True)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
            if SCALED:
                s = s * scale
            p, slope = activation_and_slope(s, KIND, FAST)
            dv = tl.dot(p.to(DO.dtype.element_ty), do, dv, input_precision=PRECISION)
            ds = (dp * slope).to(Q.dtype.element_ty)
            dk = tl.dot(ds, q, dk, input_precision=PRECISION)
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            if SCALED:
                dq = dq * scale
            if SINGLE:
                store_rows(dq_base, m, offs_m, offs_d, sdq_t, q_len, dq + poison, HEAD_DIM)
            else:
                # Only this program touches these rows of SUM; the barrier below orders one key tile after another.
                known = tl.where(n > 0, q_len, 0)
                dq += load_rows(sum_base, m, offs_m, offs_d, ss_t, known, HEAD_DIM, BLOCK_D, True)
                last = n + BLOCK_N >= k_len
                store_rows(sum_base, m, offs_m, offs_d, ss_t, tl.where(last, 0, q_len), dq, HEAD_DIM)
                store_rows(dq_base, m, offs_m, offs_d, sdq_t, tl.where(last, q_len, 0), dq, HEAD_DIM)
        if not SINGLE:
            tl.debug_barrier()
        if SCALED:
            dk = dk * scale
        store_rows(dk_base, n, offs_n, offs_d, sdk_t, k_len, dk + poison, HEAD_DIM)
        store_rows(dv_base, n, offs_n, offs_d, sdv_t, k_len, dv + poison, HEAD_DIM)
