"""GDPA, one sequence at a time in plain torch: the specification that every other implementation is tested against.

o_i = sum_j act(scale * q_i . k_j) v_j over the keys j of the query's own sequence: no softmax, no normalisation.

Backward, with A = scale * Q K^T and P = act(A): dV = P^T dO; dP = dO V^T; dA = dP * act'(A); dQ = scale * dA K;
dK = scale * dA^T Q. Nothing of the forward pass is kept but its inputs.

The arithmetic is float32 for float32, bfloat16 and float16 inputs (one rounding at the end), float64 for float64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..registry import Case, Implementation
from ..validation import strict_float32
from . import activations


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(pairwise(ends))


def _packed(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join the sequences' rows, add zero rows up to like.shape[0], round to like's dtype."""
    rows = sum(part.shape[0] for part in parts)
    return torch.cat([part.to(like.dtype) for part in parts] + [like.new_zeros(like.shape[0] - rows, *like.shape[1:])])


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("qhd,khd->hqk", q, k) * scale


@strict_float32()
def forward(q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """o like q, or [B, Lq, H, D] when q_offsets is None (queries q [Lq, H, D] shared by every sequence).

    Differentiable by autograd. The hints and the schedule do not change a result and are not used.
    """
    spans = _spans(kv_offsets)
    queries = [q] * len(spans) if q_offsets is None else [q[start:end] for start, end in _spans(q_offsets)]
    parts = []
    for q_own, (start, end) in zip(queries, spans, strict=True):
        weights = activations.value(activation, _scores(_wide(q_own), _wide(k[start:end]), scale))
        parts.append(torch.einsum("hqk,khd->qhd", weights, _wide(v[start:end])))
    if q_offsets is not None:
        return _packed(parts, q)
    return torch.stack(parts).to(q.dtype) if parts else q.new_zeros(0, *q.shape)


@strict_float32()
def backward(do, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """(dq, dk, dv) like q, k, v. dq of shared queries is summed over the sequences before it is rounded."""
    spans = _spans(kv_offsets)
    shared = q_offsets is None
    q_spans = [(0, q.shape[0])] * len(spans) if shared else _spans(q_offsets)
    dq_parts, dk_parts, dv_parts = [], [], []
    for b, ((q_start, q_end), (start, end)) in enumerate(zip(q_spans, spans, strict=True)):
        q_own, k_own, v_own = _wide(q[q_start:q_end]), _wide(k[start:end]), _wide(v[start:end])
        do_own = _wide(do[b] if shared else do[q_start:q_end])
        scores = _scores(q_own, k_own, scale)
        d_weights = torch.einsum("qhd,khd->hqk", do_own, v_own)
        d_scores = d_weights * activations.derivative(activation, scores) * scale
        dq_parts.append(torch.einsum("hqk,khd->qhd", d_scores, k_own))
        dk_parts.append(torch.einsum("hqk,qhd->khd", d_scores, q_own))
        dv_parts.append(torch.einsum("hqk,qhd->khd", activations.value(activation, scores), do_own))
    if not shared:
        dq = _packed(dq_parts, q)
    else:
        dq = (torch.stack(dq_parts).sum(0) if dq_parts else torch.zeros_like(q)).to(q.dtype)
    return dq, _packed(dk_parts, k), _packed(dv_parts, v)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATION = Implementation("reference", forward, backward, _unsupported)
