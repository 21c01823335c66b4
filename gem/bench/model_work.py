"""FLOPs of training steps by each of the three conventions: useful, by precision, and really done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gem.config import Checkpointing, Config, GdpaImpl, Layout, SelfAttention
from gem.counts import Counts
from gem.model import GEM
from gem.sequence import PersonalisedFeedForward, Pooler, SelfAttentionBlock
from kernels import flops


@dataclass(frozen=True)
class Work:
    """Sums over steps. model: useful FLOPs, 3 x forward. done: with what is computed again in the backward. tokens:
    valid events. samples: of all steps."""

    model: int
    done: int
    tokens: int
    samples: int


def of_steps(model: GEM, config: Config, counts: Iterable[Counts]) -> Work:
    """Work of steps on batches of these counts."""
    counts = list(counts)
    useful = sum(model.step_flops(item) for item in counts)
    again = sum(recomputed(model, config, item) for item in counts)
    tokens = sum(item.events(name) for item in counts for name in item.lengths)
    return Work(useful, useful + again, tokens, sum(item.batch for item in counts))


def recomputed(model: GEM, config: Config, counts: Counts) -> int:
    """Forward FLOPs that a step repeats: layers under checkpointing at budget 0, and the product of scores, which
    every attention kernel that saves no scores forms again in its backward.

    A compiled region under a partial budget chooses by itself what to repeat: it is counted as if it kept everything,
    so that its HFU is a lower bound.
    """
    total = 0
    if config.toggles.checkpointing is Checkpointing.UNIFORM and config.implementations.compile == "eager":
        total += sum(sum(layer.flops(counts).values()) for layer in model.layers)
    for layer in model.layers:
        for name, branch in layer.branches.items():
            lengths = counts.lengths[name.removesuffix("_branch")]
            for module in (branch.feed_forward, branch.attention, branch.pooler):
                if module is not None and not (isinstance(module, PersonalisedFeedForward) and keeps_scores(config)):
                    total += attention_flops(module, lengths) // 2  # one of the two products
    return total


def keeps_scores(config: Config) -> bool:
    """Whether GDPA runs as plain operators, which keep the scores for the backward."""
    return config.toggles.gdpa_impl is GdpaImpl.EAGER or config.toggles.layout is Layout.PADDED


def attention_flops(module, lengths) -> int:
    """Forward FLOPs of a module's attention alone, without its linear layers. lengths: int64 [B] of its events."""
    heads = (module.size.num_heads, module.size.head_dim)
    if isinstance(module, PersonalisedFeedForward):
        return flops.gdpa(lengths, lengths.new_full(lengths.shape, module.num_kv), *heads)
    if isinstance(module, Pooler):
        return flops.jagged_attention(lengths.new_full(lengths.shape, module.num_queries), lengths, *heads)
    assert isinstance(module, SelfAttentionBlock)
    if module.kind is SelfAttention.BLOCK:
        return flops.block_attention(lengths, *heads, block_size=module.block_size)
    window = module.size.window if module.kind is SelfAttention.WINDOW else None
    return flops.jagged_attention(lengths, lengths, *heads, window=window)
