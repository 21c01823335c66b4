"""Argument checks and small numerics that the ops share. Each error is a ValueError: what, where, what is allowed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from .jagged import check_offsets
from .schedule import Schedule

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_values(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q [Tq, H, D], k and v [Tkv, H, D]: same floating dtype, device, H and D."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{op}: {name} is {type(x).__name__}; allowed: a tensor [rows, heads, head_dim]")
        if x.dim() != 3:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; allowed: [rows, heads, head_dim]")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{op}: {name} has dtype {x.dtype}; allowed: bfloat16, float16, float32, float64")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{op}: {name} is {x.dtype} on {x.device}; allowed: {q.dtype} on {q.device}, as q")
        if x.shape[1:] != q.shape[1:]:
            raise ValueError(
                f"{op}: {name} has heads, head_dim {tuple(x.shape[1:])}; allowed: {tuple(q.shape[1:])}, as q"
            )
    if q.shape[1] == 0 or q.shape[2] == 0:
        raise ValueError(f"{op}: heads, head_dim are {tuple(q.shape[1:])}; allowed: >= 1 each")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{op}: k has {k.shape[0]} rows, v {v.shape[0]}; allowed: the same number")


def check_attention(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_offsets: torch.Tensor | None,
    kv_offsets: torch.Tensor | None,
    max_q_len: int | None,
    max_kv_len: int | None,
) -> tuple[torch.Tensor, frozenset[str]]:
    """Check tensors, offsets and hints of a self-attention, cross-attention or shared-query call.

    Returns kv_offsets (never None) and which of "cross", "shared_q" the call is; neither for self-attention.
    """
    check_values(op, q, k, v)
    if q_offsets is None and kv_offsets is None:
        raise ValueError(f"{op}: q_offsets and kv_offsets are both None; allowed: at most one of them")
    if q_offsets is None:
        kind = frozenset({"shared_q"})
        if max_q_len is not None and max_q_len < q.shape[0]:
            raise ValueError(f"max_q_len: {max_q_len}, but {q.shape[0]} queries are shared; allowed: >= {q.shape[0]}")
    elif kv_offsets is None or kv_offsets is q_offsets:
        kind, kv_offsets = frozenset(), q_offsets
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"{op}: self-attention, but q has {q.shape[0]} rows and k {k.shape[0]}; allowed: the same")
    else:
        kind = frozenset({"cross"})
    if q_offsets is not None:
        check_offsets(q_offsets, "q_offsets", q.shape[0], device=q.device, max_len=max_q_len, max_len_name="max_q_len")
    if kind or max_kv_len is not None:
        batch = None if q_offsets is None else q_offsets.shape[0] - 1
        name = "kv_offsets" if kind else "q_offsets"
        check_offsets(
            kv_offsets, name, k.shape[0], device=q.device, batch=batch, max_len=max_kv_len, max_len_name="max_kv_len"
        )
    return kv_offsets, kind


def check_window(op: str, window: int | None, kind: frozenset[str]) -> None:
    """window is None or an integer >= 0, and only for self-attention."""
    if window is None:
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ValueError(f"{op}: window is {window!r}; allowed: None or an integer >= 0")
    if kind:
        raise ValueError(f"{op}: window with {', '.join(sorted(kind))}; allowed: self-attention only")


def check_scale(op: str, scale: float) -> float:
    """scale is a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale!r}; allowed: a finite number")
    return float(scale)


def check_schedule(op: str, schedule: Schedule | None, device: torch.device) -> None:
    """schedule is None or a Schedule on the values' device."""
    if schedule is None:
        return
    if not isinstance(schedule, Schedule):
        raise ValueError(f"{op}: schedule is {type(schedule).__name__}; allowed: None or schedule.tile_schedule(...)")
    if schedule.tiles.device != device:
        raise ValueError(f"{op}: schedule is on {schedule.tiles.device}; allowed: {device}; use schedule.to(device)")


def unit_last_stride(x: torch.Tensor) -> torch.Tensor:
    """x itself when its last dimension is contiguous (any strides elsewhere), else a contiguous copy."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def strict_float32() -> Iterator[None]:
    """float32 products in float32: neither TF32 on a GPU nor bfloat16 on a CPU, whatever the process allows
    elsewhere.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    if all(precision == "ieee" for precision in before):
        yield
        return
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def check_precision(op: str, precision, impl: str, **without) -> None:
    """precision: None or an mxfp8.Recipe, emulated without the arguments named in `without`."""
    if precision is None:
        return
    from .mxfp8 import Recipe

    if not isinstance(precision, Recipe):
        raise ValueError(f"{op}: precision is {precision!r}; allowed: None (that of the inputs) or an mxfp8.Recipe")
    if impl != "auto":
        raise ValueError(f"{op}: impl {impl!r} with a precision; allowed: 'auto' (MX numerics are emulated)")
    for name, value in without.items():
        if value is not None:
            raise ValueError(f"{op}: {name} is given with a precision; allowed: None (MX numerics know no {name})")
