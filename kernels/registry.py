"""Which implementations an op has, and which of them a call gets.

Every op (``jagged_attention``, ``gdpa``, ``block_attention``) keeps one `Registry`. An implementation is registered by
name with the module that holds it, so that importing the package imports no kernel language: the module is loaded on
first use.

A named implementation runs or raises. ``impl="auto"`` takes the implementation of highest priority whose `unsupported`
returns None, and never does so silently when asked: `Registry.explain` gives the reason for every candidate.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Case:
    """What an implementation may base its answer on: the call's static properties, no tensor values.

    device_type is "cpu" or "cuda"; capability is (major, minor) of a CUDA device, (0, 0) elsewhere. `features` names
    what the call asks for beyond the plain op: "window", "bias", "shared_q", "cross", "rotary", "schedule",
    "block_size" (one other than 64).
    """

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    head_dim: int
    features: frozenset[str] = frozenset()
    activation: str | None = None
    max_kv_len: int | None = None

    @staticmethod
    def of(q: torch.Tensor, **kwargs) -> Case:
        """Case of a query tensor [..., H, D]."""
        capability = _capability(q.device.index or 0) if q.device.type == "cuda" else (0, 0)
        return Case(q.device.type, capability, q.dtype, q.shape[-1], **kwargs)


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op. `forward` and `backward` have the signature that the op's api.py documents.

    `unsupported(case)` returns one line that says why the case cannot run here, or None when it can.
    """

    name: str
    forward: Callable
    backward: Callable
    unsupported: Callable[[Case], str | None]


@dataclass
class Registry:
    """Implementations of one op: name -> (module, priority). The module must expose `IMPLEMENTATION`."""

    op: str
    package: str
    entries: dict[str, tuple[str, int]] = field(default_factory=dict)
    _loaded: dict[str, Implementation | str] = field(default_factory=dict)

    def add(self, name: str, module: str, priority: int) -> None:
        """Register implementation `name`, found as `IMPLEMENTATION` in relative module `module` (such as ".eager")."""
        self.entries[name] = (module, priority)

    @property
    def names(self) -> list[str]:
        """All names, best first."""
        return sorted(self.entries, key=lambda name: -self.entries[name][1])

    def load(self, name: str) -> Implementation | str:
        """The implementation, or one line saying why its module cannot be imported."""
        if name not in self.entries:
            raise ValueError(f"{self.op}: unknown impl {name!r}; allowed: auto, {', '.join(self.names)}")
        if name not in self._loaded:
            try:
                self._loaded[name] = importlib.import_module(self.entries[name][0], self.package).IMPLEMENTATION
            except ImportError as error:
                self._loaded[name] = f"cannot be imported ({error})"
        return self._loaded[name]

    def why_not(self, name: str, case: Case) -> str | None:
        """Reason why `name` cannot run `case`, or None."""
        loaded = self.load(name)
        return loaded if isinstance(loaded, str) else loaded.unsupported(case)

    def select(self, impl: str, case: Case) -> Implementation:
        """The implementation for a call. A named one that cannot run is a ValueError with its reason."""
        if impl == "auto":
            for name in self.names:
                if self.why_not(name, case) is None:
                    return self.load(name)
            raise ValueError(f"{self.op}: no implementation runs {case}; {self.explain(case)}")
        reason = self.why_not(impl, case)
        if reason is not None:
            raise ValueError(f"{self.op}: impl {impl!r} {reason}")
        return self.load(impl)

    def explain(self, case: Case) -> str:
        """One line a candidate, best first: the chosen one is marked, the others say why they were passed over."""
        lines, chosen = [], False
        for name in self.names:
            reason = self.why_not(name, case)
            if reason is None and not chosen:
                lines.append(f"{self.op}: {name} <- chosen")
                chosen = True
            else:
                lines.append(f"{self.op}: {name} {'could run, lower priority' if reason is None else reason}")
        return "\n".join(lines)
