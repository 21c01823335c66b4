"""FLOPs of training steps by each of the three conventions: useful, by precision, and really done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from gem.config import Checkpointing, Config, GdpaImpl, Layout, SelfAttention
from gem.counts import Counts
from gem.model import GEM
from gem.precision import MXLinear
from gem.sequence import PersonalisedFeedForward, Pooler, SelfAttentionBlock
from kernels import flops


@dataclass(frozen=True)
class Work:
    """Sums over steps. model: useful FLOPs, 3 x forward. low: those of them in 8-bit products. done: with what is
    computed again in the backward. tokens: valid events. samples: of all steps."""

    model: int
    low: int
    done: int
    tokens: int
    samples: int


def of_steps(model: GEM, config: Config, counts: Iterable[Counts]) -> Work:
    """Work of steps on batches of these counts."""
    counts = list(counts)
    useful = sum(model.step_flops(item) for item in counts)
    again = sum(recomputed(model, config, item) for item in counts)
    low = sum(low_flops(model, item) for item in counts)
    tokens = sum(item.events(name) for item in counts for name in item.lengths)
    return Work(useful, low, useful + again, tokens, sum(item.batch for item in counts))


def low_flops(model: GEM, counts: Counts) -> int:
    """Useful FLOPs of a step in 8-bit products, as gem/precision.py put them on: of a linear layer the products that
    its recipe names, of attention the forward pass, whose backward runs in the precision of its inputs. Format mx is
    emulated, so none of its products are."""
    products: dict[int, list[MXLinear]] = {}
    for module in model.modules():
        if isinstance(module, MXLinear) and module.recipe.format == "hopper":
            recipe = module.recipe
            products.setdefault(recipe.fprop + recipe.dgrad + recipe.wgrad, []).append(module)
    total = sum(number * linears_flops(model, linears, counts) for number, linears in products.items())
    for module, lengths in attentions(model, counts):
        if module.precision is not None and module.precision.format == "hopper":
            total += attention_flops(module, lengths)
    return total


def linears_flops(model: GEM, linears: Sequence[MXLinear], counts: Counts) -> int:
    """Forward FLOPs of some linear layers of a model: what it has less without their outputs."""
    whole = sum(model.flops(counts).values())
    outputs = [linear.out_features for linear in linears]
    try:
        for linear in linears:
            linear.out_features = 0
        return whole - sum(model.flops(counts).values())
    finally:
        for linear, number in zip(linears, outputs, strict=True):
            linear.out_features = number


def recomputed(model: GEM, config: Config, counts: Counts) -> int:
    """Forward FLOPs that a step repeats: layers under checkpointing at budget 0, and the product of scores, which
    every attention kernel that saves no scores forms again in its backward.

    A compiled region under a partial budget chooses by itself what to repeat: it is counted as if it kept everything,
    so that its HFU is a lower bound.
    """
    total = 0
    if config.toggles.checkpointing is Checkpointing.UNIFORM and config.implementations.compile == "eager":
        total += sum(sum(layer.flops(counts).values()) for layer in model.layers)
    for module, lengths in attentions(model, counts):
        if not (isinstance(module, PersonalisedFeedForward) and keeps_scores(config)):
            total += attention_flops(module, lengths) // 2  # one of the two products
    return total


def attentions(model: GEM, counts: Counts) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Modules that compute attention, and the lengths int64 [B] of their events."""
    for layer in model.layers:
        for name, branch in layer.branches.items():
            for module in (branch.feed_forward, branch.attention, branch.pooler):
                if module is not None:
                    yield module, counts.lengths[name.removesuffix("_branch")]


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
