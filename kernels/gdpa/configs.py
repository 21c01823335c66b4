"""Tile configurations of the Triton GDPA kernels: the ones in use and the ones that a sweep tries, for sm_90.

Phases: "fwd" streams keys past a query tile ("fwd_tma_short" where sequences have few queries); "fwd_resident_1" and
"fwd_resident_2" keep one or two key tiles (of the same block_n) on chip and stream queries; "dq" and "dkdv" are the two
kernels of the split backward; "owner" is the backward that owns a (sequence, head). With _tma behind the name what is
streamed comes by descriptors, else by loads (the resident ones take either).
block_m counts query rows, block_n keys. Only the forward configurations by descriptors depend on the batch: nothing is
rescaled, so sums over keys run in the same order in all of them, and a test holds their results to the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PHASES = (
    "fwd", "fwd_tma", "fwd_tma_short", "fwd_resident_1", "fwd_resident_2", "dq", "dkdv", "dq_tma", "dkdv_tma", "owner",
)  # fmt: skip
SHORT_ROWS = 256  # queries a sequence, on average, up to which fwd_tma_short is used (H200, TUNING.md)


@dataclass(frozen=True)
class Config:
    """One compiled variant. chunk: query tiles that a "fwd_resident_*" program works through."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    chunk: int = 1


# Defaults by padded head size (up to 64, 128, 256), 16-bit types. The outcome of every sweep is in TUNING.md.
_DEFAULT = {
    ("fwd", 64): Config(128, 64, 4, 3),
    ("fwd", 128): Config(128, 32, 4, 3),
    ("fwd", 256): Config(128, 64, 8, 2),
    ("fwd_tma", 64): Config(128, 64, 4, 3),
    ("fwd_tma", 128): Config(128, 64, 4, 2),
    ("fwd_tma", 256): Config(128, 64, 8, 2),
    ("fwd_tma_short", 64): Config(128, 64, 4, 3),
    ("fwd_tma_short", 128): Config(64, 32, 4, 3),
    ("fwd_tma_short", 256): Config(128, 64, 8, 2),
    ("fwd_resident_1", 64): Config(128, 128, 8, 2, 4),
    ("fwd_resident_2", 64): Config(128, 128, 8, 2, 4),
    ("fwd_resident_1", 128): Config(64, 128, 4, 3, 16),
    ("fwd_resident_2", 128): Config(64, 128, 4, 3, 16),
    ("dq", 64): Config(128, 64, 8, 3),
    ("dq", 128): Config(128, 64, 8, 3),
    ("dq", 256): Config(64, 32, 4, 2),
    ("dkdv", 64): Config(64, 128, 8, 2),
    ("dkdv", 128): Config(64, 128, 8, 3),
    ("dkdv", 256): Config(32, 64, 8, 2),
    ("dq_tma", 64): Config(128, 64, 8, 3),
    ("dq_tma", 128): Config(64, 64, 4, 2),
    ("dq_tma", 256): Config(64, 32, 4, 2),
    ("dkdv_tma", 64): Config(64, 128, 8, 2),
    ("dkdv_tma", 128): Config(64, 64, 4, 2),
    ("dkdv_tma", 256): Config(32, 64, 8, 2),
    ("owner", 64): Config(64, 128, 8, 2),
    ("owner", 128): Config(32, 128, 8, 3),
    ("owner", 256): Config(32, 64, 8, 2),
}

_CANDIDATES = {
    ("fwd", 64): [(128, 64, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3), (64, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3)],
    ("fwd", 128): [
        (128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 2), (128, 32, 4, 3),
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 8, 2), (256, 64, 8, 2), (256, 64, 8, 3),
        (64, 32, 4, 4), (64, 32, 4, 3), (128, 32, 4, 4), (128, 64, 4, 3),
    ],
    ("fwd", 256): [(128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 2), (128, 32, 8, 3), (64, 32, 4, 3), (64, 64, 8, 2)],
    ("resident", 64): [(128, 128, 8, 2, 4), (64, 128, 4, 3, 4), (128, 128, 4, 2, 4), (128, 128, 8, 3, 8)],
    ("resident", 128): [
        (128, 128, 8, 2, 4), (128, 128, 8, 2, 8), (128, 128, 8, 2, 2), (64, 128, 4, 2, 8), (64, 128, 4, 3, 8),
        (64, 128, 8, 3, 8), (64, 128, 8, 2, 4), (128, 128, 8, 1, 4), (64, 128, 4, 1, 8), (128, 128, 8, 3, 8),
        (64, 128, 4, 3, 16), (64, 128, 4, 3, 32), (64, 128, 4, 2, 16), (128, 128, 8, 2, 1), (128, 128, 8, 3, 4),
    ],
    ("dq", 64): [(128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2)],
    ("dq", 128): [
        (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3),
        (64, 128, 8, 2), (64, 32, 4, 3), (128, 128, 8, 2),
    ],
    ("dq", 256): [(64, 32, 4, 2), (64, 32, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2)],
    ("dkdv", 64): [(64, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3), (128, 128, 8, 2)],
    ("dkdv", 128): [
        (64, 128, 8, 2), (64, 128, 8, 3), (64, 64, 4, 2), (32, 128, 8, 3), (32, 64, 4, 3), (64, 64, 8, 2),
        (128, 64, 8, 2),
    ],
    ("dkdv", 256): [(32, 64, 8, 2), (64, 64, 8, 2), (32, 64, 8, 3)],
    ("owner", 64): [(64, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3)],
    ("owner", 128): [
        (64, 128, 8, 2), (32, 128, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2), (32, 64, 4, 3), (32, 128, 8, 3),
        (64, 64, 4, 3),
    ],
    ("owner", 256): [(32, 64, 8, 2), (64, 64, 8, 2)],
}  # fmt: skip


def padded(head_dim: int) -> int:
    """Columns of the tiles that hold `head_dim` columns: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _bucket(head_dim: int) -> int:
    return min(max(64, padded(head_dim)), 256)


def candidates(phase: str, head_dim: int) -> list[Config]:
    """Configurations that a sweep of `phase` tries at `head_dim` with 16-bit inputs, the default among them."""
    if phase not in PHASES:
        raise ValueError(f"phase: {phase!r}; allowed: {', '.join(PHASES)}")
    kind = "resident" if phase.startswith("fwd_resident") else phase.split("_")[0]
    found = [Config(*values) for values in _CANDIDATES.get((kind, _bucket(head_dim)), [])]
    default = _DEFAULT.get((phase, _bucket(head_dim)))
    return found if default is None or default in found else [default, *found]


def default(phase: str, head_dim: int, dtype: torch.dtype) -> Config:
    """The configuration in use. float32 runs without tensor cores (exact products) in small tiles."""
    if dtype == torch.float32:
        side = 32 if head_dim <= 128 else 16
        return Config(side, side, 4, 1, 4)
    return _DEFAULT[phase, _bucket(head_dim)]


def resident_pays(head_dim: int, max_kv_len: int) -> bool:
    """Whether keys on chip are the faster choice: one key tile, at the head sizes that were measured."""
    return _bucket(head_dim) == 128 and max_kv_len <= _DEFAULT["fwd_resident_1", 128].block_n


def has_resident(head_dim: int) -> bool:
    """Whether two key tiles of 128 rows, with their values, fit on chip."""
    return padded(head_dim) <= 128
