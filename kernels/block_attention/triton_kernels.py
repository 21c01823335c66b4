"""Block attention in Triton: one program takes a block of a few heads, holds it whole and touches memory once.

No loop over keys, no running maximum, no log-sum-exp and no pass for D: a row's scores are all there, so D =
rowsum(P dP) comes from the block itself and o is not read in the backward pass.

Rotary: a tile is split into the two halves of its pairs, turned in float32 and joined again before it goes to shared
memory; gradients are split, turned back in float32 and stored once. Interleaved pairs are neighbours in a thread's
registers; half pairs are two loads and two stores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import LOG2E, load_rows, sequence_range, store_rows

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def _turn(a, b, cos, sin):
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _tables(cos, sin, first, rows, stride_c, stride_s, length, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    half = tl.arange(0, BLOCK_D // 2)
    c = load_rows(cos, first, rows, half, stride_c, length, HEAD_DIM // 2, BLOCK_D // 2, True)
    s = load_rows(sin, first, rows, half, stride_s, length, HEAD_DIM // 2, BLOCK_D // 2, True)
    return c, s


@triton.jit
def load_turned(
    base, first, rows, stride, length, c, s, ROTARY: tl.constexpr, ON: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile [rows, BLOCK_D], turned if ON; zeros past `length`. With "half" pairs and a padded head size the
    columns of every tile are a, padding, b, padding: an order that products do not notice and `store_turned_back`
    undoes."""
    if (ROTARY == "half") and (ON or (HEAD_DIM != BLOCK_D)):
        half = tl.arange(0, BLOCK_D // 2)
        a = load_rows(base, first, rows, half, stride, length, HEAD_DIM // 2, BLOCK_D // 2, True)
        b = load_rows(base + HEAD_DIM // 2, first, rows, half, stride, length, HEAD_DIM // 2, BLOCK_D // 2, True)
        if ON:
            a, b = _turn(a.to(tl.float32), b.to(tl.float32), c, s)
        x = tl.join(a.to(base.dtype.element_ty), b.to(base.dtype.element_ty))
        return tl.reshape(tl.permute(x, (0, 2, 1)), [x.shape[0], BLOCK_D])
    else:
        x = load_rows(base, first, rows, tl.arange(0, BLOCK_D), stride, length, HEAD_DIM, BLOCK_D, True)
        if (ROTARY == "interleaved") and ON:
            a, b = tl.split(tl.reshape(x, [x.shape[0], BLOCK_D // 2, 2]))
            a, b = _turn(a.to(tl.float32), b.to(tl.float32), c, s)
            x = tl.join(a.to(base.dtype.element_ty), b.to(base.dtype.element_ty))
            x = tl.reshape(x, [x.shape[0], BLOCK_D])
        return x


@triton.jit
def store_turned_back(
    base, first, rows, stride, length, x, cos, sin, stride_c, stride_s, known, ROTARY: tl.constexpr, ON: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store a float32 tile whose columns are those of `load_turned`, turned back first if ON."""
    if (ROTARY == "half") and (ON or (HEAD_DIM != BLOCK_D)):
        a, b = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, BLOCK_D // 2]), (0, 2, 1)))
        if ON:
            c, s = _tables(cos, sin, first, rows, stride_c, stride_s, known, HEAD_DIM, BLOCK_D)
            a, b = _turn(a, b, c, -s)
        half = tl.arange(0, BLOCK_D // 2)
        store_rows(base, first, rows, half, stride, length, a, HEAD_DIM // 2)
        store_rows(base + HEAD_DIM // 2, first, rows, half, stride, length, b, HEAD_DIM // 2)
    else:
        if (ROTARY == "interleaved") and ON:
            a, b = tl.split(tl.reshape(x, [x.shape[0], BLOCK_D // 2, 2]))
            c, s = _tables(cos, sin, first, rows, stride_c, stride_s, known, HEAD_DIM, BLOCK_D)
            a, b = _turn(a, b, c, -s)
            x = tl.join(a.to(base.dtype.element_ty), b.to(base.dtype.element_ty))
            x = tl.reshape(x, [x.shape[0], BLOCK_D])
        store_rows(base, first, rows, tl.arange(0, BLOCK_D), stride, length, x, HEAD_DIM)


@triton.jit
def _weights(s, count, scale):
    """Softmax over the first `count` columns of the block's scores; (exp2 values, row sums)."""
    columns = tl.arange(0, s.shape[1])
    s = tl.where((columns < count)[None, :], s * (scale * _LOG2E), float("-inf"))
    p = tl.exp2(s - tl.max(s, 1)[:, None])
    return p, tl.sum(p, 1)


@triton.jit(do_not_specialize=["num_sequences", "total"])
def forward_kernel(
    Q, K, V, O, cos, sin, offsets, tiles, count,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sc_t, ss_t, s_off, num_sequences, total, num_heads, head_groups,
    scale, ROTARY: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one block a program."""
    slot = tl.program_id(0) // head_groups
    if slot < tl.load(count):
        sequence = tl.load(tiles + slot * 2)
        first = tl.load(tiles + slot * 2 + 1) * BLOCK
        start, length = sequence_range(offsets, s_off, sequence, num_sequences, total)
        real = sequence < num_sequences
        # Rows past the last sequence: nothing is read, so weights meet values of zero and zeros are written.
        known = tl.where(real, length, 0)
        keys = tl.where(real, length - first, BLOCK)
        rows = tl.arange(0, BLOCK)
        Q += start * sq_t
        K += start * sk_t
        V += start * sv_t
        O += start * so_t
        cos += start * sc_t
        sin += start * ss_t
        begin = (tl.program_id(0) % head_groups) * HEADS
        for head in tl.range(begin, tl.minimum(begin + HEADS, num_heads), num_stages=STAGES):
            h = (begin * 0 + head).to(tl.int64)
            c, s = 0.0, 0.0
            if ROTARY != "none":
                c, s = _tables(cos, sin, first, rows, sc_t, ss_t, known, HEAD_DIM, BLOCK_D)
            q = load_turned(Q + h * sq_h, first, rows, sq_t, known, c, s, ROTARY, ON_Q, HEAD_DIM, BLOCK_D)
            k = load_turned(K + h * sk_h, first, rows, sk_t, known, c, s, ROTARY, ON_K, HEAD_DIM, BLOCK_D)
            v = load_turned(V + h * sv_h, first, rows, sv_t, known, c, s, ROTARY, ON_V, HEAD_DIM, BLOCK_D)
            p, norm = _weights(tl.dot(q, tl.trans(k), input_precision=PRECISION), keys, scale)
            o = tl.dot(p.to(V.dtype.element_ty), v, input_precision=PRECISION) / norm[:, None]
            store_turned_back(
                O + h * so_h, first, rows, so_t, length, o, cos, sin, sc_t, ss_t, known, ROTARY, False, HEAD_DIM,
                BLOCK_D
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_sequences", "total"])
def backward_kernel(
    DO, Q, K, V, DQ, DK, DV, cos, sin, offsets, tiles, count,
    sg_t, sg_h, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, sdq_t, sdq_h, sdk_t, sdk_h, sdv_t, sdv_h, sc_t, ss_t, s_off,
    num_sequences, total, num_heads, head_groups, scale,
    ROTARY: tl.constexpr, ON_Q: tl.constexpr, ON_K: tl.constexpr, ON_V: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All three gradients of HEADS heads of one block; reads q, k, v, dO and writes dq, dk, dv once each."""
    slot = tl.program_id(0) // head_groups
    if slot < tl.load(count):
        sequence = tl.load(tiles + slot * 2)
        first = tl.load(tiles + slot * 2 + 1) * BLOCK
        start, length = sequence_range(offsets, s_off, sequence, num_sequences, total)
        real = sequence < num_sequences
        known = tl.where(real, length, 0)
        keys = tl.where(real, length - first, BLOCK)
        rows = tl.arange(0, BLOCK)
        DO += start * sg_t
        Q += start * sq_t
        K += start * sk_t
        V += start * sv_t
        DQ += start * sdq_t
        DK += start * sdk_t
        DV += start * sdv_t
        cos += start * sc_t
        sin += start * ss_t
        begin = (tl.program_id(0) % head_groups) * HEADS
        for head in tl.range(begin, tl.minimum(begin + HEADS, num_heads), num_stages=STAGES):
            h = (begin * 0 + head).to(tl.int64)
            c, s = 0.0, 0.0
            if ROTARY != "none":
                c, s = _tables(cos, sin, first, rows, sc_t, ss_t, known, HEAD_DIM, BLOCK_D)
            q = load_turned(Q + h * sq_h, first, rows, sq_t, known, c, s, ROTARY, ON_Q, HEAD_DIM, BLOCK_D)
            k = load_turned(K + h * sk_h, first, rows, sk_t, known, c, s, ROTARY, ON_K, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            v = load_turned(V + h * sv_h, first, rows, sv_t, known, c, s, ROTARY, ON_V, HEAD_DIM, BLOCK_D)
            do = load_turned(DO + h * sg_h, first, rows, sg_t, known, c, s, ROTARY, False, HEAD_DIM, BLOCK_D)
            p, norm = _weights(scores, keys, scale)
            p = p / norm[:, None]
            # Rows past the end have dO = 0: dp = 0, so ds = 0, and p meets zeros in dv.
            dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(Q.dtype.element_ty)
            dv = tl.dot(tl.trans(p.to(DO.dtype.element_ty)), do, input_precision=PRECISION)
            store_turned_back(
                DV + h * sdv_h, first, rows, sdv_t, length, dv, cos, sin, sc_t, ss_t, known, ROTARY, ON_V, HEAD_DIM,
                BLOCK_D
            )  # fmt: skip
            dk = tl.dot(tl.trans(ds), q, input_precision=PRECISION)
            store_turned_back(
                DK + h * sdk_h, first, rows, sdk_t, length, dk, cos, sin, sc_t, ss_t, known, ROTARY, ON_K, HEAD_DIM,
                BLOCK_D
            )  # fmt: skip
            dq = tl.dot(ds, k, input_precision=PRECISION)
            store_turned_back(
                DQ + h * sdq_h, first, rows, sdq_t, length, dq, cos, sin, sc_t, ss_t, known, ROTARY, ON_Q, HEAD_DIM,
                BLOCK_D
            )  # fmt: skip
