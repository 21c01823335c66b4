"""Jagged flash attention v4: Hopper forward with explicit warp specialisation (TLX), TMA and persistence.

Source: warp specialisation + TMA + persistent kernels through TLX are the last generation of its attention kernel.

The structure is that of gdpa/tlx.py: a TMA producer warp, consumer warp groups of 64 query rows in ping-pong, a
zigzag list of valid tiles, the next score product always in flight, also across tiles. What softmax adds is a running
maximum and sum per row. Keys past a sequence's end arrive as zeros; only the last key block of a sequence, and the
edge blocks of a window, take the branch that masks them, so the main loop has no mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx
from triton.language.extra.tlx.warp_spec import get_bufidx_phase

from .. import tlx_backward
from ..registry import Case, Implementation
from ..tlx_common import (
    GROUP_ROWS,
    hopper_only,
    my_tiles,
    num_sms,
    packed_heads,
    ragged_descriptor,
    tile_entry,
    zigzag,
)
from ..tlx_pipeline import first_block, first_scores, issue_products, num_blocks, store_tile, stream_tiles
from ..work_lists import forward_list
from . import triton_schemes
from .triton_backward import delta_kernel


@dataclass(frozen=True)
class Config:
    """Forward tile: GROUPS x 64 query rows, block_n keys, kv_stages key/value buffers, q_stages query buffers.

    late_wait: wait for a block's value product behind the softmax of the next block, where ptxas else puts it ahead.
    """

    groups: int = 2
    block_n: int = 128
    kv_stages: int = 2
    q_stages: int = 1
    registers: int = 232
    pingpong: bool = True
    late_wait: bool = False


def forward_config(head_dim: int, dense_rows: int | None, mean_keys: int = 0) -> Config:
    """Tile by what every sequence of a call shares, never by a batch's lengths, so that results do not depend on it;
    late_wait, which changes no bit, by the keys a sequence has on average.

    Chosen on an H200 (bf16, H = 4, D = 128, TUNING.md): a second query buffer is worth 7 to 20 %, ping-pong 10 % at
    length 1024 and above; late_wait +1 % at full 2048, -1 to -3 % below.
    """
    if dense_rows is not None and dense_rows <= GROUP_ROWS:
        return Config(groups=1, block_n=128 if head_dim <= 128 else 64, kv_stages=2, q_stages=2, pingpong=False)
    if head_dim > 128:
        return Config(groups=2, block_n=64, kv_stages=2, q_stages=1)
    return Config(groups=2, block_n=128, kv_stages=2, q_stages=2, late_wait=mean_keys >= 1536)


def candidates(head_dim: int) -> list[Config]:
    """What a tuning sweep tries."""
    return [
        Config(2, 128, 2, 1),
        Config(2, 128, 2, 1, pingpong=False),
        Config(2, 64, 3, 2),
        Config(2, 128, 2, 2),
        Config(2, 128, 2, 2, late_wait=True),
        Config(3, 64, 3, 1, registers=160, pingpong=False),
        Config(1, 128, 2, 2, pingpong=False),
    ]


@triton.jit
def masked(s, row, key, kv_size, WINDOW: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Scores with -inf where a key does not exist for a row. The branch is uniform and taken by edge blocks alone."""
    edge = key + BLOCK_N > kv_size
    if WINDOW is not None:
        edge = edge | (key < row + ROWS - 1 - WINDOW) | (key + BLOCK_N - 1 > row + WINDOW)
    if edge:
        columns = key + tl.arange(0, BLOCK_N)[None, :]
        keep = columns < kv_size
        if WINDOW is not None:
            rows = row + tl.arange(0, ROWS)[:, None]
            keep = keep & (columns >= rows - WINDOW) & (columns <= rows + WINDOW)
        s = tl.where(keep, s, float("-inf"))
    return s


@triton.jit(do_not_specialize=["lse_stride"])
def attention_fwd_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
    lse,
    lse_stride,
    table,
    count,
    H,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    KV_STAGES: tl.constexpr,
    Q_STAGES: tl.constexpr,
    REGISTERS: tl.constexpr,
    PINGPONG: tl.constexpr,
    LATE_WAIT: tl.constexpr,
    WINDOW: tl.constexpr,
):
    ROWS: tl.constexpr = 64
    BLOCK_M: tl.constexpr = ROWS * GROUPS
    dtype: tl.constexpr = tlx.dtype_of(desc_q)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    total = tl.load(count) * H
    mine = my_tiles(total, program, programs)

    q_buffers = tlx.local_alloc((1, 1, ROWS, HEAD_DIM), dtype, GROUPS * Q_STAGES)
    k_buffers = tlx.local_alloc((1, 1, BLOCK_N, HEAD_DIM), dtype, KV_STAGES)
    v_buffers = tlx.local_alloc((1, 1, BLOCK_N, HEAD_DIM), dtype, KV_STAGES)
    o_buffers = tlx.local_alloc((1, 1, ROWS, HEAD_DIM), dtype, GROUPS)
    q_full = tlx.alloc_barriers(num_barriers=GROUPS * Q_STAGES, arrive_count=1)
    k_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    v_full = tlx.alloc_barriers(num_barriers=KV_STAGES, arrive_count=1)
    # Each thread says for itself that it has read, without bringing its group together first.
    q_empty = tlx.alloc_warp_barrier(num_barriers=GROUPS * Q_STAGES, num_warps=4)
    k_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=GROUPS)
    v_empty = tlx.alloc_warp_barrier(num_barriers=KV_STAGES, num_warps=4, num_arrivals=GROUPS)

    with tlx.async_tasks():
        with tlx.async_task("default"):
            stream_tiles(
                desc_q,
                desc_k,
                desc_v,
                q_buffers,
                k_buffers,
                v_buffers,
                q_full,
                q_empty,
                k_full,
                k_empty,
                v_full,
                v_empty,
                table,
                total,
                mine,
                H,
                HEAD_DIM,
                BLOCK_N,
                GROUPS,
                KV_STAGES,
                Q_STAGES,
                WINDOW,
            )

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=GROUPS):
            cid: tl.constexpr = tlx.async_task_replica_id()
            log2_scale = scale * 1.4426950408889634
            if PINGPONG:
                if cid == 1:
                    tlx.named_barrier_arrive(9, 256)
            index = tl.minimum(zigzag(0, program, programs), tl.maximum(total - 1, 0))
            _, q_size, _, kv_size, out_first, head, row = tile_entry(table, index, H, BLOCK_M)
            tlx.barrier_wait(q_full[cid], 0)
            tlx.barrier_wait(k_full[0], 0)
            s = first_scores(q_buffers[cid], k_buffers[0], HEAD_DIM, BLOCK_N)
            tlx.barrier_arrive(k_empty[0], 1)
            s = masked(s, row + cid * ROWS, first_block(row, WINDOW, BLOCK_N) * BLOCK_N, kv_size, WINDOW, ROWS, BLOCK_N)
            m = tl.max(s, 1) * log2_scale
            e = tl.math.exp2(s * log2_scale - tl.where(m == float("-inf"), 0.0, m)[:, None])
            l = tl.sum(e, 1)
            p = e.to(dtype)
            k_count = 1
            v_count = 0
            for i in range(mine):
                q_stage, _ = get_bufidx_phase(i, Q_STAGES)
                acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
                blocks = num_blocks(row, kv_size, WINDOW, BLOCK_M, BLOCK_N)
                key = first_block(row, WINDOW, BLOCK_N) * BLOCK_N
                for j in range(1, blocks):
                    k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                    v_stage, v_phase = get_bufidx_phase(v_count, KV_STAGES)
                    tlx.barrier_wait(k_full[k_stage], k_phase)
                    tlx.barrier_wait(v_full[v_stage], v_phase)
                    s, acc = issue_products(
                        q_buffers[q_stage * GROUPS + cid],
                        k_buffers[k_stage],
                        v_buffers[v_stage],
                        p,
                        acc,
                        cid,
                        PINGPONG,
                        HEAD_DIM,
                        BLOCK_N,
                    )
                    s = tlx.async_dot_wait(1, s)
                    tlx.barrier_arrive(k_empty[k_stage], 1)
                    s = masked(s, row + cid * ROWS, key + j * BLOCK_N, kv_size, WINDOW, ROWS, BLOCK_N)
                    m_new = tl.maximum(m, tl.max(s, 1) * log2_scale)
                    reference = m_new
                    if WINDOW is not None:  # a row may not have met a key yet
                        reference = tl.where(m_new == float("-inf"), 0.0, m_new)
                    e = tl.math.exp2(s * log2_scale - reference[:, None])
                    alpha = tl.math.exp2(m - reference)
                    l = l * alpha + tl.sum(e, 1)
                    m = m_new
                    p = e.to(dtype)
                    if LATE_WAIT:  # long over; keeps the wait for the product below from moving up
                        tlx.barrier_wait(v_full[v_stage], v_phase)
                    acc = tlx.async_dot_wait(0, acc)
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                    acc = acc * alpha[:, None]
                    k_count += 1
                    v_count += 1
                # Last value product of this tile, together with the first score product of the next one.
                out_row = row + cid * ROWS
                out_size = q_size
                out_column = head * HEAD_DIM
                store_first = out_first
                lse_row = lse + head.to(tl.int64) * lse_stride + store_first
                index = tl.minimum(zigzag(tl.minimum(i + 1, mine - 1), program, programs), tl.maximum(total - 1, 0))
                _, q_size, _, kv_size, out_first, head, row = tile_entry(table, index, H, BLOCK_M)
                next_stage, next_phase = get_bufidx_phase(i + 1, Q_STAGES)
                k_stage, k_phase = get_bufidx_phase(k_count, KV_STAGES)
                v_stage, v_phase = get_bufidx_phase(v_count, KV_STAGES)
                if Q_STAGES == 1:
                    tlx.barrier_arrive(q_empty[q_stage * GROUPS + cid], 1)
                tlx.barrier_wait(v_full[v_stage], v_phase)
                tlx.barrier_wait(q_full[next_stage * GROUPS + cid], next_phase)
                tlx.barrier_wait(k_full[k_stage], k_phase)
                s, acc = issue_products(
                    q_buffers[next_stage * GROUPS + cid],
                    k_buffers[k_stage],
                    v_buffers[v_stage],
                    p,
                    acc,
                    cid,
                    PINGPONG,
                    HEAD_DIM,
                    BLOCK_N,
                )
                s = tlx.async_dot_wait(1, s)
                tlx.barrier_arrive(k_empty[k_stage], 1)
                if Q_STAGES > 1:
                    tlx.barrier_arrive(q_empty[q_stage * GROUPS + cid], 1)
                inverse = tl.where(l > 0, 1.0 / l, 0.0)
                log_sum = tl.where(l > 0, (m + tl.math.log2(l)) * 0.6931471805599453, float("inf"))
                s = masked(
                    s, row + cid * ROWS, first_block(row, WINDOW, BLOCK_N) * BLOCK_N, kv_size, WINDOW, ROWS, BLOCK_N
                )
                m = tl.max(s, 1) * log2_scale
                e = tl.math.exp2(s * log2_scale - tl.where(m == float("-inf"), 0.0, m)[:, None])
                l = tl.sum(e, 1)
                p = e.to(dtype)
                if LATE_WAIT:  # long over; keeps the wait for the product below from moving up
                    tlx.barrier_wait(v_full[v_stage], v_phase)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(v_empty[v_stage], 1)
                k_count += 1
                v_count += 1
                acc = acc * inverse[:, None]
                store_tile(desc_o, o_buffers[cid], acc, store_first, out_size, out_row, out_column, HEAD_DIM)
                rows = out_row + tl.arange(0, ROWS)
                tl.store(lse_row + rows, log_sum, mask=rows < out_size)
            tlx.async_descriptor_store_wait(0)


def forward_with(config: Config, q, k, v, q_offsets, kv_offsets, *, scale: float, window: int | None = None):
    """Forward with a given tile -> (o, lse float32 [H, rows]). Shapes as in api.jagged_attention; q_offsets None =
    dense.
    """
    heads, head_dim = q.shape[1:]
    block_m = GROUP_ROWS * config.groups
    dense = q_offsets is None
    rows = q.shape[0] * (kv_offsets.numel() - 1) if dense else q.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, rows), dtype=torch.float32, device=q.device)
    if scale < 0:  # the running maximum of scaled scores is the scaled maximum only for a positive scale
        q, scale = -q, -scale
    if not rows or not k.shape[0]:  # a tensor without rows has no address that a descriptor could hold
        out.zero_()
        lse.fill_(float("inf"))
    else:
        q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
        table, count = forward_list(q_offsets, kv_offsets, q.shape[0], block_m)
        attention_fwd_kernel[(min(num_sms(q.device), table.shape[0] * heads),)](
            ragged_descriptor(q, GROUP_ROWS),
            ragged_descriptor(k, config.block_n),
            ragged_descriptor(v, config.block_n),
            ragged_descriptor(out, GROUP_ROWS),
            lse,
            lse.stride(0),
            table,
            count,
            heads,
            scale,
            HEAD_DIM=head_dim,
            BLOCK_N=config.block_n,
            GROUPS=config.groups,
            KV_STAGES=config.kv_stages,
            Q_STAGES=config.q_stages,
            REGISTERS=config.registers,
            PINGPONG=config.pingpong and config.groups == 2,
            LATE_WAIT=config.late_wait,
            WINDOW=window,
            num_warps=4,
            num_stages=1,
        )
    return (out.view(-1, q.shape[0], heads, head_dim) if dense else out), lse


def forward(
    q, k, v, q_offsets, kv_offsets, *, scale, window=None, bias=None, max_q_len=None, max_kv_len=None, schedule=None
):
    """(o, lse); arguments as in `api.py`."""
    mean_keys = k.shape[0] // max(kv_offsets.numel() - 1, 1)
    config = forward_config(q.shape[-1], q.shape[0] if q_offsets is None else None, mean_keys)
    return forward_with(config, q, k, v, q_offsets, kv_offsets, scale=scale, window=window)


def row_dot(o: torch.Tensor, do: torch.Tensor) -> torch.Tensor:
    """delta = rowsum(o dO), float32 [H, rows], of o, dO [rows, H, D]."""
    rows, heads, head_dim = o.shape
    delta = torch.empty((heads, rows), dtype=torch.float32, device=o.device)
    block = 64
    delta_kernel[(triton.cdiv(rows, block) * heads,)](
        o,
        do,
        delta,
        rows,
        heads,
        *o.stride()[:2],
        *do.stride()[:2],
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK=block,
    )
    return delta


def backward(
    do,
    q,
    k,
    v,
    o,
    lse,
    q_offsets,
    kv_offsets,
    *,
    scale,
    window=None,
    bias=None,
    max_q_len=None,
    max_kv_len=None,
    schedule=None,
):
    """(dq, dk, dv, None); arguments as in `api.py`.

    The TLX backward is laid out for head_dim 128 without a window; the others take that of v2, which skips off-window
    tiles.
    """
    if window is not None or q.shape[-1] != 128:
        return triton_schemes.backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            q_offsets,
            kv_offsets,
            scale=scale,
            window=window,
            bias=None,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            schedule=None,
            scheme="split",
        )
    heads, head_dim = q.shape[1:]
    o, do = o.reshape(-1, heads, head_dim), do.reshape(-1, heads, head_dim)
    grads = tlx_backward.backward_with(
        tlx_backward.default_config(q.shape[0] if q_offsets is None else None),
        do,
        q,
        k,
        v,
        q_offsets,
        kv_offsets,
        activation="softmax",
        scale=scale,
        lse=lse,
        delta=row_dot(o, do),
    )
    return *grads, None


def _unsupported(case: Case) -> str | None:
    if "bias" in case.features:
        return "has no bias"
    return hopper_only(case)


GEMMS = {"tiles": 5}  # products a backward really does per pair of tiles, at head_dim 128
IMPLEMENTATION = Implementation("v4", forward, backward, _unsupported)
