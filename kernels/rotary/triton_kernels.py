"""Row kernels that touch memory once: norm of a head's columns, then rotary, either one optional; forward and backward.

A program takes ROWS rows of HEADS heads. A row is held as the two halves of its pairs (a, b), so both layouts of
pairs share the arithmetic, which is float32. The tables are read once for all heads of a program. The norm's
statistics are formed again in the backward pass from x, which it needs anyway: nothing is saved.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import load_rows, store_rows


@triton.jit
def turn(a, b, cos, sin):
    """R(theta) of the pairs (a, b)."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def load_halves(base, rows, stride, count, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Rows of [count, HEAD_DIM] as float32 halves of pairs [rows, HALF], HALF >= HEAD_DIM / 2 a power of two."""
    if INTERLEAVED:
        x = load_rows(base, count * 0, rows, tl.arange(0, 2 * HALF), stride, count, HEAD_DIM, 2 * HALF, True)
        a, b = tl.split(tl.reshape(x, [x.shape[0], HALF, 2]))
        return a.to(tl.float32), b.to(tl.float32)
    else:
        columns = tl.arange(0, HALF)
        a = load_rows(base, count * 0, rows, columns, stride, count, HEAD_DIM // 2, HALF, True)
        b = load_rows(base + HEAD_DIM // 2, count * 0, rows, columns, stride, count, HEAD_DIM // 2, HALF, True)
        return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def store_halves(
    base, rows, stride, count, a, b, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr
):
    """Inverse of load_halves, one rounding."""
    if INTERLEAVED:
        x = tl.join(a.to(base.dtype.element_ty), b.to(base.dtype.element_ty))
        x = tl.reshape(x, [a.shape[0], 2 * HALF])
        store_rows(base, count * 0, rows, tl.arange(0, 2 * HALF), stride, count, x, HEAD_DIM)
    else:
        columns = tl.arange(0, HALF)
        store_rows(base, count * 0, rows, columns, stride, count, a, HEAD_DIM // 2)
        store_rows(base + HEAD_DIM // 2, count * 0, rows, columns, stride, count, b, HEAD_DIM // 2)


@triton.jit
def standardise(a, b, eps, NORM: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Normalised halves and 1 / sigma per row. NORM: "rms" (x / sqrt(mean x^2 + eps)) or "layer" (mean removed
    first)."""
    if NORM == "layer":
        mean = ((tl.sum(a, 1) + tl.sum(b, 1)) / HEAD_DIM)[:, None]
        a = a - mean
        b = b - mean
        if 2 * HALF != HEAD_DIM:
            inside = (tl.arange(0, HALF) < HEAD_DIM // 2)[None, :]
            a = tl.where(inside, a, 0.0)
            b = tl.where(inside, b, 0.0)
    power = (tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM
    inverse = (1.0 / tl.sqrt(power + eps))[:, None]
    return a * inverse, b * inverse, inverse


@triton.jit(do_not_specialize=["rows"])
def rows_forward_kernel(
    X, Y, cos, sin, sx_t, sx_h, sy_t, sy_h, sc_t, ss_t, rows, num_heads, head_groups, eps,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """y = rotary(norm(x)); BACK turns by the negative angle (the backward pass of rotary alone)."""
    first = (tl.program_id(0) // head_groups).to(tl.int64) * ROWS
    count = tl.minimum(rows - first, ROWS).to(tl.int32)
    offs = tl.arange(0, ROWS)
    c, s = 0.0, 0.0
    if ROTARY:
        half = tl.arange(0, HALF)
        c = load_rows(cos + first * sc_t, count * 0, offs, half, sc_t, count, HEAD_DIM // 2, HALF, True)
        s = load_rows(sin + first * ss_t, count * 0, offs, half, ss_t, count, HEAD_DIM // 2, HALF, True)
        if BACK:
            s = -s
    for i in tl.static_range(HEADS):
        head = (tl.program_id(0) % head_groups) * HEADS + i
        # A group past the last head has no rows to read or write.
        here = tl.where(head < num_heads, count, 0)
        head = head.to(tl.int64)
        a, b = load_halves(X + first * sx_t + head * sx_h, offs, sx_t, here, INTERLEAVED, HEAD_DIM, HALF)
        if NORM != "none":
            a, b, _ = standardise(a, b, eps, NORM, HEAD_DIM, HALF)
        if ROTARY:
            a, b = turn(a, b, c, s)
        store_halves(Y + first * sy_t + head * sy_h, offs, sy_t, here, a, b, INTERLEAVED, HEAD_DIM, HALF)


@triton.jit(do_not_specialize=["rows"])
def rows_backward_kernel(
    DY, X, DX, cos, sin, sg_t, sg_h, sx_t, sx_h, sd_t, sd_h, sc_t, ss_t, rows, num_heads, head_groups, eps,
    NORM: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """dx of y = rotary(norm(x)): g = R(-theta) dy; dx = (g - [mean g] - n mean(g n)) / sigma with n = norm(x)."""
    first = (tl.program_id(0) // head_groups).to(tl.int64) * ROWS
    count = tl.minimum(rows - first, ROWS).to(tl.int32)
    offs = tl.arange(0, ROWS)
    c, s = 0.0, 0.0
    if ROTARY:
        half = tl.arange(0, HALF)
        c = load_rows(cos + first * sc_t, count * 0, offs, half, sc_t, count, HEAD_DIM // 2, HALF, True)
        s = load_rows(sin + first * ss_t, count * 0, offs, half, ss_t, count, HEAD_DIM // 2, HALF, True)
    for i in tl.static_range(HEADS):
        head = (tl.program_id(0) % head_groups) * HEADS + i
        here = tl.where(head < num_heads, count, 0)
        head = head.to(tl.int64)
        a, b = load_halves(X + first * sx_t + head * sx_h, offs, sx_t, here, INTERLEAVED, HEAD_DIM, HALF)
        ga, gb = load_halves(DY + first * sg_t + head * sg_h, offs, sg_t, here, INTERLEAVED, HEAD_DIM, HALF)
        if ROTARY:
            ga, gb = turn(ga, gb, c, -s)
        na, nb, inverse = standardise(a, b, eps, NORM, HEAD_DIM, HALF)
        along = ((tl.sum(ga * na, 1) + tl.sum(gb * nb, 1)) / HEAD_DIM)[:, None]
        if NORM == "layer":
            mean = ((tl.sum(ga, 1) + tl.sum(gb, 1)) / HEAD_DIM)[:, None]
            ga = ga - mean
            gb = gb - mean
        da = (ga - na * along) * inverse
        db = (gb - nb * along) * inverse
        store_halves(DX + first * sd_t + head * sd_h, offs, sd_t, here, da, db, INTERLEAVED, HEAD_DIM, HALF)
