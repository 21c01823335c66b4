"""GDPA in vectorised torch: batched matrix products over groups of sequences of like length (padded_batch.py says how).

Padding costs nothing in exactness: zero keys have zero scores, every activation is 0 there, and a mask clears value
and derivative where a sequence is shorter than its class. The mask comes after the activation.

float32 and float64 are computed as they are. bfloat16 and float16 are computed in float32 on a CPU; on a GPU the
products take them directly (float32 accumulators) and the scores are rounded to the input's dtype in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..jagged import host_offsets
from ..padded_batch import (
    chunks,
    compute_dtype,
    empty_table,
    kept,
    length_class,
    matmul,
    put,
    row_index,
    table,
    take,
    whole_vectors,
)
from ..registry import Case, Implementation
from ..validation import strict_float32
from . import activations


class _Group(NamedTuple):
    """Sequences of one class. Indices into tables: queries, their outputs, keys. valid: bool [n, 1, 1, Lk] or None."""

    queries: Tensor
    outputs: Tensor
    keys: Tensor
    valid: Tensor | None


def _starts_lengths(offsets: Tensor) -> tuple[Tensor, Tensor]:
    ends = offsets.long()
    return ends[:-1], ends.diff()


def _groups(q: Tensor, k: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor) -> list[_Group]:
    """The groups of a call, made once for a pair of offsets tensors."""
    sizes = (*q.shape[:2], k.shape[0], q.device, torch.get_num_threads())
    return kept(lambda: list(_make_groups(q, k, q_offsets, kv_offsets)), q_offsets, kv_offsets, *sizes)


def _make_groups(q: Tensor, k: Tensor, q_offsets: Tensor | None, kv_offsets: Tensor) -> Iterator[_Group]:
    device, shared = q.device, q_offsets is None
    kv_lengths = host_offsets(kv_offsets).long().diff()
    q_lengths = torch.full_like(kv_lengths, q.shape[0]) if shared else host_offsets(q_offsets).long().diff()
    classes, class_of = torch.unique(
        torch.stack([length_class(q_lengths), length_class(kv_lengths)], 1), dim=0, return_inverse=True
    )
    places = [*_starts_lengths(kv_offsets)] * 2  # on the device: indices are made where they are used
    if shared:
        places[:2] = torch.zeros_like(places[2]), torch.full_like(places[3], q.shape[0])
    else:
        places[:2] = _starts_lengths(q_offsets)
    for number, (q_size, kv_size) in enumerate(classes.tolist()):
        unit = q.shape[1] * q_size * kv_size
        if unit == 0:
            continue  # no pairs: the zeros that the outputs start with
        for own in chunks((class_of == number).nonzero().flatten(), unit, device):
            batch = whole_vectors(len(own), unit, device)
            # Without a sequence shorter than the class there is nothing to mask, and the numbers are the same.
            full = bool((kv_lengths[own] == kv_size).all())
            own = own.to(device, non_blocking=True)
            queries = outputs = row_index(places[0][own], places[1][own], q_size, batch, q)
            if shared:
                first = own * q.shape[0]
                outputs = row_index(first, places[1][own], q_size, batch, q, len(q_lengths) * q.shape[0])
            keys = row_index(places[2][own], places[3][own], kv_size, batch, k)
            valid = None if full else keys[:, :1, None] != k.shape[0] * k.shape[1]
            yield _Group(queries, outputs, keys, valid)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    scores = matmul(q, k.transpose(2, 3))
    return scores if scale == 1.0 else scores.mul_(scale)


@strict_float32()
def forward(q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """o like q, or [B, Lq, H, D] when q_offsets is None. Arguments: see api.py; hints and schedule are not needed."""
    dtype = compute_dtype(q)
    shape = (len(kv_offsets) - 1, *q.shape) if q_offsets is None else q.shape
    q_rows, k_rows, v_rows = table(q, dtype), table(k, dtype), table(v, dtype)
    o_rows = empty_table(math.prod(shape[:-2]), q, q.dtype)
    for group in _groups(q, k, q_offsets, kv_offsets):
        scores = _scores(take(q_rows, group.queries), take(k_rows, group.keys), scale)
        weights = activations.masked_value(activation, scores, group.valid)
        put(o_rows, group.outputs, matmul(weights, take(v_rows, group.keys)))
    return o_rows[:-1].view(shape)


@strict_float32()
def backward(do, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """(dq, dk, dv) like q, k, v; the scores are computed again. dq of shared queries: float32 sum, rounded once."""
    dtype, shared = compute_dtype(q), q_offsets is None
    q_rows, k_rows, v_rows = table(q, dtype), table(k, dtype), table(v, dtype)
    do_rows = table(do.flatten(0, 1) if shared else do, dtype)
    dq_rows = empty_table(q.shape[0], q, torch.promote_types(dtype, torch.float32) if shared else q.dtype)
    dk_rows, dv_rows = empty_table(k.shape[0], k, k.dtype), empty_table(v.shape[0], v, v.dtype)
    for group in _groups(q, k, q_offsets, kv_offsets):
        q_own, k_own, v_own = take(q_rows, group.queries), take(k_rows, group.keys), take(v_rows, group.keys)
        do_own = take(do_rows, group.outputs)
        scores = _scores(q_own, k_own, scale)
        weights = activations.masked_value(activation, scores, group.valid)
        put(dv_rows, group.keys, matmul(weights.transpose(2, 3), do_own))
        d_weights = matmul(do_own, v_own.transpose(2, 3))
        d_scores = activations.masked_pullback(activation, d_weights, scores, group.valid)
        if scale != 1.0:
            d_scores = d_scores * scale
        put(dk_rows, group.keys, matmul(d_scores.transpose(2, 3), q_own))
        dq_own = matmul(d_scores, k_own)
        if shared:
            dq_rows.index_add_(0, group.queries[0].flatten(), dq_own.sum(0, dtype=dq_rows.dtype).flatten(0, 1))
        else:
            put(dq_rows, group.queries, dq_own)
    return dq_rows[:-1].view(q.shape).to(q.dtype), dk_rows[:-1].view(k.shape), dv_rows[:-1].view(v.shape)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATION = Implementation("eager", forward, backward, _unsupported)
