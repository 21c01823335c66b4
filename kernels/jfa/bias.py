"""An additive attention bias looked up in a table by relative position or by the gap between two events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..jagged import time_buckets


@dataclass(frozen=True)
class Bias:
    """score[h, i, j] += table[h, bucket(i, j)].

    table: [H, buckets] float32 (float64 beside float64 values), differentiable. positions:
    - "relative": bucket = clamp(j - i + buckets // 2, 0, buckets - 1), i and j positions in their own sequences;
    - time stamps t [T] (integers, or floats) of the packed rows, self-attention only:
      bucket = min(floor(log2(1 + |t_i - t_j|)), buckets - 1).
    """

    table: torch.Tensor
    positions: Literal["relative"] | torch.Tensor = "relative"

    @property
    def buckets(self) -> int:
        return self.table.shape[1]

    @property
    def times(self) -> torch.Tensor | None:
        """The time stamps, or None for relative positions."""
        return None if isinstance(self.positions, str) else self.positions

    @staticmethod
    def of(table: torch.Tensor | None, times: torch.Tensor | None) -> Bias | None:
        """Inverse of (bias.table, bias.times), the form in which the torch.library op takes a bias."""
        return None if table is None else Bias(table, "relative" if times is None else times)

    def check(self, op: str, q: torch.Tensor, kind: frozenset[str]) -> None:
        """ValueError unless the bias fits queries [Tq, H, D] and the kind of call."""
        expected = torch.float64 if q.dtype == torch.float64 else torch.float32
        if self.table.dim() != 2 or self.table.shape[0] != q.shape[1] or self.table.shape[1] < 1:
            raise ValueError(
                f"{op}: bias.table has shape {tuple(self.table.shape)}; allowed: ({q.shape[1]}, buckets >= 1)"
            )
        if self.table.dtype != expected or self.table.device != q.device:
            raise ValueError(
                f"{op}: bias.table is {self.table.dtype} on {self.table.device}; allowed: {expected} on {q.device}"
            )
        if isinstance(self.positions, str):
            if self.positions != "relative":
                raise ValueError(f"{op}: bias.positions is {self.positions!r}; allowed: 'relative' or time stamps [T]")
            return
        if kind:
            raise ValueError(f"{op}: bias with time stamps and {', '.join(sorted(kind))}; allowed: self-attention only")
        if self.positions.shape != q.shape[:1] or self.positions.device != q.device:
            raise ValueError(
                f"{op}: bias.positions has shape {tuple(self.positions.shape)} on {self.positions.device}; "
                f"allowed: ({q.shape[0]},) on {q.device}"
            )

    def relative_bucket(self, q_positions: torch.Tensor, kv_positions: torch.Tensor) -> torch.Tensor:
        """Bucket [..., q, kv] of positions [..., q] and [..., kv]."""
        gap = kv_positions.unsqueeze(-2) - q_positions.unsqueeze(-1)
        return (gap + self.buckets // 2).clamp(0, self.buckets - 1)

    def time_bucket(self, q_times: torch.Tensor, kv_times: torch.Tensor) -> torch.Tensor:
        """Bucket [..., q, kv] of time stamps [..., q] and [..., kv]."""
        return time_buckets(kv_times.unsqueeze(-2) - q_times.unsqueeze(-1), self.buckets)
