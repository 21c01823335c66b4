"""Operands of 8-bit attention in format `hopper`, and what the kernel computes from them, in plain torch.

q and k have one scale per row and head, v one per tile of 128 keys and channel ("fine"), or k and v one per tile of 128
keys and head ("tile"): E4M3 is a floating format, so values of a block lose nothing until they lie 2^15 apart, and a
scale that a whole tile shares costs the kernel no instruction an element. Scales and values are stored as the kernel
(attention_tlx.py) reads them: k's scales and v on a padded axis where every sequence starts at a multiple of 128
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
SCALES = ("fine", "tile")
SOFTMAX_SHIFT = 8  # P is stored times 2^8


def scales_for(activation: str) -> str:
    """The scales in use: "tile" for softmax, whose loop they shorten by a fifth; "fine" for GDPA, whose kernel has no
    registers for a running v scale and would spill (TUNING.md)."""
    return "tile" if activation == "softmax" else "fine"


class Operands(NamedTuple):
    """q, k [T, H, D] float8, q_scale [H, Tq] float32, v [H D, T'] float8. T' is the padded axis: ceil(length / 128)
    tiles a sequence, and room behind that is never read. Scales "fine": k_scale [H, T'], v_scale [T' / 128, H, D]
    float32; "tile": both [T' / 128, H]."""

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    v: Tensor
    v_scale: Tensor

    @property
    def fine(self) -> bool:
        """Whether k and v have scales of their own a row and a channel."""
        return self.v_scale.dim() == 3


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


def quantize(q: Tensor, k: Tensor, v: Tensor, kv_offsets: Tensor, *, scales: str = "fine") -> Operands:
    """The operands of q [Tq, H, D], k, v [Tkv, H, D]: one pass over memory each. scales: "fine" or "tile"."""
    if scales not in SCALES:
        raise ValueError(f"scales: {scales!r}; allowed: {', '.join(SCALES)}")
    fine = scales == "fine"
    (rows, heads, dim), device, low = q.shape, q.device, torch.float8_e4m3fn
    padded = padded_rows(k.shape[0], kv_offsets.numel() - 1)
    found = Operands(
        torch.empty(q.shape, dtype=low, device=device),
        torch.empty(heads, rows, device=device),
        torch.empty(k.shape, dtype=low, device=device),
        torch.empty((heads, padded) if fine else (padded // TILE, heads), device=device),
        torch.empty(heads * dim, padded, dtype=low, device=device),
        torch.empty((padded // TILE, heads, dim) if fine else (padded // TILE, heads), device=device),
    )
    (_quantize_in_kernel if hopper.runs_in_kernel(q) else _quantize_plainly)(q, k, v, kv_offsets, found)
    return found


def _quantize_in_kernel(q, k, v, kv_offsets, out: Operands) -> None:
    launch, (heads, dim), raw = kernels().launch, q.shape[1:], torch.uint8
    jagged = {"offsets": kv_offsets, "jagged": True, "num_warps": 8, "tile": (TILE, dim)}
    launch(q, out.q.view(raw), out.q_scale.T[:, :, None], group=(1, dim), tile=(32, dim))
    if out.fine:
        launch(k, out.k.view(raw), out.k_scale.T[:, :, None], group=(1, dim), padded=(False, True), **jagged)
    else:
        launch(k, out.k.view(raw), out.k_scale[:, :, None], group=(TILE, dim), **jagged)
    turned = out.v.view(raw).T.unflatten(1, (heads, dim))
    v_scale, channels = (out.v_scale, 1) if out.fine else (out.v_scale[:, :, None], dim)
    launch(v, turned, v_scale, group=(TILE, channels), padded=(True, False), key_order=True, **jagged)


def _quantize_plainly(q, k, v, kv_offsets, out: Operands) -> None:
    heads, dim = q.shape[1:]
    out.k_scale.fill_(hopper.scale_values(torch.zeros(1, dtype=torch.uint8, device=q.device))[0])
    k_group, v_group = ((1, dim), (TILE, 1)) if out.fine else ((TILE, dim), (TILE, dim))
    out.v.view(torch.uint8).zero_()
    out.v_scale.zero_()
    starts, ends = padded_starts(kv_offsets).tolist(), kv_offsets.tolist()
    order = key_order(q.device)
    total = ends[-1]
    for head in range(heads):
        low = hopper.blocks_plainly(q[:, head], (1, dim), torch.float8_e4m3fn, "rceil")
        out.q.view(torch.uint8)[:, head], out.q_scale[head] = low.data.view(torch.uint8), low.scale[:, 0]
        out.k.view(torch.uint8)[total:, head] = 0
        for b, start in enumerate(starts[:-1]):
            first, end = ends[b], ends[b + 1]
            if first == end:
                continue
            tiles = slice(start // TILE, starts[b + 1] // TILE)
            low = hopper.blocks_plainly(k[first:end, head], k_group, torch.float8_e4m3fn, "rceil")
            out.k.view(torch.uint8)[first:end, head] = low.data.view(torch.uint8)
            if out.fine:
                out.k_scale[head, start : start + end - first] = low.scale[:, 0]
            else:
                out.k_scale[tiles, head] = low.scale[:, 0]
            rows = starts[b + 1] - start
            values = torch.nn.functional.pad(v[first:end, head].float(), (0, 0, 0, rows - (end - first)))
            found = hopper.blocks_plainly(values, v_group, torch.float8_e4m3fn, "rceil")
            ordered = found.data.view(torch.uint8).view(-1, TILE, dim)[:, order].flatten(0, 1)
            out.v.view(torch.uint8)[head * dim : (head + 1) * dim, start : start + rows] = ordered.T
            out.v_scale[tiles, head] = found.scale if out.fine else found.scale[:, 0]


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
        total, sums, largest_scale = torch.zeros_like(top), torch.zeros_like(queries), None
        for first in range(0, size, TILE):
            count = min(TILE, size - first)
            keys = operands.k[kv_at[b] + first :][:count].float().transpose(0, 1)
            tile_index = (start + first) // TILE
            if operands.fine:
                keys = keys * operands.k_scale[:, start + first :][:, :count, None]
            else:
                keys = keys * operands.k_scale[tile_index][:, None, None]
            tile = operands.v[:, start + first : start + first + TILE].float().view(heads, dim, TILE)[:, :, place]
            v_scale = operands.v_scale[tile_index]
            values = tile.mT[:, :count] * (v_scale[:, None] if operands.fine else v_scale[:, None, None])
            # A tile whose values are small beside those before it lets P carry the difference (none if fine).
            largest_scale = v_scale if largest_scale is None else torch.maximum(largest_scale, v_scale)
            shift = torch.ones(()) if operands.fine else (v_scale / largest_scale).clamp(min=2.0**-32)[:, None, None]
            shift = shift.to(q.device)
            scores = scale * (queries @ keys.mT)
            if softmax:
                new = torch.maximum(top, scores.amax(-1))
                p = torch.exp(scores - new[..., None])
                fade = torch.exp(top - new)
                total, top = total * fade + p.sum(-1), new
                up = 2.0**SOFTMAX_SHIFT * shift
                p = formats.saturating_cast(p * up, torch.float8_e4m3fn).float() / up
                sums = sums * fade[..., None] + p @ values
            else:
                largest = scores.abs().amax(-1, keepdim=True)
                up = torch.exp2(7 - torch.frexp(largest)[1].float() + 1) * shift
                p = activations.value(activation, scores) * up
                sums = sums + (formats.saturating_cast(p, torch.float8_e4m3fn).float() @ values) / up
        if softmax and size:
            sums = sums / total[..., None]
            lse[:, mine] = top + total.log()
        out[mine] = sums.transpose(0, 1).to(dtype)
    return out, lse
