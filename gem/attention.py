"""Attention calls of the model for both layouts of event tensors, and the rotary that precedes them.

Modules hold parameters; the functions here decide what runs. A jagged call goes to `kernels` under the
implementation's name (or to torch's own varlen attention); a padded call runs torch's scaled_dot_product_attention
with a mask. Both compute the same thing on the same parameters. A `recipe` (gem/precision.py) replaces the jagged
implementation by emulated MX numerics.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from gem.config import RotaryMode, SelfAttention
from kernels import gdpa, jagged_attention, mxfp8
from kernels.block_attention import block_attention_qkv
from kernels.jagged import row_ids
from kernels.rotary import Rotary, apply_rotary_qkv

VARLEN = "varlen_attn"  # torch.nn.attention.varlen, a peer that is not part of `kernels`


class Events(NamedTuple):
    """One event type of a batch.

    Jagged: values [T, width], mask None. Padded: values [B, L, width], mask bool [B, L], True for events. offsets
    int64 [B + 1] count events in both layouts; kv_offsets int64 [B + 1] those of `num_kv` generated keys a sample.
    cos, sin float32 [T, head_dim / 2] or [B, L, head_dim / 2]; longest: length of the longest history.
    """

    values: torch.Tensor
    offsets: torch.Tensor
    kv_offsets: torch.Tensor
    mask: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    longest: int


def with_values(events: Events, values: torch.Tensor) -> Events:
    """The events with other values. (torch.compile of torch 2.11 cannot trace a NamedTuple's own _replace.)"""
    offsets, kv_offsets, mask, cos, sin, longest = events[1:]
    return Events(values, offsets, kv_offsets, mask, cos, sin, longest)


def rotary_tables(
    positions: torch.Tensor, ages: torch.Tensor, head_dim: int, time_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Time-aware rotary: angle_i = position * theta_i + tau * phi_i with tau = log(1 + age / time_scale).

    positions [T] count events, ages float32 [T] are seconds before the impression. Returns cos, sin float32 [T,
    head_dim / 2].
    """
    half = torch.arange(head_dim // 2, device=ages.device, dtype=torch.float32) / (head_dim // 2)
    theta, phi = 10_000.0**-half, 100.0**-half
    angle = positions.float()[:, None] * theta + torch.log1p(ages / time_scale)[:, None] * phi
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn interleaved pairs: x [..., H, D], cos and sin float32 [..., D / 2]; computed in float32, dtype of x kept."""
    if x.is_cuda and not torch.compiler.is_compiling():
        # uncompiled, a complex product is one kernel where its real form is ten; a compiler knows the real form alone
        turned = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * torch.complex(cos, sin).unsqueeze(-2)
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def event_mask(offsets: torch.Tensor, longest: int) -> torch.Tensor:
    """bool [B, longest], True for events."""
    return torch.arange(longest, device=offsets.device) < offsets.diff()[:, None]


def as_given(x: torch.Tensor):
    """Autocast off: attention runs in its inputs' dtype, and what an implementation does inside is its own affair."""
    return torch.autocast(x.device.type, enabled=False)


def self_attention(
    qkv: torch.Tensor,
    events: Events,
    *,
    kind: SelfAttention,
    window: int,
    block_size: int,
    rotary: RotaryMode,
    impl: str,
    block_impl: str,
    recipe=None,
) -> torch.Tensor:
    """Softmax attention of each history on itself: all pairs, |i - j| <= window, or inside blocks of block_size events.

    qkv [T, 3, H, D] (padded: [B, L, 3, H, D]) is turned first, v too, as in the source's block attention. Fused rotary:
    inside block attention, or else as one kernel over q, k and v. Returns [T, H, D] ([B, L, H, D]).
    """
    with as_given(qkv):
        return _self_attention(qkv, events, kind, window, block_size, rotary, impl, block_impl, recipe)


def _self_attention(qkv, events: Events, kind, window, block_size, rotary, impl, block_impl, recipe) -> torch.Tensor:
    fused, block = rotary is RotaryMode.FUSED, kind is SelfAttention.BLOCK
    if not fused:
        qkv = rotate(qkv.flatten(-3, -2), events.cos, events.sin).view(qkv.shape)
    tables = Rotary(events.cos, events.sin) if fused else None
    if block and events.mask is None and recipe is None:
        return block_attention_qkv(qkv, events.offsets, block_size=block_size, rotary=tables, impl=block_impl)
    q, k, v = apply_rotary_qkv(qkv, events.cos, events.sin) if fused and not block else qkv.unbind(-3)
    if events.mask is not None:
        return _padded_self(q, k, v, events.mask, kind, window, block_size)
    if block:
        return mxfp8.block_attention_mx(q, k, v, events.offsets, block_size=block_size, rotary=tables, recipe=recipe)
    window = window if kind is SelfAttention.WINDOW else None
    if recipe is not None:
        return mxfp8.jagged_attention_mx(q, k, v, events.offsets, window=window, recipe=recipe)
    if impl == VARLEN:
        return _varlen(q, k, v, events.offsets, events.offsets, events.longest, events.longest, window)
    return jagged_attention(
        q,
        k,
        v,
        events.offsets,
        window=window,
        impl=impl,
    )


def pooled_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, events: Events, *, impl: str, recipe=None
) -> torch.Tensor:
    """Learned queries q [Lq, H, D], shared by all samples, attend to each history: [B, Lq, H, D], zeros if empty."""
    with as_given(q):
        return _pooled_attention(q, k, v, events, impl, recipe)


def _pooled_attention(q, k, v, events: Events, impl, recipe) -> torch.Tensor:
    if events.mask is not None:
        batch = events.mask.shape[0]
        queries = q.expand(batch, *q.shape).transpose(1, 2)
        mask, any_key = _safe(events.mask[:, None, None, :])
        o = F.scaled_dot_product_attention(queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask)
        return (o * any_key.to(o.dtype)).transpose(1, 2)
    if recipe is not None:
        return mxfp8.jagged_attention_mx(q, k, v, None, events.offsets, recipe=recipe)
    if impl == VARLEN:
        batch, num_queries = events.offsets.shape[0] - 1, q.shape[0]
        queries = q.repeat(batch, 1, 1)
        q_offsets = torch.arange(batch + 1, device=q.device) * num_queries
        o = _varlen(queries, k, v, q_offsets, events.offsets, num_queries, events.longest, None)
        return o.view(batch, num_queries, *q.shape[1:])
    return jagged_attention(q, k, v, None, events.offsets, impl=impl)


def generalized_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    events: Events,
    *,
    activation: str,
    scale: float,
    num_kv: int,
    impl: str,
    recipe=None,
) -> torch.Tensor:
    """GDPA: activation(scale * q k^T) v per head over the sample's generated keys.

    q [T, H, D] (padded: [B, L, H, D]); k, v [B * num_kv, H, D]. num_kv: a constant, so that it is one under
    compilation too.
    """
    with as_given(q):
        return _generalized_attention(q, k, v, events, activation, scale, num_kv, impl, recipe)


def _generalized_attention(q, k, v, events: Events, activation, scale, num_kv, impl, recipe) -> torch.Tensor:
    if events.mask is not None:
        batch = events.mask.shape[0]
        k, v = (x.view(batch, -1, *x.shape[1:]) for x in (k, v))
        scores = torch.einsum("blhd,bnhd->bhln", q, k) * scale
        return torch.einsum("bhln,bnhd->blhd", activate(scores, activation), v)
    if recipe is not None:
        return mxfp8.gdpa_mx(
            q, k, v, events.offsets, events.kv_offsets, activation=activation, scale=scale, recipe=recipe
        )
    return gdpa(
        q,
        k,
        v,
        events.offsets,
        events.kv_offsets,
        activation=activation,
        scale=scale,
        max_kv_len=num_kv,
        impl=impl,
    )


def activate(scores: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of GDPA on a padded score tensor."""
    if activation == "gelu_tanh":
        return F.gelu(scores, approximate="tanh")
    if activation == "gelu":
        return F.gelu(scores)
    if activation == "silu":
        return F.silu(scores)
    raise ValueError(f"padded layout: activation {activation!r} is not available; allowed: gelu, gelu_tanh, silu")


def _varlen(q, k, v, q_offsets, kv_offsets, longest_q, longest_kv, window):
    from torch.nn.attention.varlen import varlen_attn

    size = (-1, -1) if window is None else (window, window)
    return varlen_attn(
        q, k, v, q_offsets.to(torch.int32), kv_offsets.to(torch.int32), longest_q, longest_kv, window_size=size
    )


def _safe(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask without empty rows (they get the first key) and which rows had a key: softmax over nothing is NaN."""
    any_key = mask.any(-1, keepdim=True)
    first = torch.arange(mask.shape[-1], device=mask.device) == 0
    return mask | (first & ~any_key), any_key


def _padded_self(q, k, v, mask, kind, window, block_size):
    keys = mask[:, None, None, :]
    slots = torch.arange(mask.shape[1], device=mask.device)
    if kind is SelfAttention.WINDOW:
        keys = keys & ((slots[:, None] - slots).abs() <= window)
    elif kind is SelfAttention.BLOCK:
        keys = keys & (slots[:, None] // block_size == slots // block_size)
    safe, any_key = _safe(keys)
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=safe)
    return (o * any_key.to(o.dtype)).transpose(1, 2)


def ages_to_tau(ages: torch.Tensor, time_scale: float) -> torch.Tensor:
    """tau = log(1 + age / time_scale) of ages in seconds."""
    return torch.log1p(ages / time_scale)


def rows_of(per_sample: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """per_sample [B, d] repeated for each of its events: [total, d]; rows past the end repeat the last sample."""
    return per_sample.index_select(0, row_ids(offsets, total).clamp(max=per_sample.shape[0] - 1))
