"""Choice of an implementation in code that torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .registry import Case, Registry, _capability


def selector(registry: Registry) -> Callable[..., str]:
    """A function that names the implementation of `registry` for a call, and is a constant to torch.compile.

    Its arguments are plain values, not a Case: the choice depends on static properties alone, so the compiler calls it
    while tracing and keeps the name. A named implementation that cannot run is a ValueError, as in Registry.select.
    """

    @torch.compiler.assume_constant_result
    def select(
        impl: str,
        device_type: str,
        device_index: int | None,
        dtype: torch.dtype,
        head_dim: int,
        features: tuple[str, ...] = (),
        activation: str | None = None,
        max_kv_len: int | None = None,
    ) -> str:
        capability = _capability(device_index or 0) if device_type == "cuda" else (0, 0)
        case = Case(device_type, capability, dtype, head_dim, frozenset(features), activation, max_kv_len)
        return registry.select(impl, case).name

    return select


def static(x: torch.Tensor) -> tuple[str, int | None, torch.dtype, int]:
    """The leading arguments of a `selector` for a tensor [..., head_dim]."""
    return x.device.type, x.device.index, x.dtype, x.shape[-1]
