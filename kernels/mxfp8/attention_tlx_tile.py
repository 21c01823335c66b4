"""What a thread computes from a tile of 64 queries x 128 keys of 8-bit attention: weights, their operand, the sum.

P is quantised in registers. Softmax: exp2(s - running maximum) lies in [0, 1] and is stored times 2^8, below E4M3's
largest element 448 and with 2^-9 / 2^8 its smallest; the sum of the row carries the same factor. GDPA: |act(s)| <= |s|
<= |q| |k|, so a power of two per row from the norms keeps every element in range. wgmma adds 8-bit products with about
14 bits, so every value product starts from zero and is added to a float32 accumulator here.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
