"""Backward of jagged attention and of GDPA on Hopper: the lists of work and the launch of tlx_backward_kernel.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .tlx_backward_kernel import backward_kernel, zero_kernel
from .tlx_common import num_sms, packed_heads, ragged_descriptor
from .work_lists import QUERY_ROWS, backward_lists


@dataclass(frozen=True)
class Config:
    """Buffers of (q, dO), k and v (k: at least 2); registers a thread of the second consumer (the first takes the
    rest) and of producer and senders.

    resident: shared queries, at most QUERY_ROWS, stay on chip with their dQ; a program takes all key tiles of its
    (sequence, head). fold_scale: dS carries the scale of the scores (bf16, which loses nothing by it). chunks: parts of
    dQ pass through shared memory in the order of the registers that hold them.
    """

    q_stages: int = 2
    k_stages: int = 2
    v_stages: int = 1
    resident: bool = False
    fold_scale: bool = True
    chunks: bool = False
    registers: int = 240
    spare: int = 24


def default_config(dense_rows: int | None) -> Config:
    """By what every sequence of a call shares, never by a batch's lengths. Chosen on an H200 (bf16, H = 4, D = 128;
    jfa/TUNING.md).
    """
    if dense_rows is not None and dense_rows <= QUERY_ROWS:
        return Config(q_stages=1, v_stages=2, resident=True)
    return Config()


def backward_with(
    config: Config, do, q, k, v, q_offsets, kv_offsets, *, activation: str, scale: float, lse=None, delta=None
):
    """(dq, dk, dv). activation "softmax" needs lse and delta = rowsum(dO o), float32 [H, rows]. Dense q: dq summed
    over the batch.
    """
    heads, head_dim = q.shape[1:]
    dense = q_offsets is None
    do = do.reshape(-1, heads, head_dim)
    q, k, v, do = packed_heads(q), packed_heads(k), packed_heads(v), packed_heads(do)
    rows = do.shape[0]
    dq = torch.empty((0 if dense else rows, heads, head_dim), dtype=q.dtype, device=q.device)
    # The sums of dQ: a program's own (resident), a query tile's or, for many shared queries, a sequence's.
    programs = num_sms(q.device)
    chunks = config.chunks and not dense
    slots = rows // QUERY_ROWS + kv_offsets.numel() + 2  # query tiles, whatever the lengths
    sum_rows = programs * q.shape[0] if config.resident else slots * QUERY_ROWS if chunks else rows
    make = torch.zeros if config.resident else torch.empty
    sums = make((sum_rows, heads, head_dim), dtype=torch.float32, device=q.device)
    dk, dv = (
        torch.empty_like(k, memory_format=torch.contiguous_format),
        torch.empty_like(v, memory_format=torch.contiguous_format),
    )
    if not rows or not k.shape[0]:  # a tensor without rows has no address that a descriptor could hold
        for gradient in (dq, sums, dk, dv):
            gradient.zero_()
    else:
        units, table, count = backward_lists(q_offsets, kv_offsets, q.shape[0], k.shape[0], resident=config.resident)
        counters = torch.zeros((2 * heads, slots), dtype=torch.int32, device=q.device)
        lse = sums if lse is None else lse
        backward_kernel[(min(programs, table.shape[0] * heads),)](
            ragged_descriptor(q, QUERY_ROWS),
            ragged_descriptor(do, QUERY_ROWS),
            ragged_descriptor(k, 64),
            ragged_descriptor(v, 64),
            ragged_descriptor(dk, 64),
            ragged_descriptor(dv, 64),
            ragged_descriptor(do if dense else dq, QUERY_ROWS, head_dim // 2),
            ragged_descriptor(sums, QUERY_ROWS, head_dim // 2),
            lse,
            lse if delta is None else delta,
            lse.stride(0),
            table,
            count,
            counters,
            counters.stride(0),
            heads,
            scale,
            HEAD_DIM=head_dim,
            Q_STAGES=config.q_stages,
            K_STAGES=config.k_stages,
            V_STAGES=config.v_stages,
            RESIDENT=config.resident,
            REGISTERS=config.registers,
            SPARE=config.spare,
            ACTIVATION=activation,
            DIRECT=not dense,
            CHUNKS=chunks,
            FOLD=config.fold_scale and q.dtype == torch.bfloat16,
            num_warps=4,
            num_stages=1,
        )
        width = heads * head_dim
        if not config.resident:
            zero_kernel[(units.shape[0], 16)](
                sums if dense else dq, units, width, COLUMNS=triton.next_power_of_2(width), num_warps=8
            )
    if dense:
        dq = sums.view(-1, q.shape[0], heads, head_dim).sum(0).to(q.dtype)
    return dq, dk, dv
