"""Jagged attention in vectorised torch: batched matrix products over groups of sequences of like length.

How packed rows become batches, and why a sequence's result then ignores its batch-mates to the last bit, is in
padded_batch.py. A group is scored, exponentiated in place relative to the row maximum, multiplied with V and divided
by the row sum, as a fused kernel does it; the backward recomputes p = exp(s - lse).

float32 and float64 are computed as they are, never in TF32. bfloat16 and float16 round where a fused kernel rounds: p
and ds to the input's dtype before their products; scores, sums and accumulators stay float32.

Memory: the scores of one chunk (2 MB on a CPU, or one sequence if that is more: H * L^2 elements), three such buffers
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..jagged import host_offsets
from ..padded_batch import chunks, empty_table, length_class, put, row_index, table, take, whole_vectors
from ..registry import Implementation
from ..validation import accumulation_dtype, strict_float32
from .bias import Bias

_PIECE = 32768  # torch hands at most this many elements to one thread


class _Group(NamedTuple):
    """Sequences of one class: table indices [n, H, size] of queries, outputs and keys, and what their scores need."""

    queries: Tensor
    outputs: Tensor
    keys: Tensor
    hidden: Tensor | None  # bool, broadcasts to [n, H, Lq, Lk]: pairs outside the sequence or the window
    bucket: Tensor | None  # bias bucket, [Lq, Lk] or [n, Lq, Lk]


def _spans(offsets: Tensor) -> tuple[Tensor, Tensor]:
    ends = host_offsets(offsets).long()
    return ends[:-1], ends.diff()


def _outside(i: Tensor, j: Tensor, window: int) -> Tensor:
    """Pairs [Lq, Lk] farther apart than the window, on either side."""
    return (i[:, None] - j).abs() > window


def _groups(q, k, q_offsets, kv_offsets, window: int | None, bias: Bias | None) -> Iterator[_Group]:
    device, shared = q.device, q_offsets is None
    k_starts, k_lengths = _spans(kv_offsets)
    if shared:
        q_lengths = torch.full_like(k_lengths, q.shape[0])
        q_starts, o_starts = torch.zeros_like(q_lengths), torch.arange(len(q_lengths)) * q.shape[0]
    else:
        q_starts, q_lengths = _spans(q_offsets)
    sizes = length_class(q_lengths) << 32 | length_class(k_lengths)
    classes, class_of = torch.unique(sizes, return_inverse=True)
    for number, code in enumerate(classes.tolist()):
        q_size, k_size = code >> 32, code & 0xFFFFFFFF
        unit = q.shape[1] * q_size * k_size
        if unit == 0:
            continue  # nothing to attend to: the zeros that the outputs start with
        for own in chunks((class_of == number).nonzero().flatten(), unit, device):
            batch = whole_vectors(len(own), unit, device)
            queries = outputs = row_index(q_starts[own], q_lengths[own], q_size, batch, q)
            if shared:
                outputs = row_index(o_starts[own], q_lengths[own], q_size, batch, q, len(q_lengths) * q.shape[0])
            keys = row_index(k_starts[own], k_lengths[own], k_size, batch, k)
            i, j = torch.arange(q_size, device=device), torch.arange(k_size, device=device)
            hidden = None
            if bool((k_lengths[own] < k_size).any()):
                hidden = keys[:, :1, None] == k.shape[0] * k.shape[1]
            if window is not None and window < q_size - 1:
                outside = _outside(i, j, window)
                hidden = outside if hidden is None else hidden | outside
            bucket = None
            if bias is not None and bias.times is None:
                bucket = bias.relative_bucket(i, j)
            elif bias is not None:
                times = torch.cat([bias.times, bias.times.new_zeros(1)])[keys[:, 0] // k.shape[1]]
                bucket = bias.time_bucket(times, times)
            yield _Group(queries, outputs, keys, hidden, bucket)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, H, M, K] @ [n, H, K, N], accumulated and returned in float32 (float64). dtype: of the op's inputs.

    An operand computed in float32 is first rounded to a half dtype, in which a kernel's matrix unit would take it.
    """
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    if dtype not in (torch.bfloat16, torch.float16):
        out = torch.bmm(a, b)
    elif a.device.type == "cpu":  # the same products without a half-precision library routine
        out = torch.bmm(a.to(dtype).float(), b.to(dtype).float())
    else:
        out = torch.bmm(a.to(dtype), b.to(dtype), out_dtype=torch.float32)
    return out


def _scores(group: _Group, q: Tensor, k: Tensor, scale: float, bias: Bias | None, dtype: torch.dtype) -> Tensor:
    shape = (*q.shape[:3], k.shape[2])
    scores = _product(q, k.transpose(2, 3), dtype).mul_(scale).view(shape)
    if bias is not None:
        added = bias.table.to(scores.dtype)[:, group.bucket]  # [H, Lq, Lk] or [H, n, Lq, Lk]
        scores += added if added.dim() == 3 else added.transpose(0, 1)
    return scores if group.hidden is None else scores.masked_fill_(group.hidden, float("-inf"))


def _log(x: Tensor) -> Tensor:
    """log(x), whose rounding must not depend on where in a buffer an element lies: whole vectors, one thread a
    piece.
    """
    flat = x.new_ones(-(x.numel() // -64) * 64)
    flat[: x.numel()] = x.flatten()
    for piece in flat.split(_PIECE):
        piece.log_()
    return flat[: x.numel()].view(x.shape)


def forward(q, k, v, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    """(o, lse); arguments as in the op. Hints and a schedule are not needed and not used."""
    dtype = accumulation_dtype(q.dtype)
    num_heads = q.shape[1]
    shape = q.shape if q_offsets is not None else (len(kv_offsets) - 1, *q.shape)
    num_rows = shape[0] if q_offsets is not None else shape[0] * shape[1]
    q_rows, k_rows, v_rows = (table(x, x.dtype) for x in (q, k, v))
    o_rows = empty_table(num_rows, q, q.dtype)
    lse_rows = torch.full((num_rows * num_heads + 1, 1), float("inf"), dtype=dtype, device=q.device)
    with strict_float32():
        for group in _groups(q, k, q_offsets, kv_offsets, window, bias):
            keys = take(k_rows, group.keys)
            scores = _scores(group, take(q_rows, group.queries), keys, scale, bias, q.dtype)
            highest = scores.amax(dim=-1, keepdim=True)
            weights = scores.sub_(highest).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            block = _product(weights, take(v_rows, group.keys), q.dtype).view(*total.shape[:3], q.shape[2])
            put(o_rows, group.outputs, block.div_(total))
            put(lse_rows, group.outputs, highest.add_(_log(total)))
    lse = lse_rows[:-1].view(num_rows, num_heads).t()
    return o_rows[:-1].view(shape), lse


def backward(do, q, k, v, o, lse, q_offsets, kv_offsets, *, scale, window, bias, max_q_len, max_kv_len, schedule):
    """(dq, dk, dv, dbias_table or None). dq of shared queries is summed in float32 and rounded once."""
    dtype, shared = accumulation_dtype(q.dtype), q_offsets is None
    q_rows, k_rows, v_rows = (table(x, x.dtype) for x in (q, k, v))
    do_rows, o_rows = (table(x.flatten(0, 1) if shared else x, x.dtype) for x in (do, o))
    lse_rows = torch.cat([lse.t().flatten(), lse.new_full((1,), float("inf"))])
    dq_rows = empty_table(q.shape[0], q, dtype if shared else q.dtype)
    dk_rows, dv_rows = empty_table(k.shape[0], k, k.dtype), empty_table(v.shape[0], v, v.dtype)
    dtable = None if bias is None else torch.zeros_like(bias.table)
    with strict_float32():
        for group in _groups(q, k, q_offsets, kv_offsets, window, bias):
            queries, keys = take(q_rows, group.queries), take(k_rows, group.keys)
            do_own, o_own = take(do_rows, group.outputs), take(o_rows, group.outputs)
            weights = _scores(group, queries, keys, scale, bias, q.dtype)
            # Rows that do not exist have lse = +inf, hence weights 0 whatever their scores are.
            weights = weights.sub_(lse_rows[group.outputs].unsqueeze(-1)).exp_()
            put(dv_rows, group.keys, _product(weights.transpose(2, 3), do_own, q.dtype))
            d_scores = _product(do_own, take(v_rows, group.keys).transpose(2, 3), q.dtype).view(weights.shape)
            delta = (do_own.to(dtype) * o_own.to(dtype)).sum(dim=-1, keepdim=True)
            d_scores = d_scores.sub_(delta).mul_(weights)
            if bias is not None:
                _add_to_table(dtable, group.bucket, d_scores)
            dk_own = _product(d_scores.transpose(2, 3), queries, q.dtype)
            put(dk_rows, group.keys, dk_own.mul_(scale))
            dq_own = _product(d_scores, keys, q.dtype).mul_(scale)
            if shared:
                every = dq_own.view(len(group.queries), -1, q.shape[2]).sum(dim=0)
                # Sequences that fill the batch up come last, so the first index is a real one.
                dq_rows.index_add_(0, group.queries[0].flatten(), every.to(dq_rows.dtype))
            else:
                put(dq_rows, group.queries, dq_own)
    dq, dk, dv = dq_rows[:-1].view(q.shape).to(q.dtype), dk_rows[:-1].view(k.shape), dv_rows[:-1].view(v.shape)
    return dq, dk, dv, dtable


def _add_to_table(dtable: Tensor, bucket: Tensor, d_scores: Tensor) -> None:
    """dtable[h, bucket] += d_scores [n, H, Lq, Lk]; bucket [Lq, Lk], or [n, Lq, Lk]."""
    own = d_scores.sum(dim=0) if bucket.dim() == 2 else d_scores.transpose(0, 1)
    own = own.reshape(dtable.shape[0], -1).to(dtable.dtype)
    dtable.scatter_add_(1, bucket.reshape(1, -1).expand_as(own), own)


IMPLEMENTATION = Implementation("eager", forward, backward, lambda case: None)
