"""Operands of 8-bit attention in format `hopper`, and what the kernel computes from them, in plain torch.

q and k have one scale per row and head, v one per tile of 128 keys and channel. Scales and values are stored as the
kernel (attention_tlx.py) reads them: k's scales and v on a padded axis where every sequence starts at a multiple of 128
(tensors q and k themselves stay packed), v transposed and its keys in the order of `key_order`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..gdpa import activations
from . import formats, hopper
from .quantize import kernels

TILE = 128  # keys of a value scale, and what sequences are padded to
SOFTMAX_SHIFT = 8  # P is stored times 2^8


class Operands(NamedTuple):
    """q, k [T, H, D] float8; q_scale [H, Tq], k_scale [H, T'] float32; v [H D, T'] float8, v_scale [T' / 128, H, D]
    float32. T' is the padded axis: ceil(length / 128) tiles a sequence, and room behind that is never read."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor


def padded_rows(rows: int, batch: int) -> int:
    """T' of any `batch` sequences with `rows` rows in all."""
    return (rows + (batch + 1) * (TILE - 1)) // TILE * TILE


def padded_starts(offsets: Tensor) -> Tensor:
    """First padded row of every sequence and the end of the last, [B + 1], dtype and device of offsets."""
    tiles = (offsets.diff() + (TILE - 1)) // TILE
    return torch.cat([tiles.new_zeros(1), tiles.cumsum(0)]) * TILE


def key_order(device: torch.device | str = "cpu") -> Tensor:
    """Which key of a tile of 128 lies at each place: place 16 h + 4 t + 2 g + b has key 16 h + 8 g + 2 t + b."""
    keys = torch.arange(TILE, device=device).view(TILE // 16, 2, 4, 2)
    return keys.permute(0, 2, 1, 3).flatten()


def quantize(q: Tensor, k: Tensor, v: Tensor, kv_offsets: Tensor) -> Operands:
    """The operands of q [Tq, H, D], k, v [Tkv, H, D]: one pass over memory each."""
    (rows, heads, dim), device, low = q.shape, q.device, torch.float8_e4m3fn
    padded = padded_rows(k.shape[0], kv_offsets.numel() - 1)
    found = Operands(
        torch.empty(q.shape, dtype=low, device=device),
        torch.empty(heads, rows, device=device),
        torch.empty(k.shape, dtype=low, device=device),
        torch.empty(heads, padded, device=device),
        torch.empty(heads * dim, padded, dtype=low, device=device),
        torch.empty(padded // TILE, heads, dim, device=device),
    )
    (_quantize_in_kernel if hopper.runs_in_kernel(q) else _quantize_plainly)(q, k, v, kv_offsets, found)
    return found


def _quantize_in_kernel(q, k, v, kv_offsets, out: Operands) -> None:
    launch, (heads, dim), raw = kernels().launch, q.shape[1:], torch.uint8
    jagged = {"offsets": kv_offsets, "jagged": True, "num_warps": 8, "tile": (TILE, dim)}
    launch(q, out.q.view(raw), out.q_scale.T[:, :, None], group=(1, dim), tile=(32, dim))
    launch(k, out.k.view(raw), out.k_scale.T[:, :, None], group=(1, dim), padded=(False, True), **jagged)
    turned = out.v.view(raw).T.unflatten(1, (heads, dim))
    launch(v, turned, out.v_scale, group=(TILE, 1), padded=(True, False), key_order=True, **jagged)


def _quantize_plainly(q, k, v, kv_offsets, out: Operands) -> None:
    heads, dim = q.shape[1:]
    out.k_scale.fill_(hopper.scale_values(torch.zeros(1, dtype=torch.uint8, device=q.device))[0])
    out.v.view(torch.uint8).zero_()
    out.v_scale.zero_()
    starts, ends = padded_starts(kv_offsets).tolist(), kv_offsets.tolist()
    order = key_order(q.device)
    total = ends[-1]
    for head in range(heads):
        low = hopper.blocks_plainly(q[:, head], (1, dim), torch.float8_e4m3fn, "rceil")
        out.q.view(torch.uint8)[:, head], out.q_scale[head] = low.data.view(torch.uint8), low.scale[:, 0]
        keys = k[:, head].clone()
        keys[total:] = 0
        low = hopper.blocks_plainly(keys, (1, dim), torch.float8_e4m3fn, "rceil")
        out.k.view(torch.uint8)[:, head] = low.data.view(torch.uint8)
        for b, start in enumerate(starts[:-1]):
            first, end = ends[b], ends[b + 1]
            out.k_scale[head, start : start + end - first] = low.scale[first:end, 0]
            if first == end:
                continue
            rows = starts[b + 1] - start
            values = torch.nn.functional.pad(v[first:end, head].float(), (0, 0, 0, rows - (end - first)))
            found = hopper.blocks_plainly(values, (TILE, 1), torch.float8_e4m3fn, "rceil")
            ordered = found.data.view(torch.uint8).view(-1, TILE, dim)[:, order].flatten(0, 1)
            out.v.view(torch.uint8)[head * dim : (head + 1) * dim, start : start + rows] = ordered.T
            out.v_scale[start // TILE : (start + rows) // TILE, head] = found.scale


def forward_plainly(
    operands: Operands, q_offsets: Tensor, kv_offsets: Tensor, *, activation: str, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, key tile by key tile in float32: (o [Tq, H, D], lse [H, Tq], empty for GDPA)."""
    q, softmax = operands.q, activation == "softmax"
    rows, heads, dim = q.shape
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((heads, rows if softmax else 0), float("inf"), device=q.device)
    starts, q_at, kv_at = (x.tolist() for x in (padded_starts(kv_offsets), q_offsets, kv_offsets))
    place = torch.argsort(key_order(q.device))
    for b, start in enumerate(starts[:-1]):
        mine, size = slice(q_at[b], q_at[b + 1]), kv_at[b + 1] - kv_at[b]
        queries = q[mine].float().transpose(0, 1) * operands.q_scale[:, mine, None]
        top = torch.full(queries.shape[:2], float("-inf"), device=q.device)
        total, sums = torch.zeros_like(top), torch.zeros_like(queries)
        for first in range(0, size, TILE):
            count = min(TILE, size - first)
            keys = operands.k[kv_at[b] + first :][:count].float().transpose(0, 1)
            keys = keys * operands.k_scale[:, start + first :][:, :count, None]
            tile = operands.v[:, start + first : start + first + TILE].float().view(heads, dim, TILE)[:, :, place]
            values = tile.mT[:, :count] * operands.v_scale[(start + first) // TILE][:, None]
            scores = scale * (queries @ keys.mT)
            if softmax:
                new = torch.maximum(top, scores.amax(-1))
                p = torch.exp(scores - new[..., None])
                fade = torch.exp(top - new)
                total, top = total * fade + p.sum(-1), new
                p = formats.saturating_cast(p * 2.0**SOFTMAX_SHIFT, torch.float8_e4m3fn).float() / 2.0**SOFTMAX_SHIFT
                sums = sums * fade[..., None] + p @ values
            else:
                largest = scores.abs().amax(-1, keepdim=True)
                up = torch.exp2(7 - torch.frexp(largest)[1].float() + 1)
                p = activations.value(activation, scores) * up
                sums = sums + (formats.saturating_cast(p, torch.float8_e4m3fn).float() @ values) / up
        if softmax and size:
            sums = sums / total[..., None]
            lse[:, mine] = top + total.log()
        out[mine] = sums.transpose(0, 1).to(dtype)
    return out, lse
