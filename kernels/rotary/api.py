"""Public form of the rotary embedding: the tables as one object, and the op on its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..registry import Registry
from ..selection import selector, static
from ..validation import FLOAT_DTYPES, unit_last_stride
from .function import rotary_op

REGISTRY = Registry("rotary", __package__)
REGISTRY.add("triton", ".triton_rotary", 20)
REGISTRY.add("reference", ".reference", 10)
_select = selector(REGISTRY)

TENSORS = ("q", "k", "v")


@dataclass(frozen=True, eq=False)
class Rotary:
    """Tables of a rotary embedding, for ops that rotate q, k, v themselves (block_attention(rotary=...)).

    cos, sin: float32 [T, D/2], one row for each packed row, so that an angle may come from a position, a time or both.
    interleaved: pairs are columns (2p, 2p + 1); otherwise (p, p + D/2). on: which of "q", "k", "v" are turned; the
    source turns all three. Tables are constants: a table that requires a gradient is a ValueError, since none would
    be computed.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = True
    on: tuple[str, ...] = TENSORS

    def __post_init__(self):
        object.__setattr__(self, "on", tuple(self.on))
        if not set(self.on) <= set(TENSORS) or len(set(self.on)) != len(self.on):
            raise ValueError(f"Rotary: on is {self.on!r}; allowed: distinct names out of {', '.join(TENSORS)}")


def check_tables(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """x [..., H, D] with even D; cos, sin float32 [..., D/2] on x's device, without gradient. ValueError otherwise."""
    if x.shape[-1] % 2:
        raise ValueError(f"{op}: head_dim {x.shape[-1]} with rotary; allowed: even")
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, torch.Tensor) or table.dtype != torch.float32:
            kind = table.dtype if isinstance(table, torch.Tensor) else type(table).__name__
            raise ValueError(f"{op}: {name} is {kind}; allowed: a tensor of torch.float32")
        allowed = (*x.shape[:-2], x.shape[-1] // 2)
        if table.shape != allowed:
            raise ValueError(f"{op}: {name} has shape {tuple(table.shape)}; allowed: {allowed}, (rows, head_dim / 2)")
        if table.device != x.device:
            raise ValueError(f"{op}: {name} is on {table.device}; allowed: {x.device}, the device of the values")
        if table.requires_grad:
            raise ValueError(f"{op}: {name} requires a gradient; allowed: constants, such as {name}.detach()")


def apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = True, *, impl: str = "auto"
) -> torch.Tensor:
    """R(theta) x: pairs of columns turned by the row's angles, computed in float32 and rounded once.

    The source rotates q, k and v by pairs, (x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin), and the backward pass by
    the negative angle, kept in float32 until the one store.

    x [T, H, D] or [..., H, D], bfloat16, float16, float32 or float64 (computed in float64), D even, any strides. cos,
    sin float32 [T, D/2] or [..., D/2], constants. interleaved: pairs (2p, 2p + 1), else (p, p + D/2). Returns y like
    x, its dtype, contiguous; differentiable in x, twice. There are no offsets here: every row is rotated, spare rows
    too.

    ValueError: odd D, tables of another shape, dtype or device, tables that require a gradient, unknown impl.
    """
    if not isinstance(x, torch.Tensor) or x.dim() < 3 or x.dtype not in FLOAT_DTYPES:
        kind = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"rotary: x is {kind}; allowed: a floating tensor [..., heads, head_dim]")
    if x.dim() > 3:
        check_tables("rotary", x, cos, sin)
        rows = apply_rotary(x.flatten(0, -3), cos.flatten(0, -2), sin.flatten(0, -2), interleaved, impl=impl)
        return rows.view(x.shape)
    check_tables("rotary", x, cos, sin)
    return rotary_op(unit_last_stride(x), cos, sin, interleaved, _select(impl, *static(x), ("rotary",)))
