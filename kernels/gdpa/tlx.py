"""GDPA on Hopper with explicit warp specialisation: o = act(scale q k^T) v, forward.

Source: GDPA drops the softmax-correction stage; for short keys the loop over query tiles is what must be pipelined;
empty tiles are skipped and the rest dealt to SMs in zigzag order; GELU's tanh may become a polynomial.

One persistent program per SM. A producer warp streams q, k and v tiles through TMA; each of GROUPS consumer warp
groups owns 64 query rows. A consumer always has the next score product in flight while it applies the activation,
also across tiles: the first score product of tile i + 1 is issued together with the last value product of tile i
(outer-loop pipelining), so that one or two key blocks per tile cost no bubble. Two consumers take turns at the tensor
cores (ping-pong). Ragged ends need no mask: rows past a sequence's end arrive as zeros, act(0) = 0, and stores past
it are dropped by the hardware.
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
from ..tlx_pipeline import first_scores, issue_products, store_tile, stream_tiles
from ..work_lists import forward_list
from . import triton_gdpa

LONG_KEYS = 768  # keys a sequence on average from which self-attention takes 128 keys a block


@dataclass(frozen=True)
class Config:
    """Forward tile: GROUPS x 64 query rows, block_n keys, kv_stages key/value buffers, q_stages query buffers."""

    groups: int = 2
    block_n: int = 128
    kv_stages: int = 2
    q_stages: int = 1
    registers: int = 232
    pingpong: bool = True
    fast_tanh: str = "f32"  # "bf16x2" evaluates tanh two at a time in bf16


def forward_config(head_dim: int, dense_rows: int | None, is_self: bool = False, mean_keys: int = 0) -> Config:
    """Tile by the shapes of a call. The number of keys a block may follow mean_keys, the keys a sequence has on
    average: it changes no bit of a result, since products are added up in the same order.

    Chosen on an H200 (bf16, H = 4, D = 128, TUNING.md): 64 keys a block waste less on ragged ends of self-attention
    (+4 to +10 % where sequences have 512 keys or fewer on average), 128 read each query tile half as often (+4 to +8 %
    from 1,024 on) and win where keys fill their blocks.
    """
    if dense_rows is not None and dense_rows <= GROUP_ROWS:
        return Config(groups=1, block_n=128 if head_dim <= 128 else 64, kv_stages=2, q_stages=2, pingpong=False)
    if is_self and mean_keys < LONG_KEYS:
        return Config(groups=2, block_n=64, kv_stages=3, q_stages=2)
    return Config(groups=2, block_n=128, kv_stages=2, q_stages=2)


def candidates(head_dim: int) -> list[Config]:
    """What a tuning sweep tries."""
    return [
        Config(2, 128, 2, 1),
        Config(2, 128, 2, 1, fast_tanh="bf16x2"),
        Config(2, 64, 3, 2),
        Config(2, 64, 3, 2, fast_tanh="bf16x2"),
        Config(2, 128, 2, 2),
        Config(2, 128, 2, 2, fast_tanh="bf16x2"),
        Config(3, 64, 3, 1, registers=160, pingpong=False),
        Config(1, 128, 2, 2, pingpong=False),
    ]


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _gate_bf16x2(h, u):
    """h + h tanh(u), two at a time in bf16. Not marked pure: a pure block may sink between two wgmma, which
    serialises them.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b32 t; tanh.approx.bf16x2 t, $2; fma.rn.bf16x2 $0, $1, t, $1; }",
        "=r,r,r",
        [h, u],
        dtype=tl.bfloat16,
        is_pure=False,
        pack=2,
    )


@triton.jit
def activate(s, scale, ACTIVATION: tl.constexpr, FAST: tl.constexpr, dtype: tl.constexpr):
    """act(scale * s) / output_factor(scale) in the operand type of the second product.

    The common factor scale / 2 of GELU and SiLU leaves the elementwise part: o is linear in it, so it is applied once
    to the accumulator. The inner scale is folded into the coefficients. Left per element: tanh 4 arithmetic
    instructions and 1 of the special-function unit, Taylor 4.
    """
    if ACTIVATION == "relu":
        return tl.maximum(s * scale, 0.0).to(dtype)
    elif ACTIVATION == "gelu_taylor6":
        square = scale * scale
        c2 = 2.0 * 0.3989422804014327 * scale
        c4 = -2.0 * 0.06649038006690545 * scale * square
        c6 = 2.0 * 0.009973557010035818 * scale * square * square
        y = s * s
        return tl.fma(tl.fma(tl.fma(y, c6, c4), y, c2), y, s).to(dtype)
    else:
        if ACTIVATION == "silu":
            u = s * (0.5 * scale)
        else:  # gelu_tanh
            a = 0.7978845608028654 * scale
            b = 0.7978845608028654 * 0.044715 * scale * scale * scale
            u = s * tl.fma(s * s, b, a)
        if FAST:
            return _gate_bf16x2(s.to(tl.bfloat16), u.to(tl.bfloat16)).to(dtype)
        else:
            return tl.fma(s, _tanh(u), s).to(dtype)


@triton.jit
def output_factor(scale, ACTIVATION: tl.constexpr):
    """What `activate` leaves out."""
    if ACTIVATION == "relu":
        return 1.0
    else:
        return 0.5 * scale


@triton.jit
def gdpa_fwd_kernel(
    desc_q,
    desc_k,
    desc_v,
    desc_o,
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
    ACTIVATION: tl.constexpr,
    FAST: tl.constexpr,
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
                None,
            )

        with tlx.async_task(num_warps=4, registers=REGISTERS, replicate=GROUPS):
            cid: tl.constexpr = tlx.async_task_replica_id()
            if PINGPONG:
                if cid == 1:
                    tlx.named_barrier_arrive(9, 256)
            tlx.barrier_wait(q_full[cid], 0)
            tlx.barrier_wait(k_full[0], 0)
            s = first_scores(q_buffers[cid], k_buffers[0], HEAD_DIM, BLOCK_N)
            tlx.barrier_arrive(k_empty[0], 1)
            p = activate(s, scale, ACTIVATION, FAST, dtype)
            k_count = 1
            v_count = 0
            for i in range(mine):
                index = zigzag(i, program, programs)
                _, q_size, _, kv_size, out_first, head, row = tile_entry(table, index, H, BLOCK_M)
                q_stage, _ = get_bufidx_phase(i, Q_STAGES)
                acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
                for _ in range(BLOCK_N, kv_size, BLOCK_N):
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
                    p = activate(s, scale, ACTIVATION, FAST, dtype)
                    acc = tlx.async_dot_wait(0, acc)
                    tlx.barrier_arrive(v_empty[v_stage], 1)
                    k_count += 1
                    v_count += 1
                # Last value product of this tile, together with the first score product of the next one.
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
                p = activate(s, scale, ACTIVATION, FAST, dtype)
                acc = tlx.async_dot_wait(0, acc)
                tlx.barrier_arrive(v_empty[v_stage], 1)
                k_count += 1
                v_count += 1
                acc *= output_factor(scale, ACTIVATION)
                store_tile(desc_o, o_buffers[cid], acc, out_first, q_size, row + cid * ROWS, head * HEAD_DIM, HEAD_DIM)
            tlx.async_descriptor_store_wait(0)


def forward_with(config: Config, q, k, v, q_offsets, kv_offsets, *, activation: str, scale: float) -> torch.Tensor:
    """Forward with a given tile. Shapes as in api.gdpa: q [Tq, H, D] or dense [Lq, H, D] when q_offsets is None."""
    heads, head_dim = q.shape[1:]
    block_m = GROUP_ROWS * config.groups
    dense = q_offsets is None
    rows = q.shape[0] * (kv_offsets.numel() - 1) if dense else q.shape[0]
    out = torch.empty((rows, heads, head_dim), dtype=q.dtype, device=q.device)
    if not rows or not k.shape[0]:  # a tensor without rows has no address that a descriptor could hold
        out.zero_()
    else:
        q, k, v = packed_heads(q), packed_heads(k), packed_heads(v)
        table, count = forward_list(q_offsets, kv_offsets, q.shape[0], block_m)
        gdpa_fwd_kernel[(min(num_sms(q.device), table.shape[0] * heads),)](
            ragged_descriptor(q, GROUP_ROWS),
            ragged_descriptor(k, config.block_n),
            ragged_descriptor(v, config.block_n),
            ragged_descriptor(out, GROUP_ROWS),
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
            ACTIVATION=activation,
            FAST=config.fast_tanh == "bf16x2",
            num_warps=4,
            num_stages=1,
        )
    return out.view(-1, q.shape[0], heads, head_dim) if dense else out


def forward(q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """o; arguments as in `api.py`."""
    mean_keys = k.shape[0] // max(kv_offsets.numel() - 1, 1)
    config = forward_config(q.shape[-1], q.shape[0] if q_offsets is None else None, kv_offsets is q_offsets, mean_keys)
    return forward_with(config, q, k, v, q_offsets, kv_offsets, activation=activation, scale=scale)


def backward(do, q, k, v, q_offsets, kv_offsets, *, activation, scale, max_q_len=None, max_kv_len=None, schedule=None):
    """(dq, dk, dv); arguments as in `api.py`. The TLX backward is laid out for head_dim 128; 64 takes Triton's."""
    if q.shape[-1] != 128:
        return triton_gdpa.backward(
            do,
            q,
            k,
            v,
            q_offsets,
            kv_offsets,
            activation=activation,
            scale=scale,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            schedule=None,
        )
    return tlx_backward.backward_with(
        tlx_backward.default_config(q.shape[0] if q_offsets is None else None),
        do,
        q,
        k,
        v,
        q_offsets,
        kv_offsets,
        activation=activation,
        scale=scale,
    )


def _unsupported(case: Case) -> str | None:
    if case.activation not in ACTIVATIONS:
        return f"has no activation {case.activation!r}; it has {', '.join(ACTIVATIONS)}"
    return hopper_only(case)


ACTIVATIONS = ("gelu_tanh", "gelu_taylor6", "silu", "relu")
GEMMS = {"tiles": 5}  # products a backward really does per pair of tiles, at head_dim 128
IMPLEMENTATION = Implementation("tlx", forward, backward, _unsupported)
