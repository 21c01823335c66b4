"""The specification of jagged attention: one sequence at a time, in plain torch that autograd can follow.

Per sequence and head: s = scale * q k^T + bias, masked to |i - j| <= window; p = softmax(s); o = p v. Backward, from
dO: dv = p^T dO; dp = dO v^T; ds = p (dp - rowsum(dO * o)); dq = scale * ds k; dk = scale * ds^T q; the gradient of a
bias entry is the sum of ds over the pairs that used it.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..jagged import host_offsets
from ..registry import Implementation
from ..validation import accumulation_dtype, strict_float32
from .bias import Bias


def _spans(q, q_offsets, kv_offsets) -> list[tuple[int, int, int, int]]:
    """(first query row, one past the last, first key row, one past the last) of every sequence."""
    kv = host_offsets(kv_offsets).tolist()
    if q_offsets is None:
        return [(0, q.shape[0], start, stop) for start, stop in pairwise(kv)]
    rows = host_offsets(q_offsets).tolist()
    return [(*queries, *keys) for queries, keys in zip(pairwise(rows), pairwise(kv), strict=True)]


def _scores(q, k, *, scale: float, window: int | None, bias: Bias | None, times) -> torch.Tensor:
    """Masked scores [H, Lq, Lk] of one sequence; q and k are [L, H, D]."""
    scores = torch.einsum("ihd,jhd->hij", q, k) * scale
    i, j = (torch.arange(x.shape[0], device=q.device) for x in (q, k))
    if bias is not None:
        bucket = bias.relative_bucket(i, j) if times is None else bias.time_bucket(times, times)
        scores = scores + bias.table.to(scores.dtype)[:, bucket]
    if window is not None:
        scores = scores.masked_fill((i[:, None] - j[None, :]).abs() > window, float("-inf"))
    return scores


def attention(
    q, k, v, q_offsets, kv_offsets, *, scale: float, window: int | None = None, bias: Bias | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) of the whole batch, differentiable by autograd. Shapes as in jfa/api.py."""
    dtype = accumulation_dtype(q.dtype)
    num_heads = q.shape[1]
    spans = _spans(q, q_offsets, kv_offsets)
    out, lse, end = [], [], 0
    for q0, q1, k0, k1 in spans:
        if k1 == k0 or q1 == q0:  # nothing to attend to: zeros
            out.append(q.new_zeros(q1 - q0, *q.shape[1:], dtype=dtype))
            lse.append(q.new_full((num_heads, q1 - q0), float("inf"), dtype=dtype))
        else:
            times = None if bias is None or bias.times is None else bias.times[k0:k1]
            qb, kb, vb = q[q0:q1].to(dtype), k[k0:k1].to(dtype), v[k0:k1].to(dtype)
            scores = _scores(qb, kb, scale=scale, window=window, bias=bias, times=times)
            out.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), vb))
            lse.append(scores.logsumexp(-1))
        end = q1
    tail = 0 if q_offsets is None else q.shape[0] - end
    out.append(q.new_zeros(tail, *q.shape[1:], dtype=dtype))
    lse.append(q.new_full((num_heads, tail), float("inf"), dtype=dtype))
    o = torch.cat(out).to(q.dtype)
    return o if q_offsets is not None else o.view(len(spans), *q.shape), torch.cat(lse, dim=1)


def forward(q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    with strict_float32():
        return attention(q, k, v, q_offsets, kv_offsets, scale=scale, window=window, bias=bias)


def backward(do, q, k, v, o, lse, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    dtable = None if bias is None else torch.zeros_like(bias.table, dtype=dtype)
    with strict_float32():
        for b, (q0, q1, k0, k1) in enumerate(_spans(q, q_offsets, kv_offsets)):
            if k1 == k0 or q1 == q0:
                continue
            times = None if bias is None or bias.times is None else bias.times[k0:k1]
            dob, ob = (x[b] if q_offsets is None else x[q0:q1] for x in (do.to(dtype), o.to(dtype)))
            qb, kb, vb = q[q0:q1].to(dtype), k[k0:k1].to(dtype), v[k0:k1].to(dtype)
            p = _scores(qb, kb, scale=scale, window=window, bias=bias, times=times).softmax(-1)
            dp = torch.einsum("ihd,jhd->hij", dob, vb)
            ds = p * (dp - (dob * ob).sum(-1).t().unsqueeze(-1))
            dv[k0:k1] = torch.einsum("hij,ihd->jhd", p, dob)
            dk[k0:k1] = torch.einsum("hij,ihd->jhd", ds, qb) * scale
            dq[q0:q1] += torch.einsum("hij,jhd->ihd", ds, kb) * scale
            if bias is not None:
                i, j = (torch.arange(n, device=q.device) for n in (q1 - q0, k1 - k0))
                bucket = bias.relative_bucket(i, j) if times is None else bias.time_bucket(times, times)
                dtable.index_add_(1, bucket.flatten(), ds.flatten(1))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dtable if bias is None else dtable.to(bias.table.dtype)


IMPLEMENTATION = Implementation("reference", forward, backward, lambda case: None)
