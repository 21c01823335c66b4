"""Packed rows to zero-padded batches and back, for the vectorised torch implementations.

Sequences are grouped by the class of their own length (powers of two and the halves between: 8, 16, 24, 32, 48, 64,
...), so that the shape of every matrix product follows from the sequence alone and its result does not depend on who
shares the batch. The number of groups grows with the logarithm of the longest length, never with the batch.

One detail makes that hold to the last bit on a CPU. Torch's elementwise kernels use vector code for the bulk of a
buffer and scalar code for what is left at the end of each thread's share, and the two round differently:
`whole_vectors` says how many sequences a group must be filled up to so that each share is a whole number of vectors.
On a GPU the library picks a product's algorithm by batch size, so results there are deterministic but may differ in
other company.

A table is a packed tensor [T, H, D] as rows [T * H + 1, D] whose last row stands for rows that do not exist: read it
and get zeros (never a neighbour's rows, so a neighbour's NaN does not pass), write to it and nothing happens.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

_SIZES = torch.tensor(sorted({0, 8} | {base << shift for base in (2, 3) for shift in range(3, 40)}))
_MAX_SCORES = {"cpu": 1 << 19, "cuda": 1 << 28}  # elements of a group's score matrix before it is split; 2 MB on a CPU
_GRAIN = 32768  # torch gives a thread at least this many elements
_VECTORS = 64  # elements that torch's widest vector loop takes at once, with a margin of two


def length_class(lengths: Tensor) -> Tensor:
    """Smallest padded size that holds each length; lengths int64 [B] on the host."""
    return _SIZES[torch.bucketize(lengths, _SIZES)]


def chunks(members: Tensor, unit: int, device: torch.device) -> tuple[Tensor, ...]:
    """Split the members of a group so that the scores of one chunk, `unit` elements a member, fit a bounded buffer."""
    return members.split(max(1, _MAX_SCORES.get(device.type, 1 << 28) // unit))


def whole_vectors(count: int, unit: int, device: torch.device) -> int:
    """Smallest batch >= count for which every thread's share of batch * unit elements is a whole number of vectors."""
    if device.type != "cpu":
        return count
    while True:
        shares = max(1, min(torch.get_num_threads(), -(-count * unit // _GRAIN)))
        if (count * unit) % (shares * _VECTORS) == 0:
            return count
        count += 1


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 for halves on a CPU, else x's own."""
    return torch.float32 if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def table(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [T, H, D], strided or not, as a table to read from."""
    rows = x.new_empty(x.shape[0] * x.shape[1] + 1, x.shape[2], dtype=dtype)
    rows[:-1].view(x.shape).copy_(x)
    rows[-1] = 0
    return rows


def empty_table(num_rows: int, x: Tensor, dtype: torch.dtype) -> Tensor:
    """A table of zeros to write num_rows rows [H, D] like x's to."""
    return x.new_zeros(num_rows * x.shape[1] + 1, x.shape[2], dtype=dtype)


def take(rows: Tensor, index: Tensor) -> Tensor:
    """[n, H, size, D] contiguous: the rows of a table at index [n, H, size]."""
    return rows.index_select(0, index.flatten()).view(*index.shape, rows.shape[1])


def put(rows: Tensor, index: Tensor, block: Tensor) -> None:
    """Write block [n, H, size, D] to the rows at index [n, H, size], rounding to the table's dtype."""
    rows.index_copy_(0, index.flatten(), block.reshape(-1, rows.shape[1]).to(rows.dtype))


def row_index(starts: Tensor, lengths: Tensor, size: int, batch: int, x: Tensor, total: int | None = None) -> Tensor:
    """Rows of a table like x's for sequences padded to `size` and a batch filled up to `batch`: int64 [batch, H, size].

    starts, lengths: int64, on the host or on x's device. total: rows that the table holds, x.shape[0] if None. On x's
    device.
    """
    num_heads, device = x.shape[1], starts.device
    missing = (x.shape[0] if total is None else total) * num_heads
    column = torch.arange(size, device=device)
    rows = (starts[:, None, None] + column) * num_heads + torch.arange(num_heads, device=device)[:, None]
    index = torch.full((batch, num_heads, size), missing, device=device)
    index[: len(starts)] = torch.where((column < lengths[:, None])[:, None], rows, missing)
    return index.to(x.device, non_blocking=True)


_KEPT: dict[tuple, tuple] = {}


def kept(build, q_offsets: Tensor | None, kv_offsets: Tensor, *sizes):
    """build(), kept while both offsets tensors live unchanged: the layers of a step share them, the first one pays."""
    given = [x for x in (q_offsets, kv_offsets) if x is not None]
    if any(x.is_inference() for x in given):
        return build()
    key = (q_offsets is None, *((id(x), x._version) for x in given), *sizes)
    found = _KEPT.get(key)
    if found is not None and all(ref() is x for ref, x in zip(found[0], given, strict=True)):
        return found[1]
    built = build()
    _KEPT[key] = ([weakref.ref(x, lambda _: _KEPT.pop(key, None)) for x in given], built)
    return built


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """[n, H, M, K] @ [n, H, K, N] as one batch of n * H products."""
    return torch.bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
