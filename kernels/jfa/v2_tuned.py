"""JFA v2: tuned FlashAttention-2 style attention over offsets, without a fork of the compiler.

Self, cross and shared queries (PMA), sliding window with off-window tiles skipped,
additive bias with the gradient of its table.
Forward in `triton_forward.py`, backward by any scheme of `triton_schemes.py`.
"""

from __future__ import annotations

from ..registry import Case, Implementation
from . import configs, triton_schemes
from .triton_forward import forward

DEFAULT_SCHEME = "split"
GEMMS = triton_schemes.GEMMS


def backward(*args, scheme=DEFAULT_SCHEME, **kwargs):
    """(dq, dk, dv, gradient of bias.table or None) by the named scheme; arguments as in `api.py`."""
    return triton_schemes.backward(*args, scheme=scheme, **kwargs)


def _unsupported(case: Case) -> str | None:
    return configs.unsupported(case, without=("schedule",))


IMPLEMENTATION = Implementation("v2", forward, backward, _unsupported)
__all__ = ["GEMMS", "IMPLEMENTATION", "backward", "forward"]
