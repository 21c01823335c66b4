"""Block attention, one block at a time in plain torch: the specification of every other implementation.

A sequence is cut into blocks of block_size rows counted from its own start (the last one may be shorter). Inside a
block every row attends to every row, softmax(scale * q . k), in both directions; nothing outside the block is seen.
With rotary, q, k and v (those named in `on`) are turned first, in float32; gradients are turned back, so they belong
to the tensors that the caller passed.

Float32 for float32, bfloat16 and float16 inputs (one rounding at the end), float64 for float64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ..registry import Case, Implementation
from ..rotary.reference import rotate, rotate_back
from ..validation import strict_float32


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def turn(x: Tensor, name: str, rotary) -> Tensor:
    """x in the arithmetic's dtype, turned if `rotary` is on for the tensor called `name` ("q", "k" or "v")."""
    if rotary is None or name not in rotary.on:
        return _wide(x)
    return rotate(x, rotary.cos, rotary.sin, rotary.interleaved)


def turn_back(x: Tensor, name: str, rotary) -> Tensor:
    """The backward pass of `turn`."""
    if rotary is None or name not in rotary.on:
        return _wide(x)
    return rotate_back(x, rotary.cos, rotary.sin, rotary.interleaved)


def _blocks(offsets: Tensor, block_size: int) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return [
        (start, min(start + block_size, end))
        for first, end in pairwise(ends)
        for start in range(first, end, block_size)
    ]


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    rows = sum(part.shape[0] for part in parts)
    tail = like.new_zeros(like.shape[0] - rows, *like.shape[1:], dtype=_wide(like).dtype)
    return torch.cat([*parts, tail])


def _weights(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.softmax(torch.einsum("qhd,khd->hqk", q, k) * scale, dim=-1)


@strict_float32()
def forward(q, k, v, offsets, *, block_size, scale, rotary):
    """o like q. Differentiable by autograd."""
    q_all, k_all, v_all = turn(q, "q", rotary), turn(k, "k", rotary), turn(v, "v", rotary)
    parts = [
        torch.einsum("hqk,khd->qhd", _weights(q_all[start:end], k_all[start:end], scale), v_all[start:end])
        for start, end in _blocks(offsets, block_size)
    ]
    return _joined(parts, q).to(q.dtype)


@strict_float32()
def backward(do, q, k, v, o, offsets, *, block_size, scale, rotary):
    """(dq, dk, dv) like q, k, v. Scores are computed again and the row sums D = rowsum(P * dP) taken from them, not
    from o.
    """
    q_all, k_all, v_all = turn(q, "q", rotary), turn(k, "k", rotary), turn(v, "v", rotary)
    dq, dk, dv = [], [], []
    for start, end in _blocks(offsets, block_size):
        q_own, k_own, v_own, do_own = q_all[start:end], k_all[start:end], v_all[start:end], _wide(do[start:end])
        weights = _weights(q_own, k_own, scale)
        d_weights = torch.einsum("qhd,khd->hqk", do_own, v_own)
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        dq.append(torch.einsum("hqk,khd->qhd", d_scores, k_own))
        dk.append(torch.einsum("hqk,qhd->khd", d_scores, q_own))
        dv.append(torch.einsum("hqk,qhd->khd", weights, do_own))
    named = (("q", dq, q), ("k", dk, k), ("v", dv, v))
    return tuple(turn_back(_joined(parts, like), name, rotary).to(like.dtype) for name, parts, like in named)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATION = Implementation("reference", forward, backward, _unsupported)
