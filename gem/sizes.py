"""Sizes of the miniature GEM: one event type's branch, the whole model, and the presets that a tier names.

Preset `base` was fixed before the first GPU record and does not change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class EventSize:
    """Size of one event type's branch: an event type has its own width, heads, depth and window.

    num_layers counts from the first layer; later layers keep the branch's last summary. window w: |i - j| <= w.
    """

    width: int
    num_heads: int
    num_layers: int
    window: int

    def __post_init__(self):
        for name in ("width", "num_heads", "num_layers", "window"):
            positive(f"event size {name}", getattr(self, name))
        if self.width % self.num_heads:
            raise ValueError(f"event size: width {self.width} is not divisible by num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"event size: head_dim {self.head_dim} is odd; rotary turns pairs, so it must be even")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the miniature GEM. `events` is dealt to the data's event types in the manifest's order, cyclically."""

    width: int
    num_layers: int
    events: tuple[EventSize, ...]
    num_tokens: int
    num_summary: int
    num_kv: int
    num_seeds: int
    num_hsp_seeds: int
    kron_rank: int
    num_experts: int
    expert_rank: int
    expert_hidden: int
    head_hidden: int
    dense_hidden: int
    table_dim: int
    block_size: int = 64
    time_scale: float = 3600.0
    gdpa_activation: str = "gelu_tanh"

    def __post_init__(self):
        for item in dataclasses.fields(self):
            if item.type == "int":
                positive(f"model {item.name}", getattr(self, item.name))
        if not self.events:
            raise ValueError("model events: empty; at least one event size is needed")
        if self.num_tokens % (2 * self.num_experts):
            raise ValueError(
                f"model num_tokens: {self.num_tokens} is not divisible by 2 x num_experts {self.num_experts}; each "
                "expert gives num_tokens / num_experts tokens, one half of them interactions, the other linear"
            )
        if self.time_scale <= 0:
            raise ValueError(f"model time_scale: {self.time_scale} seconds; must be > 0")
        deepest = max(size.num_layers for size in self.events)
        if deepest > self.num_layers:
            raise ValueError(f"model events: a branch has {deepest} layers, the model only {self.num_layers}")


def positive(name: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: {value!r} is not an integer; must be an integer >= 1")
    if value < 1:
        raise ValueError(f"{name}: {value} is out of range; must be an integer >= 1")


PRESETS: dict[str, ModelConfig] = {
    # a variant with three seeds in seconds on one CPU core
    "smoke": ModelConfig(
        width=32, num_layers=2, events=(EventSize(32, 1, 2, 32), EventSize(16, 1, 1, 32), EventSize(16, 1, 1, 16)),
        num_tokens=8, num_summary=4, num_kv=16, num_seeds=4, num_hsp_seeds=8, kron_rank=2, num_experts=2, expert_rank=4,
        expert_hidden=64, head_hidden=32, dense_hidden=32, table_dim=16,
    ),
    # a seed in at most 20 s on a GPU: what a step costs there is its launches, so few layers and short side branches;
    # three layers leave the recipes that spare the last one something to run in 8 bits
    "quality": ModelConfig(
        width=128, num_layers=3, events=(EventSize(128, 1, 3, 64), EventSize(64, 1, 2, 64), EventSize(64, 1, 1, 32)),
        num_tokens=16, num_summary=8, num_kv=64, num_seeds=8, num_hsp_seeds=32, kron_rank=4, num_experts=2,
        expert_rank=16, expert_hidden=512, head_hidden=128, dense_hidden=128, table_dim=64,
    ),
    # the size that one H200 trains at local batch 1024
    "base": ModelConfig(
        width=512, num_layers=4,
        events=(EventSize(512, 4, 4, 100), EventSize(512, 4, 2, 100), EventSize(256, 2, 2, 50)),
        num_tokens=64, num_summary=16, num_kv=128, num_seeds=32, num_hsp_seeds=128, kron_rank=8, num_experts=2,
        expert_rank=32, expert_hidden=2048, head_hidden=512, dense_hidden=512, table_dim=128,
    ),
    # several GPUs
    "large": ModelConfig(
        width=1024, num_layers=8,
        events=(EventSize(1024, 8, 8, 100), EventSize(512, 4, 8, 100), EventSize(512, 4, 4, 50)),
        num_tokens=64, num_summary=16, num_kv=256, num_seeds=32, num_hsp_seeds=256, kron_rank=8, num_experts=8,
        expert_rank=64, expert_hidden=8192, head_hidden=1024, dense_hidden=1024, table_dim=256,
    ),
}  # fmt: skip

# Sizes around preset quality, for NE against training FLOPs alone: a quarter, half and twice its width, and fewer or
# more layers. Heads stay at 64 or 128, which is what every kernel has.
SIZES: dict[str, ModelConfig] = {
    "quality_quarter": ModelConfig(
        width=32, num_layers=1, events=(EventSize(64, 1, 1, 64), EventSize(64, 1, 1, 64), EventSize(64, 1, 1, 32)),
        num_tokens=4, num_summary=4, num_kv=16, num_seeds=4, num_hsp_seeds=8, kron_rank=2, num_experts=2,
        expert_rank=4, expert_hidden=64, head_hidden=32, dense_hidden=32, table_dim=16,
    ),
    "quality_half": ModelConfig(
        width=64, num_layers=2, events=(EventSize(64, 1, 2, 64), EventSize(64, 1, 1, 64), EventSize(64, 1, 1, 32)),
        num_tokens=8, num_summary=4, num_kv=32, num_seeds=4, num_hsp_seeds=16, kron_rank=2, num_experts=2,
        expert_rank=8, expert_hidden=256, head_hidden=64, dense_hidden=64, table_dim=32,
    ),
    "quality_double": ModelConfig(
        width=256, num_layers=4, events=(EventSize(256, 2, 4, 64), EventSize(128, 1, 2, 64), EventSize(64, 1, 1, 32)),
        num_tokens=32, num_summary=16, num_kv=128, num_seeds=16, num_hsp_seeds=64, kron_rank=8, num_experts=2,
        expert_rank=32, expert_hidden=1024, head_hidden=256, dense_hidden=256, table_dim=64,
    ),
}  # fmt: skip
ALL_SIZES = PRESETS | SIZES
