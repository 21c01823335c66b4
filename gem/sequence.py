"""Sequence side of a layer: what happens to one event type.

Projections of events have no bias: its gradient is a sum over all events that costs more than it gives.

Three steps, each a module: the personalised feed-forward (GDPA with generated keys and values), self-attention, and
pooling into a fixed number of summary tokens. Which of them a layer runs is decided when the model is built
(CompSkip).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gem import attention
from gem.attention import Events
from gem.config import Config, EventSize, NormMode, Pooling, SelfAttention
from gem.counts import Counts, linear_flops, matmul_flops
from gem.experts import over_tokens
from gem.norms import EPS, KeyNorm, layer_norm, rms_norm
from kernels import flops, fused_norm


class PersonalisedFeedForward(nn.Module):
    """PFFN as attention: o = act(q k^T) v + q, S <- RMSNorm(o) + S, where q = LN(S) and k, v come from the sample's
    summary.

    The source writes the personalised feed-forward as generalised dot-product attention: its two weight matrices are
    made per sample from a summary of the non-sequence tokens, and act as keys and values. Scores are bounded: LN
    gives q the norm sqrt(width) over all heads, which the scale takes out, and a head's key has norm below 1, so |s|
    <= 1.
    """

    def __init__(self, config: Config, size: EventSize):
        super().__init__()
        model = config.model
        self.size, self.num_kv, self.scale = size, model.num_kv, size.width**-0.5
        self.activation, self.impl, self.precision = model.gdpa_activation, config.implementations.gdpa, None
        self.fused = config.implementations.norm if config.toggles.norm is NormMode.FUSED else None
        self.mix = nn.Linear(model.num_summary, model.num_kv)
        self.keys_values = nn.Linear(model.width, 2 * size.width, bias=False)
        self.key_norm = KeyNorm(size.num_heads)

    def forward(self, events: Events, summary: torch.Tensor) -> Events:
        """events and the summary [B, num_summary, width of X]."""
        heads = (self.size.num_heads, self.size.head_dim)
        keys = F.gelu(over_tokens(self.mix, summary))
        k, v = self.keys_values(keys).reshape(-1, 2, *heads).unbind(1)
        return attention.with_values(events, self.attend(events, self.key_norm(k), v, heads))

    def attend(self, events: Events, k: torch.Tensor, v: torch.Tensor, heads: tuple[int, int]) -> torch.Tensor:
        """S' from S and the generated keys and values [B * num_kv, H, D]; one fused op, or norms and GDPA apart."""
        values = events.values
        if self.fused is not None and self.precision is None:  # the fused op knows no MX recipe
            arguments = {"activation": self.activation, "scale": self.scale, "eps": EPS, "max_kv_len": self.num_kv}
            with attention.as_given(values):
                return fused_norm.pffn(
                    values.unflatten(-1, heads),
                    k.to(values.dtype),
                    v.to(values.dtype),
                    events.offsets,
                    events.kv_offsets,
                    gdpa_impl=self.impl,
                    impl=self.fused,
                    **arguments,
                ).flatten(-2)
        q = layer_norm(values)
        o = attention.generalized_attention(
            q.unflatten(-1, heads).to(k.dtype),
            k,
            v,
            events,
            activation=self.activation,
            scale=self.scale,
            num_kv=self.num_kv,
            impl=self.impl,
            recipe=self.precision,
        )
        return values + rms_norm(o.flatten(-2).to(q.dtype) + q)

    def flops(self, counts: Counts, event: str) -> int:
        kv_lengths = torch.full_like(counts.lengths[event], self.num_kv)
        return (
            matmul_flops(counts.batch, self.keys_values.in_features, self.mix.in_features, self.num_kv)
            + linear_flops(counts.batch * self.num_kv, self.keys_values)
            + flops.gdpa(counts.lengths[event], kv_lengths, self.size.num_heads, self.size.head_dim)
        )


class SelfAttentionBlock(nn.Module):
    """S <- S + W_o Attention(LN(S)): all pairs, a sliding window, or blocks of 64 events, with time-aware rotary."""

    def __init__(self, config: Config, size: EventSize):
        super().__init__()
        self.size, self.block_size = size, config.model.block_size
        self.kind, self.rotary = config.toggles.self_attention, config.toggles.rotary
        self.impl, self.block_impl = config.implementations.attention, config.implementations.block_attention
        self.precision = None
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, events: Events) -> Events:
        heads = (3, self.size.num_heads, self.size.head_dim)
        o = attention.self_attention(
            self.qkv(layer_norm(events.values)).unflatten(-1, heads),
            events,
            kind=self.kind,
            window=self.size.window,
            block_size=self.block_size,
            rotary=self.rotary,
            impl=self.impl,
            block_impl=self.block_impl,
            recipe=self.precision,
        )
        return attention.with_values(events, events.values + self.out(o.flatten(-2)))

    def flops(self, counts: Counts, event: str) -> int:
        lengths, rows = counts.lengths[event], counts.events(event)
        heads = (self.size.num_heads, self.size.head_dim)
        if self.kind is SelfAttention.BLOCK:
            pairs = flops.block_attention(lengths, *heads, block_size=self.block_size)
        else:
            window = self.size.window if self.kind is SelfAttention.WINDOW else None
            pairs = flops.jagged_attention(lengths, lengths, *heads, window=window)
        return linear_flops(rows, self.qkv) + linear_flops(rows, self.out) + pairs


class SumKronLinear(nn.Module):
    """Y = sum_i Z_i^T H W_i: mixes tokens and channels at once with rank * (n_in n_out + d_in d_out) parameters.

    H [B, n_in, d_in] -> [B, n_out, d_out].
    """

    def __init__(self, num_in: int, num_out: int, width_in: int, width_out: int, rank: int):
        super().__init__()
        self.num_out, self.rank = num_out, rank
        self.tokens = nn.Linear(num_in, num_out * rank, bias=False)  # Z, the ranks of an output token side by side
        self.channels = nn.Linear(rank * width_in, width_out, bias=False)  # W, all ranks stacked

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = over_tokens(self.tokens, hidden).unflatten(1, (self.num_out, self.rank))  # [B, n_out, rank, d_in]
        return self.channels(mixed.flatten(2))

    def flops(self, counts: Counts) -> int:
        width_in = self.channels.in_features // self.rank
        return linear_flops(counts.batch * width_in, self.tokens) + linear_flops(
            counts.batch * self.num_out, self.channels
        )


class Pooler(nn.Module):
    """History -> num_seeds summary tokens of the model's width; zero attention output for a sample without events.

    PMA: one learned query a summary token, shared by all samples. HSP: more learned seeds, normalised and projected,
    then SumKronLinear down to the summary tokens.
    """

    def __init__(self, config: Config, size: EventSize):
        super().__init__()
        model = config.model
        self.size, self.num_seeds = size, model.num_seeds
        self.hierarchical = config.toggles.pooling is Pooling.HSP
        self.impl, self.precision = config.implementations.attention, None
        self.num_queries = model.num_hsp_seeds if self.hierarchical else model.num_seeds
        self.seeds = nn.Parameter(torch.randn(self.num_queries, size.width))
        self.keys_values = nn.Linear(size.width, 2 * size.width, bias=False)
        if self.hierarchical:
            self.query = nn.Linear(size.width, size.width)
            self.out = SumKronLinear(self.num_queries, model.num_seeds, size.width, model.width, model.kron_rank)
        else:
            self.out = nn.Linear(size.width, model.width)

    def forward(self, events: Events) -> torch.Tensor:
        heads = (self.size.num_heads, self.size.head_dim)
        k, v = self.keys_values(layer_norm(events.values)).unflatten(-1, (2, *heads)).unbind(-3)
        q = self.query(layer_norm(self.seeds)) if self.hierarchical else self.seeds
        o = attention.pooled_attention(
            q.unflatten(-1, heads).to(k.dtype), k, v, events, impl=self.impl, recipe=self.precision
        )
        return self.out(o.flatten(-2))

    def flops(self, counts: Counts, event: str) -> int:
        lengths = counts.lengths[event]
        total = linear_flops(counts.events(event), self.keys_values) + flops.jagged_attention(
            torch.full_like(lengths, self.num_queries), lengths, self.size.num_heads, self.size.head_dim
        )
        if self.hierarchical:
            return total + linear_flops(self.num_queries, self.query) + self.out.flops(counts)
        return total + linear_flops(counts.batch * self.num_seeds, self.out)


class Branch(nn.Module):
    """One event type in one layer: feed-forward, self-attention and pooling, those of them that this layer runs."""

    def __init__(self, config: Config, size: EventSize, *, feed_forward: bool, attend: bool, pool: bool):
        super().__init__()
        self.feed_forward = PersonalisedFeedForward(config, size) if feed_forward else None
        self.attention = SelfAttentionBlock(config, size) if attend else None
        self.pooler = Pooler(config, size) if pool else None

    def forward(self, events: Events, personal: torch.Tensor, pooled: torch.Tensor) -> tuple[Events, torch.Tensor]:
        """personal: summary of X. pooled: the branch's last summary, returned as it is when this layer does not
        pool."""
        if self.feed_forward is not None:
            events = self.feed_forward(events, personal)
        if self.attention is not None:
            events = self.attention(events)
        if self.pooler is not None:
            pooled = self.pooler(events).to(pooled.dtype)
        return events, pooled

    def flops(self, counts: Counts, event: str) -> dict[str, int]:
        parts = {"feed_forward": self.feed_forward, "self_attention": self.attention, "pooling": self.pooler}
        return {name: module.flops(counts, event) for name, module in parts.items() if module is not None}
