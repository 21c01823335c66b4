"""block_attention: softmax inside fixed blocks of packed sequences, one name for every implementation."""

from __future__ import annotations

import torch

from ..jagged import check_offsets
from ..registry import Case, Registry
from ..rotary.api import Rotary, check_tables
from ..selection import selector, static
from ..validation import check_scale, check_values, unit_last_stride
from .function import block_attention_op

REGISTRY = Registry("block_attention", __package__)
REGISTRY.add("tlx", ".tlx", 40)
REGISTRY.add("triton", ".triton_block", 30)
REGISTRY.add("eager", ".eager", 20)
REGISTRY.add("reference", ".reference", 10)
_select = selector(REGISTRY)


def _check(q, k, v, offsets, block_size, scale, rotary):
    """Validate a call; returns (scale, features)."""
    op = "block_attention"
    check_values(op, q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{op}: q has {q.shape[0]} rows and k {k.shape[0]}; allowed: the same number")
    check_offsets(offsets, "offsets", q.shape[0], device=q.device)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"{op}: block_size is {block_size!r}; allowed: an integer >= 1")
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            raise ValueError(f"{op}: rotary is {type(rotary).__name__}; allowed: None or Rotary(cos, sin)")
        check_tables(op, q, rotary.cos, rotary.sin)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale(op, scale)
    features = ("rotary",) * (rotary is not None) + ("block_size",) * (block_size != 64)
    return scale, features


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Bidirectional softmax attention inside blocks of block_size rows, counted from each sequence's own start.

    The source's replacement of the sliding window: each block of queries sees its own block of keys and nothing else,
    so the cost is linear in the length, without window masks, running maxima or saved row statistics; the rotary
    embedding and its backward pass are part of the op.

    q, k, v: [T, H, D]; bfloat16, float16, float32 or float64, any strides (views of a fused buffer work), any D.
    offsets: [B + 1], int32 or int64 (see kernels/jagged.py). The last block of a sequence may be shorter. scale:
    multiplies q k^T; None: D ** -0.5. rotary: turns q, k and v (those in rotary.on) in float32 first; gradients are
    those of the tensors passed here, before the turn. Needs an even D. impl: "auto", or one of REGISTRY.names; a
    named one runs or raises.

    Returns o [T, H, D], dtype of q. Rows past offsets[-1] are exact zeros, and so are their gradients. A sequence's
    rows depend, bit for bit, on that sequence alone (eager: on a CPU). Errors: ValueError for every bad argument,
    with what is allowed.
    """
    scale, features = _check(q, k, v, offsets, block_size, scale, rotary)
    tables = (None, None, True, "")
    if rotary is not None:
        tables = rotary.cos, rotary.sin, rotary.interleaved, "".join(rotary.on)
    name = _select(impl, *static(q), features)
    return block_attention_op(*(unit_last_stride(x) for x in (q, k, v)), offsets, block_size, scale, *tables, name)


def explain(q, k, v, offsets, *, block_size=64, scale=None, rotary=None, impl="auto") -> str:
    """Which implementation a call with these arguments gets, and why each of the others does not: one line each."""
    _, features = _check(q, k, v, offsets, block_size, scale, rotary)
    return REGISTRY.explain(Case.of(q, features=frozenset(features)))


block_attention.explain = explain
