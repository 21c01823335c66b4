"""Jagged attention and GDPA forward on Hopper's 8-bit tensor cores (TLX): both products in E4M3, sums in float32.

The pipeline is that of jfa/v4_tlx.py and gdpa/tlx.py: a TMA producer warp, two consumer warp groups of 64 query rows in
ping-pong, a zigzag list of valid tiles (attention_tlx_kernel.py). What 8 bits change:

- Scales of q and k belong to a row and head, those of v to a tile of 128 keys and a channel; all are powers of two. q's
  joins the factor of its score row, k's multiplies the score column, v's the partial product.
- wgmma adds 8-bit products with about 14 bits. Every value product therefore starts from zero and is added to the
  float32 accumulator in registers, key tile by key tile.
- P is quantised in registers, with a power of two that keeps every element in range (attention_tlx_tile.py).
- The second product wants values with keys side by side (8-bit operands are K-major), so the quantiser stores v
  transposed, each sequence from a multiple of 128 on, and in the order of keys in which a thread already holds P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..kept import kept
from ..tlx_common import GROUP_ROWS, num_sms, ragged_descriptor
from ..work_lists import forward_list
from .attention_tlx_kernel import attention8_kernel
from .hopper_attention import TILE, Operands, padded_starts


@dataclass(frozen=True)
class Config:
    """GROUPS x 64 query rows, kv_stages key/value buffers, q_stages query buffers (two or more of each), registers of a
    consumer thread."""

    groups: int = 2
    kv_stages: int = 2
    q_stages: int = 2
    registers: int = 240
    pingpong: bool = True
    overlap: bool = False  # elementwise work runs beside the value product: more registers
    apart: bool = False  # the score product only after the value product before it: fewer registers


def padded_table(q_offsets, kv_offsets, q_rows: int, block_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`forward_list` whose last column is the first padded row of the tile's keys and values."""
    table, count = forward_list(q_offsets, kv_offsets, q_rows, block_rows)
    starts = padded_starts(kv_offsets)
    sequence = torch.searchsorted(kv_offsets.to(torch.int32), table[:, 2].contiguous(), right=True) - 1
    table = table.clone()
    table[:, 7] = starts[sequence.clamp_(0, kv_offsets.numel() - 1)].to(torch.int32)
    return table, count


def forward_with(
    config: Config, operands: Operands, q_offsets, kv_offsets, *, activation: str, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [Tq, H, D] of `dtype`, lse float32 [H, Tq]; lse is empty for GDPA). activation "softmax" or GDPA's."""
    q, k, v = operands.q, operands.k, operands.v
    rows, heads, dim = q.shape
    softmax, fine = activation == "softmax", operands.fine
    out = torch.empty((rows, heads, dim), dtype=dtype, device=q.device)
    lse = torch.empty((heads, rows if softmax else 0), dtype=torch.float32, device=q.device)
    if not rows or not k.shape[0]:
        return out.zero_(), lse.fill_(float("inf"))
    table, count = kept(padded_table, q_offsets, kv_offsets, rows, GROUP_ROWS * config.groups)
    attention8_kernel[(min(num_sms(q.device), table.shape[0] * heads),)](
        ragged_descriptor(q, GROUP_ROWS),
        ragged_descriptor(k, TILE),
        TensorDescriptor(v, list(v.shape), list(v.stride()), [dim, TILE]),
        ragged_descriptor(out, GROUP_ROWS),
        operands.q_scale,
        operands.k_scale,
        operands.v_scale,
        lse,
        operands.q_scale.stride(0),
        operands.k_scale.stride(0),
        operands.v_scale.stride(0),
        lse.stride(0),
        table,
        count,
        heads,
        scale,
        HEAD_DIM=dim,
        GROUPS=config.groups,
        KV_STAGES=config.kv_stages,
        Q_STAGES=config.q_stages,
        REGISTERS=config.registers,
        PINGPONG=config.pingpong and config.groups == 2,
        APART=config.apart,
        OVERLAP=config.overlap and not fine,
        ACTIVATION=activation,
        FINE=fine,
        num_warps=4,
        num_stages=1,
    )
    return out, lse
