"""Tile shapes of the Triton kernels, chosen from head_dim, dtype and phase, never from the batch.

A sequence's result must not depend on its batch-mates, so nothing here looks at lengths. `CONFIGS` holds the choice,
`candidates` what a sweep should try; a sweep forces a choice with `forced(phase=Config(...))`.

Phases: fwd_tma (v2 and v3 by descriptors), fwd_window (v2 so, with a window), fwd_few (v2 and v3 so, queries shared by
all sequences that fit 64 rows), fwd (v2 and v3 by loads); dq, dkdv (split scheme) and atomic (its kernel is dkdv's with
dQ added by it, but it has other needs: a wider key tile adds less often), by loads or, with _tma behind the name, by
descriptors; fused (recompute), owner (owner and serial).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch
import triton

from ..registry import Case

PHASES = (
    "fwd", "fwd_tma", "fwd_window", "fwd_few", "dq", "dkdv", "atomic", "dq_tma", "dkdv_tma", "atomic_tma", "fused",
    "owner",
)  # fmt: skip
FORWARD = PHASES[:4]
FEW = 64  # rows of the query tile of fwd_few


@dataclass(frozen=True)
class Config:
    """block_m query rows x block_n keys a tile; tail_n keys a step on the ragged end (0: block_n)."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tail_n: int = 0

    @property
    def tail(self) -> int:
        return self.tail_n or self.block_n


def head_dim_class(head_dim: int) -> int:
    """Power of two that holds head_dim, at least 16 (the smallest side of tl.dot)."""
    return max(16, triton.next_power_of_2(head_dim))


# 16-bit inputs, keyed by (head_dim class, phase). TUNING.md says how each was chosen.
CONFIGS: dict[tuple[int, str], Config] = {
    (64, "fwd"): Config(128, 64, 4, 3),
    (64, "fwd_tma"): Config(128, 64, 4, 3),
    (64, "fwd_window"): Config(128, 64, 4, 3),
    (64, "fwd_few"): Config(64, 64, 4, 3),
    (64, "dq"): Config(128, 64, 8, 2),
    (64, "dkdv"): Config(64, 128, 8, 2),
    (64, "atomic"): Config(64, 128, 8, 2),
    (64, "dq_tma"): Config(128, 64, 8, 2),
    (64, "dkdv_tma"): Config(64, 128, 8, 2),
    (64, "atomic_tma"): Config(64, 128, 8, 2),
    (64, "fused"): Config(64, 64, 4, 2),
    (64, "owner"): Config(64, 128, 8, 2),
    (128, "fwd"): Config(128, 64, 4, 2),
    (128, "fwd_tma"): Config(128, 64, 4, 2),
    (128, "fwd_window"): Config(64, 64, 4, 3),
    (128, "fwd_few"): Config(64, 64, 4, 3),
    (128, "dq"): Config(64, 64, 4, 2),
    (128, "dkdv"): Config(64, 64, 4, 2),
    (128, "atomic"): Config(64, 128, 8, 2),
    (128, "dq_tma"): Config(64, 64, 4, 2),
    (128, "dkdv_tma"): Config(64, 64, 4, 2),
    (128, "atomic_tma"): Config(64, 128, 8, 3),
    (128, "fused"): Config(64, 64, 8, 2),
    (128, "owner"): Config(32, 128, 8, 2),
    (256, "fwd"): Config(128, 64, 8, 2),
    (256, "fwd_tma"): Config(128, 64, 8, 2),
    (256, "fwd_window"): Config(128, 64, 8, 2),
    (256, "fwd_few"): Config(64, 64, 8, 2),
    (256, "dq"): Config(128, 32, 8, 2),
    (256, "dkdv"): Config(32, 64, 8, 2),
    (256, "atomic"): Config(32, 64, 8, 2),
    (256, "dq_tma"): Config(128, 32, 8, 2),
    (256, "dkdv_tma"): Config(32, 64, 8, 2),
    (256, "atomic_tma"): Config(32, 64, 8, 2),
    (256, "fused"): Config(32, 64, 8, 2),
    (256, "owner"): Config(32, 64, 8, 2),
}
# float32: no tensor cores, products in FP32 (ieee); small tiles keep the accumulators in registers.
FLOAT32 = Config(32, 32, 4, 1)

_FORCED: dict[str, Config] = {}


def select(phase: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The config of a phase; the same for every batch."""
    if phase in _FORCED:
        return _FORCED[phase]
    if dtype == torch.float32:
        return FLOAT32
    return CONFIGS[(min(256, max(64, head_dim_class(head_dim))), phase)]


@contextlib.contextmanager
def forced(**phases: Config):
    """Within the block, use the given config for the given phases (sweeps and tests)."""
    unknown = set(phases) - set(PHASES)
    if unknown:
        raise ValueError(f"forced: unknown phase {sorted(unknown)[0]!r}; allowed: {', '.join(PHASES)}")
    saved = dict(_FORCED)
    _FORCED.update(phases)
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(saved)


def candidates(phase: str, head_dim: int) -> list[Config]:
    """Configs worth a sweep on a Hopper GPU, the present choice first. Each fits 227 KB of shared memory."""
    if phase not in PHASES:
        raise ValueError(f"candidates: unknown phase {phase!r}; allowed: {', '.join(PHASES)}")
    width = min(256, max(64, head_dim_class(head_dim)))
    if phase in FORWARD:
        shapes = [
            (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 3),
            (128, 128, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 32, 4, 3), (256, 64, 8, 2),
            (64, 64, 4, 4), (64, 32, 4, 3), (64, 32, 4, 4), (128, 32, 4, 4), (128, 64, 4, 1),
        ]  # fmt: skip
    elif phase in ("dq", "dq_tma"):
        shapes = [(128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (128, 128, 8, 1),
                  (128, 32, 4, 2), (128, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 64, 4, 1), (64, 128, 4, 1),
                  (128, 32, 8, 2), (128, 32, 8, 3), (128, 64, 8, 1)]  # fmt: skip
    elif phase in ("dkdv", "atomic", "dkdv_tma", "atomic_tma"):
        shapes = [(64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 4, 2),
                  (128, 128, 8, 1), (128, 64, 8, 2), (32, 128, 4, 2), (64, 64, 4, 1), (64, 64, 4, 3), (32, 64, 4, 3),
                  (64, 128, 8, 1), (32, 128, 8, 3)]  # fmt: skip
    elif phase == "owner":
        shapes = [(64, 128, 8, 2), (64, 128, 8, 1), (64, 64, 4, 2), (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 8, 2),
                  (128, 64, 8, 1)]  # fmt: skip
    else:
        shapes = [(64, 64, 8, 2), (64, 64, 4, 2), (64, 128, 8, 2)]
    found = [Config(*shape) for shape in shapes if _shared_bytes(phase, Config(*shape), width) <= 227 * 1024]
    if phase == "fwd":
        found += [replace(c, tail_n=c.block_n // 2) for c in found if c.block_n == 128]
    first = CONFIGS[(width, phase)]
    return [first] + [c for c in found if c != first]


def _shared_bytes(phase: str, c: Config, width: int) -> int:
    """Shared memory that 16-bit tiles need at least: resident operands plus the pipelined ones."""
    if phase in FORWARD:
        return 2 * width * (c.block_m + 2 * c.block_n * c.num_stages)
    if phase in ("dq", "dq_tma"):
        return 2 * width * 2 * (c.block_m + c.block_n * c.num_stages)
    extra = 2 * c.block_m * c.block_n
    if phase in ("atomic", "atomic_tma"):  # dQ changes its layout in float32 on the way out, 64 rows at least
        extra += 4 * width * max(c.block_m, 64)
    return 2 * width * 2 * (c.block_n + c.block_m * c.num_stages) + extra


def unsupported(case: Case, without: tuple[str, ...] = ()) -> str | None:
    """Why the Triton kernels cannot run `case`, or None. `without`: features that the asking implementation lacks."""
    if case.device_type != "cuda" and not triton.knobs.runtime.interpret:
        return f"needs a CUDA device, got {case.device_type}"
    if case.device_type == "cuda" and case.capability < (8, 0):
        return f"needs compute capability 8.0 or higher, got {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"takes bfloat16, float16, float32, got {case.dtype}"
    if case.device_type != "cuda" and case.dtype == torch.bfloat16:
        return "under Triton's interpreter takes float16 and float32: its bfloat16 product is wrong"
    if case.head_dim % 8 or not 8 <= case.head_dim <= 256:
        return f"takes head_dim 8 to 256 in steps of 8, got {case.head_dim}"
    missing = [feature for feature in without if feature in case.features]
    return f"has no {missing[0]}" if missing else None
