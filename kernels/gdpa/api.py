"""gdpa: attention with an activation in place of softmax over packed sequences, one name for every implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..registry import Case, Registry
from ..schedule import Schedule, flatten
from ..selection import selector, static
from ..validation import check_attention, check_precision, check_scale, check_schedule, unit_last_stride
from . import activations
from .function import gdpa_op

if TYPE_CHECKING:
    from ..mxfp8 import Recipe

REGISTRY = Registry("gdpa", __package__)
REGISTRY.add("tlx", ".tlx", 40)
REGISTRY.add("triton", ".triton_gdpa", 30)
REGISTRY.add("eager", ".eager", 20)
REGISTRY.add("reference", ".reference", 10)
_select = selector(REGISTRY)


def _check(q, k, v, q_offsets, kv_offsets, activation, scale, precision, schedule, max_q_len, max_kv_len, impl):
    """Validate a call; returns (kv_offsets, scale, features)."""
    kv_offsets, kind = check_attention("gdpa", q, k, v, q_offsets, kv_offsets, max_q_len, max_kv_len)
    check_schedule("gdpa", schedule, q.device)
    activations.get(activation)
    check_precision("gdpa", precision, impl, schedule=schedule)
    scale = check_scale("gdpa", scale)
    return kv_offsets, scale, (*sorted(kind), *(() if schedule is None else ("schedule",)))


def gdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor | None,
    kv_offsets: torch.Tensor | None = None,
    *,
    activation: str = "gelu_tanh",
    scale: float = 1.0,
    precision: Recipe | None = None,
    schedule: Schedule | None = None,
    max_q_len: int | None = None,
    max_kv_len: int | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """o_i = sum_j act(scale * q_i . k_j) v_j over the keys j of query i's own sequence.

    The source's generalised dot-product attention: self-attention, cross-attention, pooling by queries and the
    personalised feed-forward as two matrix products with an elementwise activation between; no softmax, no
    normalisation, hence no row statistics to keep or correct.

    q: [Tq, H, D]; k, v: [Tkv, H, D]; bfloat16, float16, float32 or float64, any strides (views of a fused buffer work).
    q_offsets, kv_offsets: [B + 1], int32 or int64 (see kernels/jagged.py). kv_offsets None: self-attention. q_offsets
    None: q [Lq, H, D] are dense queries shared by all sequences; needs kv_offsets; their gradient is summed over the
    batch. activation: one of activations.ACTIVATIONS; the same function and its own derivative forward and backward.
    gelu_taylor6 approximates gelu for |scale * q . k| <= 1 only, which normalised q and k guarantee; nothing checks it.
    scale multiplies the scores BEFORE the activation and is a constant. precision: None (that of the inputs) or an
    mxfp8.Recipe, whose numerics are emulated with impl="auto". schedule: a host-made tile order on the device
    (kernels that take one). max_q_len, max_kv_len: hints of the longest lengths; they never change a result. impl:
    "auto", or one of REGISTRY.names; a named one runs or raises.

    Returns o, dtype of q: [Tq, H, D], or [B, Lq, H, D] for shared queries. Rows of queries without keys and rows past
    q_offsets[-1] are exact zeros, and so are their gradients. A sequence's rows depend, bit for bit, on that sequence
    alone (eager: on a CPU); exempt is the gradient of shared queries. Errors: ValueError for every bad argument, with
    what is allowed.
    """
    kv_offsets, scale, features = _check(
        q, k, v, q_offsets, kv_offsets, activation, scale, precision, schedule, max_q_len, max_kv_len, impl
    )
    if precision is not None:
        from ..mxfp8 import gdpa_mx

        given = None if kv_offsets is q_offsets else kv_offsets
        return gdpa_mx(q, k, v, q_offsets, given, activation=activation, scale=scale, recipe=precision)
    tiles, program_offsets, blocks = flatten(schedule)
    return gdpa_op(
        *(unit_last_stride(x) for x in (q, k, v)),
        q_offsets,
        kv_offsets,
        activation,
        scale,
        max_q_len,
        max_kv_len,
        tiles,
        program_offsets,
        blocks,
        _select(impl, *static(q), features, activation, max_kv_len),
    )


def explain(
    q,
    k,
    v,
    q_offsets,
    kv_offsets=None,
    *,
    activation="gelu_tanh",
    scale=1.0,
    precision=None,
    schedule=None,
    max_q_len=None,
    max_kv_len=None,
    impl="auto",
) -> str:
    """Which implementation a call with these arguments gets, and why each of the others does not: one line each."""
    arguments = activation, scale, precision, schedule, max_q_len, max_kv_len, impl
    features = frozenset(_check(q, k, v, q_offsets, kv_offsets, *arguments)[2])
    return REGISTRY.explain(Case.of(q, features=features, activation=activation, max_kv_len=max_kv_len))


gdpa.explain = explain
