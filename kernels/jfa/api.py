"""jagged_attention: softmax attention over packed sequences of unequal lengths, one name for every implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..registry import Case, Registry
from ..schedule import Schedule, flatten
from ..selection import selector, static
from ..validation import check_attention, check_precision, check_scale, check_schedule, check_window, unit_last_stride
from .bias import Bias
from .function import jagged_attention_op

if TYPE_CHECKING:
    from ..mxfp8 import Recipe

REGISTRY = Registry("jagged_attention", __package__)
REGISTRY.add("v4", ".v4_tlx", 60)
REGISTRY.add("v2", ".v2_tuned", 50)
REGISTRY.add("v3", ".v3_subtraction", 40)
REGISTRY.add("v1", ".v1_masked", 30)
REGISTRY.add("eager", ".eager", 20)
REGISTRY.add("reference", ".reference", 10)
REGISTRY.add("padded", ".padded", 0)
_select = selector(REGISTRY)


def _check(q, k, v, q_offsets, kv_offsets, scale, window, bias, precision, schedule, max_q_len, max_kv_len, impl):
    """Validate a call; returns (kv_offsets, scale, features)."""
    kv_offsets, kind = check_attention("jagged_attention", q, k, v, q_offsets, kv_offsets, max_q_len, max_kv_len)
    check_window("jagged_attention", window, kind)
    check_schedule("jagged_attention", schedule, q.device)
    check_precision("jagged_attention", precision, impl, bias=bias, schedule=schedule)
    if bias is not None:
        bias.check("jagged_attention", q, kind)
    scale = q.shape[-1] ** -0.5 if scale is None else check_scale("jagged_attention", scale)
    asked = {"window": window, "bias": bias, "schedule": schedule}
    features = kind | {name for name, value in asked.items() if value is not None}
    return kv_offsets, scale, features


def jagged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor | None,
    kv_offsets: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    bias: Bias | None = None,
    precision: Recipe | None = None,
    schedule: Schedule | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Bidirectional softmax attention in which every sequence of a packed batch sees its own keys only.

    The source's Jagged Flash Attention: attention straight on packed tensors, with custom biases, unequal query and key
    lengths and an efficient backward, so that nothing is spent on padding.

    q: [Tq, H, D]; k, v: [Tkv, H, D]; bfloat16, float16, float32 or float64, any strides (views of a fused buffer
    work). q_offsets, kv_offsets: [B + 1], int32 or int64 (see kernels/jagged.py). kv_offsets None: self-attention.
    q_offsets None: q [Lq, H, D] are dense queries shared by all sequences (pooling by attention); needs kv_offsets;
    their gradient is summed over the batch. scale: multiplies q k^T; None: D ** -0.5. window w: query i sees keys |i
    - j| <= w, self-attention only. precision: None (that of the inputs) or an mxfp8.Recipe, whose numerics are
    emulated with impl="auto". bias: added to the scaled scores, its table differentiable. schedule: a host-made tile
    order on the device (kernels that take one). max_q_len, max_kv_len: hints of the longest lengths; they never
    change a result. impl: "auto", or one of REGISTRY.names; a named one runs or raises. float32 products are never
    TF32.

    Returns o, dtype of q: [Tq, H, D], or [B, Lq, H, D] for shared queries. Rows of queries without keys and rows past
    q_offsets[-1] are exact zeros, and so are their gradients. A sequence's rows depend, bit for bit, on that sequence
    alone; exempt is the gradient of shared queries. Errors: ValueError for every bad argument, with what is allowed.
    """
    kv_offsets, scale, features = _check(
        q, k, v, q_offsets, kv_offsets, scale, window, bias, precision, schedule, max_q_len, max_kv_len, impl
    )
    if precision is not None:
        from ..mxfp8 import jagged_attention_mx

        given = None if kv_offsets is q_offsets else kv_offsets
        return jagged_attention_mx(q, k, v, q_offsets, given, scale=scale, window=window, recipe=precision)
    tiles, program_offsets, blocks = flatten(schedule)
    o, _ = jagged_attention_op(
        *(unit_last_stride(x) for x in (q, k, v)),
        q_offsets,
        kv_offsets,
        None if bias is None else bias.table,
        None if bias is None else bias.times,
        scale,
        window,
        max_q_len,
        max_kv_len,
        tiles,
        program_offsets,
        blocks,
        _select(impl, *static(q), tuple(sorted(features)), None, max_kv_len),
    )
    return o


def explain(
    q,
    k,
    v,
    q_offsets,
    kv_offsets=None,
    *,
    scale=None,
    window=None,
    bias=None,
    precision=None,
    schedule=None,
    max_q_len=None,
    max_kv_len=None,
    impl="auto",
) -> str:
    """Which implementation a call with these arguments gets, and why each of the others does not: one line each."""
    _, _, features = _check(
        q, k, v, q_offsets, kv_offsets, scale, window, bias, precision, schedule, max_q_len, max_kv_len, impl
    )
    return REGISTRY.explain(Case.of(q, features=features, max_kv_len=max_kv_len))


jagged_attention.explain = explain
