"""JFA v1: the first jagged kernel one writes. A 2-D mask on every tile, fixed tiles, dQ by float32 atomics.

Kept as the honest start of the ladder: right on every jagged shape,
tuned nowhere. Self and cross attention only. The source
reports that its own first version was slower than padded attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..registry import Case, Implementation
from ..triton_common import load_rows, precision_of, sequence_range, store_rows, tile_list
from . import configs

BLOCK = 64
GEMMS = {"atomic": 5}
SIZES = ["batch", "total_q", "total_kv", "rows"]


@triton.jit
def _scores(q_tile, k_tile, i, j, q_len, kv_len, scale, PRECISION: tl.constexpr):
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    return tl.where((i < q_len)[:, None] & (j < kv_len)[None, :], s, float("-inf"))


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q, k, v, o, lse, tiles, count, q_offsets, kv_offsets, sq_off, skv_off, batch, total_q, heads, rows, sq_t, sq_h,
    sk_t, sk_h,
    sv_t, sv_h, so_t, so_h, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (query tile, head): online softmax with exp, mask and predicate on every tile."""
    place = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if place >= tl.load(count):
        return
    sequence = tl.load(tiles + 2 * place)
    first = tl.load(tiles + 2 * place + 1) * BLOCK
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, total_q)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, 0)
    kv_len = tl.where(sequence < batch, kv_len, 0)
    row, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    i = first + row
    q_tile = load_rows(q + q_start * sq_t + head * sq_h, first, row, columns, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
    k += kv_start * sk_t + head * sk_h
    v += kv_start * sv_t + head * sv_h
    acc = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    l = tl.zeros([BLOCK], dtype=tl.float32)
    m = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for n in tl.range(0, kv_len, BLOCK):
        k_tile = load_rows(k, n, row, columns, sk_t, kv_len, HEAD_DIM, BLOCK_D, True)
        v_tile = load_rows(v, n, row, columns, sv_t, kv_len, HEAD_DIM, BLOCK_D, True)
        s = _scores(q_tile, k_tile, i, n + row, q_len, kv_len, scale, PRECISION)
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows past the end see nothing
        p = tl.exp(s - safe[:, None])
        alpha = tl.exp(m - safe)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
        m = m_new
    acc = acc * tl.where(l > 0, 1.0 / l, 0.0)[:, None]
    store_rows(o + q_start * so_t + head * so_h, first, row, columns, so_t, q_len, acc, HEAD_DIM)
    tl.store(lse + head * rows + q_start + i, tl.where(l > 0, m + tl.log(l), float("inf")), mask=i < q_len)


@triton.jit(do_not_specialize=SIZES)
def backward_kernel(
    q, k, v, o, do, lse, dq, dk, dv, tiles, count, q_offsets, kv_offsets, sq_off, skv_off, batch, total_kv, heads,
    rows, sq_t,
    sq_h, sk_t, sk_h, sv_t, sv_h, so_t, so_h, sdo_t, sdo_h, sdq_t, sdq_h, sdk_t, sdk_h, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (key tile, head): dk, dv in registers, dq (float32) by atomics; delta again in every tile pair."""
    place = (tl.program_id(0) // heads).to(tl.int64)
    head = (tl.program_id(0) % heads).to(tl.int64)
    if place >= tl.load(count):
        return
    sequence = tl.load(tiles + 2 * place)
    first = tl.load(tiles + 2 * place + 1) * BLOCK
    q_start, q_len = sequence_range(q_offsets, sq_off, sequence, batch, 0)
    q_len = tl.where(sequence < batch, q_len, 0)
    kv_start, kv_len = sequence_range(kv_offsets, skv_off, sequence, batch, total_kv)
    row, columns = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    k_tile = load_rows(k + kv_start * sk_t + head * sk_h, first, row, columns, sk_t, kv_len, HEAD_DIM, BLOCK_D, True)
    v_tile = load_rows(v + kv_start * sv_t + head * sv_h, first, row, columns, sv_t, kv_len, HEAD_DIM, BLOCK_D, True)
    q += q_start * sq_t + head * sq_h
    o += q_start * so_t + head * so_h
    do += q_start * sdo_t + head * sdo_h
    dq += q_start * sdq_t + head * sdq_h
    acc_k = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    acc_v = tl.zeros([BLOCK, BLOCK_D], dtype=tl.float32)
    for m in tl.range(0, q_len, BLOCK):
        i = m + row
        q_tile = load_rows(q, m, row, columns, sq_t, q_len, HEAD_DIM, BLOCK_D, True)
        do_tile = load_rows(do, m, row, columns, sdo_t, q_len, HEAD_DIM, BLOCK_D, True)
        o_tile = load_rows(o, m, row, columns, so_t, q_len, HEAD_DIM, BLOCK_D, True)
        delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        row_lse = tl.load(lse + head * rows + q_start + i, mask=i < q_len, other=float("inf"))
        p = tl.exp(_scores(q_tile, k_tile, i, first + row, q_len, kv_len, scale, PRECISION) - row_lse[:, None])
        acc_v = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, acc_v, input_precision=PRECISION)
        ds = p * (tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) - delta[:, None])
        ds = ds.to(q_tile.dtype)
        acc_k = tl.dot(tl.trans(ds), q_tile, acc_k, input_precision=PRECISION)
        part = tl.dot(ds, k_tile, input_precision=PRECISION) * scale
        at = dq + tl.cast(m, tl.int64) * sdq_t + (row[:, None] * sdq_t + columns[None, :])
        tl.atomic_add(at, part, mask=(i < q_len)[:, None] & (columns < HEAD_DIM)[None, :], sem="relaxed")
    store_rows(dk + kv_start * sdk_t + head * sdk_h, first, row, columns, sdk_t, kv_len, acc_k * scale, HEAD_DIM)
    store_rows(dv + kv_start * sdk_t + head * sdk_h, first, row, columns, sdk_t, kv_len, acc_v, HEAD_DIM)


def _flags(q: torch.Tensor) -> dict:
    block = 32 if q.dtype == torch.float32 or q.shape[2] > 128 else BLOCK
    return {
        "HEAD_DIM": q.shape[2], "BLOCK_D": configs.head_dim_class(q.shape[2]), "BLOCK": block,
        "PRECISION": precision_of(q.dtype),
        "num_warps": 4,
        "num_stages": 1,
    }  # fmt: skip


def forward(q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len=None, max_kv_len=None, schedule=None):
    """(o, lse); arguments as in `api.py`, without window, bias and shared queries (see `unsupported`)."""
    rows, heads, _ = q.shape
    batch = kv_offsets.numel() - 1
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if rows and heads:
        flags = _flags(q)
        tiles, count, bound = tile_list(q_offsets, rows, flags["BLOCK"])
        forward_kernel[(bound * heads,)](
            q, k, v, o, lse, tiles, count, q_offsets, kv_offsets, q_offsets.stride(0), kv_offsets.stride(0), batch,
            rows, heads,
            rows, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *o.stride()[:2], scale, **flags,
        )  # fmt: skip
    return o, lse


def backward(
    do, q, k, v, o, lse, q_offsets, kv_offsets, *, scale, window, bias, max_q_len=None, max_kv_len=None, schedule=None
):  # fmt: skip
    """(dq, dk, dv, None). dq sums by atomics: not reproducible bit for bit."""
    rows, heads, _ = q.shape
    batch, total = kv_offsets.numel() - 1, k.shape[0]
    do = do.to(q.dtype) if do.stride(-1) == 1 else do.to(q.dtype).contiguous()
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
    if total and heads:
        flags = _flags(q)
        tiles, count, bound = tile_list(kv_offsets, total, flags["BLOCK"])
        backward_kernel[(bound * heads,)](
            q, k, v, o, do, lse, dq, dk, dv, tiles, count, q_offsets, kv_offsets, q_offsets.stride(0),
            kv_offsets.stride(0), batch,
            total, heads, rows, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *o.stride()[:2], *do.stride()[:2],
            *dq.stride()[:2], *dk.stride()[:2], scale, **flags,
        )  # fmt: skip
    return dq.to(q.dtype), dk, dv, None


def _unsupported(case: Case) -> str | None:
    return configs.unsupported(case, without=("window", "bias", "shared_q", "schedule"))


IMPLEMENTATION = Implementation("v1", forward, backward, _unsupported)
