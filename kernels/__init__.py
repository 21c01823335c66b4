"""Jagged attention, GDPA, block attention and MX numerics for recommendation models: torch and triton alone.

    o = jagged_attention(q, k, v, offsets)                      # softmax attention over packed sequences
    o = gdpa(q, k, v, q_offsets, kv_offsets, activation="gelu_tanh")
    o = block_attention(q, k, v, offsets, rotary=Rotary(cos, sin))
    print(explain(gdpa, q, k, v, q_offsets))                    # which implementation, and why

Modules, imported on first use: mxfp8, flops, bounds, jagged, schedule, rotary, fused_norm, testing. Kernels in Triton
or TLX are imported only when one of them may run. See README.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

# Named at once: a subpackage that is imported later under the same name would otherwise hide the function.
from .block_attention import Rotary, block_attention
from .gdpa import gdpa
from .jfa import Bias, jagged_attention

_MODULES = ("bounds", "flops", "fused_norm", "jagged", "mxfp8", "rotary", "schedule", "testing")

__all__ = ["Bias", "Rotary", "block_attention", "explain", "gdpa", "jagged_attention", *_MODULES]


def explain(op: Callable, *args, **kwargs) -> str:
    """Which implementation `op(*args, **kwargs)` gets and why, one line for each candidate, best first.

    op: jagged_attention, gdpa or block_attention. Nothing is computed. Bad arguments raise as in the call itself.
    """
    if not callable(getattr(op, "explain", None)):
        raise ValueError(f"explain: {op!r}; allowed: jagged_attention, gdpa, block_attention")
    return op.explain(*args, **kwargs)


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
