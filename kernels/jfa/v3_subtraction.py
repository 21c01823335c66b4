"""JFA v3: no mask in the loop; zero-filled tails, whose surplus exponentials the denominator gives back.

The source: a 2-D mask costs about 28 % of the executed instructions, so keys and queries outside the sequence are read
as zeros and the surplus is taken off the denominator. Zeros come from the copy engine (one descriptor a tensor, with
the sequence as its extent, so that nothing of a neighbour is read), or from predicated loads where a descriptor cannot
describe the tensor. A zero key scores 0, so with the row's maximum m (which then includes 0) each of the n_pad surplus
keys added exp(0 - m) to the denominator, and nothing to the numerator, whose v rows are zeros too. One loop takes all
tiles, the ragged one with them; the surplus is subtracted once, behind it.

Domain: subtracting cancels digits, so it is done only while every row of the tile keeps more than 2^-8 of the
subtracted mass; otherwise the program walks over its keys once more, with a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..registry import Case, Implementation
from ..triton_common import (
    LOG2E,
    describable,
    descriptors,
    load_rows,
    precision_of,
    sequence_range,
    store_rows,
    tile_list,
    tile_rows,
)
from . import configs, triton_schemes
from .triton_forward import check_scale, forward_phase, query_rows

MASKINGS = ("mask2d", "subtraction", "none")
DEFAULT_SCHEME = "split"
# Least remainder kept, as a share of the subtracted mass. 2^-8 costs 8 of float32's 24 bits: nothing beside 16-bit
# inputs. A float32 call wants all of its bits, so it subtracts only where the surplus is the small part.
FLOOR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-8, torch.float32: 4.0}


@triton.jit
def _softmax_step(s, acc, l, m, scale_log2):
    """New (p, acc, l, m) after a tile of scores; acc is rescaled, the product with v is the caller's."""
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    return p, acc * alpha[:, None], l * alpha + tl.sum(p, 1), m_new


@triton.jit(do_not_specialize=["batch", "total_q", "rows"])
def forward_kernel(
    q, k, v, o, lse, tiles, count, q_offsets, kv_offsets, sq_off, skv_off, batch, total_q, heads, rows,
    sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED_Q: tl.constexpr,
    MASKING: tl.constexpr, TMA: tl.constexpr, FLOOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, head). MASKING 0: none (whole tiles only), 1: 2-D mask on every tile, 2: subtraction."""
    place = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    if place >= tl.load(count):
        return
    sequence = tl.load(tiles + 2 * place.to(tl.int64))
    first = tl.load(tiles + 2 * place.to(tl.int64) + 1) * BLOCK_M
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, total_q)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, 0)
    kv_len = tl.where(sequence < batch, kv_len, 0)
    row, columns, step = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    long_head = head.to(tl.int64)
    q += long_head * sq_h + (0 if SHARED_Q else q_start * sq_t)
    q_tile = load_rows(q, first, row, columns, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
    if not TMA:
        k += kv_start * sk_t + long_head * sk_h
        v += kv_start * sv_t + long_head * sv_h

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    # Without a mask no ragged rest may be visited; with subtraction it is, its surplus keys being zeros.
    end = kv_len // BLOCK_N * BLOCK_N if MASKING == 0 else kv_len
    for n in tl.range(0, end, BLOCK_N):
        k_tile = tile_rows(
            k, kv_start, n, head, step, columns, sk_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKING != 0
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if MASKING == 1:
            s = tl.where((first + row < q_len)[:, None] & (n + step < kv_len)[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
            m_new = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            acc, l, m = acc * alpha[:, None], l * alpha + tl.sum(p, 1), m_new
        else:
            p, acc, l, m = _softmax_step(s, acc, l, m, scale_log2)
        v_tile = tile_rows(
            v, kv_start, n, head, step, columns, sv_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKING != 0
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    if MASKING == 2:
        spare = (kv_len + BLOCK_N - 1) // BLOCK_N * BLOCK_N - kv_len
        surplus = spare.to(tl.float32) * tl.exp2(-m)
        if spare > 0:
            l -= surplus
            if tl.min(l - surplus * FLOOR, 0) <= 0:
                acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
                l = tl.zeros([BLOCK_M], dtype=tl.float32)
                m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                for n in tl.range(0, kv_len, BLOCK_N, num_stages=1):
                    k_tile = tile_rows(
                        k, kv_start, n, head, step, columns, sk_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True
                    )
                    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    s = tl.where((n + step < kv_len)[None, :], s, float("-inf"))
                    p, acc, l, m = _softmax_step(s, acc, l, m, scale_log2)
                    v_tile = tile_rows(
                        v, kv_start, n, head, step, columns, sv_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, True
                    )
                    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)

    acc = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    store_rows(o + q_start * so_t + long_head * so_h, first, row, columns, so_t, q_len, acc, HEAD_DIM)
    value = tl.where(l > 0, (m + tl.log2(l)) * 0.6931471805599453, float("inf"))
    tl.store(lse + long_head * rows + q_start + first + row, value, mask=first + row < q_len)


def masked_forward(q, k, v, q_offsets, kv_offsets, *, scale, masking="subtraction", tma=None):
    """(o, lse) with one of three ways of masking, for measuring what a mask costs (figure F05).

    masking: "mask2d", a 2-D -inf mask on every tile; "subtraction"; "none", which is right only where every sequence's
    number of keys is a multiple of the key tile (the caller vouches for it; a ragged rest would be ignored). tma: True,
    False, or None = where both k and v can be described to the copy engine.
    """
    if masking not in MASKINGS:
        raise ValueError(f"masked_forward: unknown masking {masking!r}; allowed: {', '.join(MASKINGS)}")
    check_scale(scale)
    heads, head_dim = q.shape[1], q.shape[2]
    shared = q_offsets is None
    if tma is None:
        tma = describable(k) and describable(v)
    config = configs.select(forward_phase(tma, None, q if shared else None), head_dim, q.dtype)
    row_offsets, rows = query_rows(q, q_offsets, kv_offsets)
    batch = kv_offsets.numel() - 1
    o = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if rows and heads:
        tiles, count, bound = tile_list(row_offsets, rows, config.block_m)
        block_d = configs.head_dim_class(head_dim)
        _, keys, values = descriptors(tma, config.block_n, k, v)
        forward_kernel[(bound * heads,)](
            q, keys, values, o, lse, tiles, count, row_offsets, kv_offsets, row_offsets.stride(0),
            kv_offsets.stride(0), batch, rows, heads, rows,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *o.stride()[:2], scale * LOG2E,
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_M=config.block_m, BLOCK_N=config.block_n, SHARED_Q=shared,
            MASKING=("none", "mask2d", "subtraction").index(masking), TMA=tma,
            FLOOR=FLOOR[q.dtype], PRECISION=precision_of(q.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return (o.view(batch, q.shape[0], heads, head_dim) if shared else o), lse


def forward(q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len=None, max_kv_len=None, schedule=None):
    """(o, lse); arguments as in `api.py`, without window and bias (see `unsupported`)."""
    return masked_forward(q, k, v, q_offsets, kv_offsets, scale=scale)


def backward(*args, scheme=DEFAULT_SCHEME, **kwargs):
    """(dq, dk, dv, None) by the named scheme, see `triton_schemes.py`. No mask: padded rows load lse = +inf."""
    return triton_schemes.backward(*args, scheme=scheme, **kwargs)


def _unsupported(case: Case) -> str | None:
    return configs.unsupported(case, without=("window", "bias", "schedule"))


GEMMS = triton_schemes.GEMMS
IMPLEMENTATION = Implementation("v3", forward, backward, _unsupported)
__all__ = ["GEMMS", "IMPLEMENTATION", "MASKINGS", "backward", "describable", "forward", "masked_forward"]
