"""Forward kernel of v2: softmax attention over offsets, FlashAttention-2 style, in the exp2 domain.

One program owns BLOCK_M query rows of one sequence and head and walks over that sequence's keys. Keys and values come
through the copy engine where it can describe the tensors (`describable`): then one loop takes all tiles, so that the
software pipeline starts once, and a branch masks those at the ragged end or the rims of a window. Else they come by
loads, and whole tiles, which are neither predicated nor masked, have a loop of their own. Row arithmetic is 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
from . import configs

NO_BIAS, RELATIVE, TIME = 0, 1, 2


@triton.jit
def bias_bucket(i, j, t_i, t_j, buckets, BIAS: tl.constexpr):
    """Bucket of every (query, key) pair: clamp(j - i + buckets // 2), or floor(log2(1 + |t_i - t_j|))."""
    if BIAS == 1:
        return tl.minimum(tl.maximum(j - i + buckets // 2, 0), buckets - 1)
    else:
        distance = tl.abs(t_i - t_j).to(tl.float64) + 1.0
        exponent = (distance.to(tl.int64, bitcast=True) >> 52) - 1023
        return tl.minimum(exponent, buckets - 1).to(tl.int32)


@triton.jit
def _masked(s, i, j, kv_len, window, WINDOW: tl.constexpr):
    """Scores with -inf for keys past kv_len and outside the window."""
    seen = (j < kv_len)[None, :]
    if WINDOW:
        seen = seen & (tl.abs(i[:, None] - j[None, :]) <= window)
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _sweep(
    acc, l, m, q, k, v, lo, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns, sk_t, sv_t, scale_log2,
    window, table, times_k, buckets, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [lo, hi) of one sequence, BLOCK_N a step.

    MASKED: drop keys past kv_len and outside the window, 0: of no tile, 1: of every tile, 2: of the tiles outside
    [whole_lo, whole_hi).
    """
    step = tl.arange(0, BLOCK_N)
    for n in tl.range(lo, hi, BLOCK_N):
        k_tile = tile_rows(
            k, kv_start, n, head, step, columns, sk_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKED == 1
        )
        s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        j = n + step
        if BIAS != 0:
            t_j = tl.load(times_k + j, mask=j < kv_len, other=0) if BIAS == 2 else j
            bucket = bias_bucket(i[:, None], j[None, :], t_i[:, None], t_j[None, :], buckets, BIAS)
            s = s * scale_log2 + tl.load(table + bucket) * 1.4426950408889634
        if MASKED == 1:
            s = _masked(s, i, j, kv_len, window, WINDOW)
        elif MASKED == 2:
            if (n < whole_lo) | (n >= whole_hi):
                s = _masked(s, i, j, kv_len, window, WINDOW)
        if BIAS != 0:
            m_new = tl.maximum(m, tl.max(s, 1))
        else:
            m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        if MASKED != 0 and WINDOW:
            m_use = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may see no key in its first tile
        else:
            m_use = m_new
        if BIAS != 0:
            p = tl.exp2(s - m_use[:, None])
        else:
            p = tl.exp2(s * scale_log2 - m_use[:, None])
        alpha = tl.exp2(m - m_use)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_tile = tile_rows(
            v, kv_start, n, head, step, columns, sv_t, kv_len, HEAD_DIM, BLOCK_N, BLOCK_D, TMA, MASKED == 1
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, l, m


@triton.jit
def key_range(first, length, window, BLOCK: tl.constexpr, STEP: tl.constexpr, WINDOW: tl.constexpr):
    """(lo, hi, whole_lo, whole_hi) of the partners of rows first .. first + BLOCK, in steps of STEP.

    Steps outside [lo, hi) are never visited; all rows see all partners of the steps inside [whole_lo, whole_hi).
    """
    if WINDOW:
        lo = tl.maximum(first - window, 0) // STEP * STEP
        hi = tl.minimum(first + BLOCK + window, length)
        whole_lo = (tl.maximum(first + BLOCK - 1 - window, 0) + STEP - 1) // STEP * STEP
        whole_lo = tl.maximum(lo, tl.minimum(whole_lo, hi))
        whole_hi = tl.maximum(whole_lo, tl.minimum(first + window + 1, length) // STEP * STEP)
        return lo, hi, whole_lo, whole_hi
    else:
        return length * 0, length, length * 0, length // STEP * STEP


@triton.jit(do_not_specialize=["batch", "total_q", "rows", "window", "buckets"])
def forward_kernel(
    q, k, v, o, lse, tiles, count, q_offsets, kv_offsets, table, times, sq_off, skv_off, s_time, batch, total_q,
    heads, rows,
    buckets, window, sq_t, sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TAIL_N: tl.constexpr,
    SHARED_Q: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): o rows and lse of BLOCK_M queries. lse [heads, rows], natural log, +inf without keys."""
    place = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    if place >= tl.load(count):
        return
    sequence = tl.load(tiles + 2 * place.to(tl.int64))
    first = tl.load(tiles + 2 * place.to(tl.int64) + 1) * BLOCK_M
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, total_q)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, 0)
    kv_len = tl.where(sequence < batch, kv_len, 0)
    row = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    i = first + row
    q += head.to(tl.int64) * sq_h + (0 if SHARED_Q else q_start * sq_t)
    q_tile = load_rows(q, first, row, columns, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
    if not TMA:
        k += kv_start * sk_t + head.to(tl.int64) * sk_h
        v += kv_start * sv_t + head.to(tl.int64) * sv_h
    table += head * buckets
    times_k = times + kv_start * s_time
    t_i = tl.load(times + q_start * s_time + i, mask=i < q_len, other=0) if BIAS == 2 else i

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    l = tl.zeros([BLOCK_M], dtype=tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    lo, hi, whole_lo, whole_hi = key_range(first, kv_len, window, BLOCK_M, BLOCK_N, WINDOW)
    if TMA:
        acc, l, m = _sweep(
            acc, l, m, q_tile, k, v, lo, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns, sk_t, sv_t,
            scale_log2, window, table, times_k, buckets, HEAD_DIM, BLOCK_D, BLOCK_N, 2, WINDOW, BIAS, TMA,
            PRECISION)  # fmt: skip
    else:
        if WINDOW:
            acc, l, m = _sweep(
                acc, l, m, q_tile, k, v, lo, whole_lo, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns,
                sk_t, sv_t, scale_log2, window, table, times_k, buckets, HEAD_DIM, BLOCK_D, BLOCK_N, 1, True, BIAS,
                TMA, PRECISION)  # fmt: skip
        acc, l, m = _sweep(
            acc, l, m, q_tile, k, v, whole_lo, whole_hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns,
            sk_t, sv_t, scale_log2, window, table, times_k, buckets, HEAD_DIM, BLOCK_D, BLOCK_N, 0, False, BIAS, TMA,
            PRECISION)  # fmt: skip
        acc, l, m = _sweep(
            acc, l, m, q_tile, k, v, whole_hi, hi, whole_lo, whole_hi, kv_start, kv_len, head, i, t_i, columns, sk_t,
            sv_t, scale_log2, window, table, times_k, buckets, HEAD_DIM, BLOCK_D, BLOCK_N if WINDOW else TAIL_N, 1,
            WINDOW, BIAS, TMA, PRECISION)  # fmt: skip

    acc = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    store_rows(o + q_start * so_t + head.to(tl.int64) * so_h, first, row, columns, so_t, q_len, acc, HEAD_DIM)
    value = tl.where(l > 0, (m + tl.log2(l)) * 0.6931471805599453, float("inf"))
    tl.store(lse + head.to(tl.int64) * rows + q_start + i, value, mask=i < q_len)


def bias_arguments(bias, device: torch.device) -> tuple[int, torch.Tensor, torch.Tensor, int]:
    """(kind, table [H, buckets] float32, times [T], buckets) of a Bias; dummies without one."""
    if bias is None:
        nothing = torch.empty(1, dtype=torch.float32, device=device)
        return NO_BIAS, nothing, nothing, 1
    table = bias.table.detach().float().contiguous()
    if isinstance(bias.positions, str):
        return RELATIVE, table, table, table.shape[1]
    return TIME, table, bias.positions.contiguous(), table.shape[1]


def check_scale(scale: float) -> None:
    """The running maximum is scaled once a row, which needs a scale that keeps the order of the scores."""
    if not scale >= 0:
        raise ValueError(f"jagged_attention: scale is {scale}; the Triton kernels allow scale >= 0")


def query_rows(q: torch.Tensor, q_offsets: torch.Tensor | None, kv_offsets: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(offsets, rows) of the output: q's own, or for shared queries [Lq, H, D] those of B sequences of Lq rows each."""
    if q_offsets is not None:
        return q_offsets, q.shape[0]
    batch = kv_offsets.numel() - 1
    return torch.arange(batch + 1, device=q.device, dtype=torch.int64) * q.shape[0], batch * q.shape[0]


def forward(
    q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len=None, max_kv_len=None, schedule=None, tma=None
):  # fmt: skip
    """(o, lse) of jagged softmax attention; arguments as in `api.py`. No maximum length, no synchronisation.

    tma: read k and v by descriptors (True), by loads (False), or None: by descriptors where they can be described.
    """
    check_scale(scale)
    heads, head_dim = q.shape[1], q.shape[2]
    shared = q_offsets is None
    if tma is None:
        tma = describable(k) and describable(v)
    config = configs.select(forward_phase(tma, window, q if shared else None), head_dim, q.dtype)
    row_offsets, rows = query_rows(q, q_offsets, kv_offsets)
    batch = kv_offsets.numel() - 1
    o = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if rows and heads:
        tiles, count, bound = tile_list(row_offsets, rows, config.block_m)
        kind, table, times, buckets = bias_arguments(bias, q.device)
        _, keys, values = descriptors(tma, config.block_n, k, v)
        forward_kernel[(bound * heads,)](
            q, keys, values, o, lse, tiles, count, row_offsets, kv_offsets, table, times, row_offsets.stride(0),
            kv_offsets.stride(0),
            int(kind == TIME), batch, rows, heads, rows, buckets, window if window is not None else 0,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0), o.stride(1),
            scale * LOG2E,
            HEAD_DIM=head_dim, BLOCK_D=configs.head_dim_class(head_dim), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
            TAIL_N=config.block_n if tma else config.tail, SHARED_Q=shared, WINDOW=window is not None, BIAS=kind,
            TMA=tma, PRECISION=precision_of(q.dtype),
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return (o.view(batch, q.shape[0], heads, head_dim) if shared else o), lse


def forward_phase(tma: bool, window: int | None, shared_q: torch.Tensor | None) -> str:
    """Name in `configs` of a forward pass. shared_q: queries [Lq, H, D] of all sequences, whose number is no length of
    the batch."""
    if not tma:
        return "fwd"
    if window is not None:
        return "fwd_window"
    return "fwd_few" if shared_q is not None and shared_q.shape[0] <= configs.FEW else "fwd_tma"
