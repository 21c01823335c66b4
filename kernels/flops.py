"""Floating-point operations and bytes of the ops, as exact integers over real lengths.

One convention: useful pairs only. A pair is one query and one key that it may see, and costs two GEMMs of 2 D
operations forward. phase "fwd": 4 H D pairs. "bwd": twice that, the model's backward (dQ, dK, dV, dP), which feeds
MFU. "bwd_kernel": 2.5 times, the scores recomputed once, which feeds kernel TFLOP/s as attention papers count.
"step": fwd + bwd. What the padding, masked halves of tiles or a second recompute cost a kernel is its own affair and
not counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .jagged import has_values, host_offsets

# In units of one GEMM over the pairs (2 H D pairs).
GEMMS = {"fwd": 2, "bwd": 4, "bwd_kernel": 5, "step": 6}
Lengths = torch.Tensor | Sequence[int]


def _lengths(name: str, lengths: Lengths) -> torch.Tensor:
    lengths = torch.as_tensor(lengths).to("cpu", torch.int64)
    if lengths.dim() != 1 or bool((lengths < 0).any()):
        raise ValueError(f"{name}: shape {tuple(lengths.shape)}, values {lengths.tolist()}; allowed: (B,), all >= 0")
    return lengths


def _gemms(phase: str) -> int:
    if phase not in GEMMS:
        raise ValueError(f"phase: {phase!r}; allowed: {', '.join(GEMMS)}")
    return GEMMS[phase]


def attention_pairs(q_lengths: Lengths, kv_lengths: Lengths | None = None, *, window: int | None = None) -> int:
    """Visible (query, key) pairs of a batch. kv_lengths None: self-attention. window: |i - j| <= window, self only."""
    with unset_fake_temporarily():  # a compiler asks while it traces, and wants a number
        q = _lengths("q_lengths", q_lengths)
        kv = q if kv_lengths is None else _lengths("kv_lengths", kv_lengths)
        if q.shape != kv.shape:
            raise ValueError(f"kv_lengths: {kv.shape[0]} sequences; allowed: {q.shape[0]}, as in q_lengths")
        if window is None:
            return int((q * kv).sum())
        if not torch.equal(q, kv):
            raise ValueError("window: with kv_lengths that differ from q_lengths; allowed: self-attention only")
        reach = (q - 1).clamp(min=0, max=window)
        return int((q * (2 * reach + 1) - reach * (reach + 1)).sum())


def block_pairs(lengths: Lengths, block_size: int = 64) -> int:
    """Visible pairs of block attention: block_size squared for every whole block, the remainder squared for the
    last.
    """
    if block_size < 1:
        raise ValueError(f"block_size: {block_size}; allowed: >= 1")
    with unset_fake_temporarily():
        lengths = _lengths("lengths", lengths)
        return int((lengths // block_size * block_size**2 + (lengths % block_size) ** 2).sum())


def jagged_attention(
    q_lengths: Lengths,
    kv_lengths: Lengths | None,
    num_heads: int,
    head_dim: int,
    *,
    window: int | None = None,
    phase: str = "fwd",
) -> int:
    """FLOPs of softmax jagged attention. Shared queries: q_lengths holds their number once for each sequence."""
    return _gemms(phase) * 2 * num_heads * head_dim * attention_pairs(q_lengths, kv_lengths, window=window)


def gdpa(q_lengths: Lengths, kv_lengths: Lengths | None, num_heads: int, head_dim: int, *, phase: str = "fwd") -> int:
    """FLOPs of GDPA: the same two GEMMs; the activation's own arithmetic is not counted, as softmax's is not."""
    return _gemms(phase) * 2 * num_heads * head_dim * attention_pairs(q_lengths, kv_lengths)


def block_attention(
    lengths: Lengths, num_heads: int, head_dim: int, *, block_size: int = 64, phase: str = "fwd"
) -> int:
    """FLOPs of block attention: visible pairs only."""
    return _gemms(phase) * 2 * num_heads * head_dim * block_pairs(lengths, block_size)


def attention_bytes(
    q_lengths: Lengths,
    kv_lengths: Lengths | None,
    num_heads: int,
    head_dim: int,
    *,
    element_size: int = 2,
    shared_q: bool = False,
    lse: bool = True,
    phase: str = "fwd",
) -> int:
    """Bytes that must cross HBM when every operand is moved once.

    fwd: read q, k, v, write o and lse. bwd, bwd_kernel: read q, k, v, o, dO and lse, write dq, dk, dv. step: both.
    lse False: an op without statistics, whose backward needs no o either (GDPA). shared_q: q and dq are one tensor
    [Lq, H, D], not one for each sequence.
    """
    _gemms(phase)
    q = _lengths("q_lengths", q_lengths)
    kv = q if kv_lengths is None else _lengths("kv_lengths", kv_lengths)
    rows_o = int(q.sum())
    rows_q = (int(q.max()) if q.numel() else 0) if shared_q else rows_o
    rows_kv = int(kv.sum())
    row = num_heads * head_dim * element_size
    statistics = 4 * num_heads * rows_o if lse else 0
    forward = (rows_q + rows_o + 2 * rows_kv) * row + statistics
    backward = (2 * rows_q + (2 if lse else 1) * rows_o + 4 * rows_kv) * row + statistics
    return {"fwd": forward, "bwd": backward, "bwd_kernel": backward, "step": forward + backward}[phase]


def block_attention_bytes(
    lengths: Lengths, num_heads: int, head_dim: int, *, element_size: int = 2, phase: str = "fwd"
) -> int:
    """Bytes of block attention: fwd q, k, v, o (4 tensors);

    bwd q, k, v, dO, dq, dk, dv (7; o is recomputed in the tile).
    """
    _gemms(phase)
    tensor = int(_lengths("lengths", lengths).sum()) * num_heads * head_dim * element_size
    return {"fwd": 4, "bwd": 7, "bwd_kernel": 7, "step": 11}[phase] * tensor


def lengths_of_call(
    q: torch.Tensor,
    q_offsets: torch.Tensor | None,
    kv_offsets: torch.Tensor,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
) -> tuple[Lengths, Lengths]:
    """(q_lengths, kv_lengths) of an op call, for FLOP formulas. q_offsets None: the rows of q, once for each sequence.

    Offsets without values (compile-time tracing) have no lengths: the answer is then that of sequences of one length,
    the hint or else the mean, said in a warning. That is what torch.compile's partitioner gets under a memory budget.
    """
    batch = kv_offsets.shape[0] - 1
    if has_values(kv_offsets) and (q_offsets is None or has_values(q_offsets)):
        kv_lengths = host_offsets(kv_offsets).diff().long()
        if q_offsets is None:
            return torch.full((batch,), q.shape[0], dtype=torch.int64), kv_lengths
        return host_offsets(q_offsets).diff().long(), kv_lengths
    warnings.warn("FLOPs of a jagged op counted on offsets without values: an estimate, not a count", stacklevel=2)
    count = max(1, _usual(batch))
    rows = _usual(q.shape[0])
    longest_q = rows if q_offsets is None else _usual(max_q_len or -(-rows // count))
    longest_kv = longest_q if max_kv_len is None else _usual(max_kv_len)
    return [longest_q] * _usual(batch), [longest_kv] * _usual(batch)


def _usual(size: int | torch.SymInt) -> int:
    """A size, or what a compiler takes for its usual value."""
    return size if isinstance(size, int) else int(size.node.hint or 1)
