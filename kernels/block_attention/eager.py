"""Block attention in vectorised torch: all blocks of all sequences as one batch [num_blocks, H, block_size, D].

Whole blocks form one group; the shorter last blocks are grouped by the class of their own length, so that a sequence of
five rows does not cost a block of 64 (padded_batch.py says why this leaves results independent of batch-mates). One
tile holds all that a row may see, hence no running maximum and no saved log-sum-exp: the backward pass computes the
weights again from q and k.

Rotation in float32. The products run in float32 on a CPU (float64 for float64); on a GPU in the inputs' dtype with
float32 accumulators and a float32 softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..jagged import host_offsets
from ..padded_batch import (
    chunks,
    compute_dtype,
    empty_table,
    length_class,
    matmul,
    put,
    row_index,
    table,
    take,
)
from ..registry import Case, Implementation
from ..validation import strict_float32
from .reference import turn, turn_back


def blocks(offsets: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(starts, lengths) of every block, int64 on the host, in packed order: blocks begin at each sequence's own
    start.
    """
    ends = host_offsets(offsets).long()
    counts = (ends.diff() + block_size - 1) // block_size
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = torch.arange(len(first)) - first
    starts = torch.repeat_interleave(ends[:-1], counts) + within * block_size
    last = torch.repeat_interleave(ends[1:], counts)
    return starts, (last - starts).clamp(max=block_size)


def _groups(q: Tensor, offsets: Tensor, block_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield (row index [n, H, size], bool [n, 1, 1, size] of real keys or None when all are) for every group."""
    starts, lengths = blocks(offsets, block_size)
    sizes = length_class(lengths).clamp(max=block_size)
    for size in torch.unique(sizes).tolist():
        unit = q.shape[1] * size * size
        for own in chunks((sizes == size).nonzero().flatten(), unit, q.device):
            index = row_index(starts[own], lengths[own], size, len(own), q)
            full = bool((lengths[own] == size).all())
            yield index, None if full else _real_keys(index, q)


def _real_keys(index: Tensor, q: Tensor) -> Tensor:
    return index[:, :1, None] != q.shape[0] * q.shape[1]


def _weights(q: Tensor, k: Tensor, scale: float, valid: Tensor | None) -> Tensor:
    scores = matmul(q, k.transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32)).mul_(scale)
    if valid is not None:
        scores = scores.masked_fill_(~valid, float("-inf"))
    return torch.softmax(scores, dim=-1)


@strict_float32()
def forward(q, k, v, offsets, *, block_size, scale, rotary):
    """o like q. Arguments: see api.py."""
    dtype = compute_dtype(q)
    q_rows, k_rows, v_rows = (table(turn(x, name, rotary), dtype) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    o_rows = empty_table(q.shape[0], q, q.dtype)
    for index, valid in _groups(q, offsets, block_size):
        weights = _weights(take(q_rows, index), take(k_rows, index), scale, valid)
        put(o_rows, index, matmul(weights.to(dtype), take(v_rows, index)))
    return o_rows[:-1].view(q.shape)


@strict_float32()
def backward(do, q, k, v, o, offsets, *, block_size, scale, rotary):
    """(dq, dk, dv) like q, k, v, in the frame before rotation. `o` is not needed: the weights are at hand."""
    dtype = compute_dtype(q)
    q_rows, k_rows, v_rows = (table(turn(x, name, rotary), dtype) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    do_rows = table(do, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    dq_rows, dk_rows, dv_rows = (empty_table(x.shape[0], x, wide) for x in (q, k, v))
    for index, valid in _groups(q, offsets, block_size):
        q_own, k_own, v_own, do_own = (take(rows, index) for rows in (q_rows, k_rows, v_rows, do_rows))
        weights = _weights(q_own, k_own, scale, valid)
        put(dv_rows, index, matmul(weights.to(dtype).transpose(2, 3), do_own))
        d_weights = matmul(do_own, v_own.transpose(2, 3)).to(weights.dtype)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(scale).to(dtype)
        put(dq_rows, index, matmul(d_scores, k_own))
        put(dk_rows, index, matmul(d_scores.transpose(2, 3), q_own))
    named = (("q", dq_rows, q), ("k", dk_rows, k), ("v", dv_rows, v))
    return tuple(turn_back(rows[:-1].view(x.shape), name, rotary).to(x.dtype) for name, rows, x in named)


def _unsupported(case: Case) -> str | None:
    return None if case.dtype.is_floating_point else f"dtype {case.dtype} is not a floating type"


IMPLEMENTATION = Implementation("eager", forward, backward, _unsupported)
