"""Shards of weights as 8-bit messages: a row's elements in e4m3 under one float32 scale, written and read in one pass.

    message of a shard [rows, features]:  rows x features bytes, then rows float32 scales

Quantising costs what reading the master weights costs, so that a gather of half the bytes is worth it inside a host
too: made of a chain of tensor operations it takes longer than the bytes that it saves. CUDA tensors go through Triton
kernels; the tensor operations that define the result serve a CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.mxfp8.triton_kernels import scale_value, to_bytes, top_bits

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
TINY = torch.finfo(torch.float32).tiny * 2**10  # a row of zeros has this over LARGEST as its scale, a normal number
SCALE_BYTES = 4
MX_BLOCK = 32
TILE = 4096  # elements of a program: 16 KiB of float32, which stay in L1 between the maximum and the cast


@triton.jit
def _quantise(
    x, data, scale, rows, features, LARGEST: tl.constexpr, TINY: tl.constexpr, THROUGH_BF16: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """R rows a program: largest magnitude of each, then its elements over the scale."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, C)[None, :]
    start = row.to(tl.int64)[:, None] * features
    inside = (row < rows)[:, None]
    top = tl.zeros([R], tl.int32)
    for first in range(0, features, C):
        values = tl.load(x + start + first + column, mask=inside & (first + column < features), other=0.0)
        if THROUGH_BF16:
            values = values.to(tl.bfloat16)
        top = tl.maximum(top, top_bits(values.to(tl.float32), 1))
    largest = tl.maximum(top.to(tl.float32, bitcast=True), TINY, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.div_rn(largest, tl.full([R], LARGEST, tl.float32))
    inverse = tl.div_rn(tl.full([R], 1.0, tl.float32), factor)[:, None]  # a division an element would take longest
    tl.store(scale + row, factor, mask=row < rows)
    for first in range(0, features, C):
        here = inside & (first + column < features)
        values = tl.load(x + start + first + column, mask=here, other=0.0)
        if THROUGH_BF16:
            values = values.to(tl.bfloat16)
        tl.store(data + start + first + column, to_bytes(values.to(tl.float32) * inverse, "e4m3", NATIVE), mask=here)


@triton.jit
def _restore(
    messages, scales, out, rows, features, size, total, MX: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """R x C elements a program. scales: the same memory in float32, or for MX in bytes. size: bytes of a message."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    here = (row < total)[:, None] & (column < features)
    if MX:
        start = row.to(tl.int64)[:, None] * size
        code = tl.load(scales + start + features + column // 32, mask=here, other=127).to(tl.int32)
        factor = scale_value(code)
    else:
        first = (row // rows).to(tl.int64) * size
        start = (first + (row % rows).to(tl.int64) * features)[:, None]
        place = (first + rows.to(tl.int64) * features) // 4 + row % rows
        factor = tl.load(scales + place, mask=row < total, other=0.0)[:, None]
    values = tl.load(messages + start + column, mask=here, other=0).to(tl.float8e4nv, bitcast=True)
    target = row.to(tl.int64)[:, None] * features + column
    tl.store(out + target, (values.to(tl.float32) * factor).to(out.dtype.element_ty), mask=here)


COMPILED = isinstance(_quantise, triton.JITFunction)


def runs_in_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels take x: a CUDA tensor, or any under the interpreter."""
    return x.is_cuda or not COMPILED


def message_bytes(rows: int, features: int) -> int:
    return rows * (features + SCALE_BYTES)


def quantise_rows(
    x: Tensor, data: Tensor | None = None, scale: Tensor | None = None, *, through_bf16: bool = False
) -> tuple[Tensor, Tensor]:
    """Rows in FP8: x [rows, features] -> (e4m3 [rows, features], float32 [rows, 1]); x is about data * scale.

    A row's scale is its largest magnitude over 448. data, scale: contiguous memory for the results. through_bf16: the
    values are those of x in bfloat16, as if it had been gathered so. ValueError: x is not a matrix.
    """
    if x.dim() != 2:
        raise ValueError(f"quantise_rows: x has shape {tuple(x.shape)}; allowed: [rows, features]")
    rows, features = x.shape
    data = x.new_empty(rows, features, dtype=FLOAT8) if data is None else data
    scale = x.new_empty(rows, 1, dtype=torch.float32) if scale is None else scale
    if not runs_in_kernel(x):
        values = (x.bfloat16() if through_bf16 else x).float()
        scale.copy_(values.abs().amax(1, keepdim=True).clamp(min=TINY) / LARGEST)
        data.copy_((values * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(FLOAT8))
    elif x.numel():
        wide = min(triton.next_power_of_2(features), TILE)
        tall = TILE // wide
        _quantise[(triton.cdiv(rows, tall),)](
            x.contiguous(), data.view(torch.uint8), scale, rows, features, LARGEST, TINY, through_bf16,
            R=tall, C=wide, NATIVE=COMPILED, num_warps=8,
        )  # fmt: skip
    return data, scale


def parts_of(message: Tensor, rows: int, features: int) -> tuple[Tensor, Tensor]:
    """(elements [rows, features], scales [rows, 1]) of a message, on its memory."""
    split = rows * features
    return message[:split].view(FLOAT8).view(rows, features), message[split:].view(torch.float32).view(rows, 1)


def to_message(x: Tensor) -> Tensor:
    """The message of a shard [rows, features], uint8 [rows * (features + 4)]. features: a multiple of 4."""
    message = torch.empty(message_bytes(*x.shape), dtype=torch.uint8, device=x.device)
    quantise_rows(x, *parts_of(message, *x.shape))
    return message


def from_messages(messages: Tensor, rows: int, features: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The whole weight [ranks * rows, features] from everybody's messages, one behind another: uint8 [any shape]."""
    size = message_bytes(rows, features)
    ranks = messages.numel() // size
    out = torch.empty(ranks * rows, features, dtype=dtype, device=messages.device) if out is None else out
    if not runs_in_kernel(messages):
        for place, message in zip(out.view(ranks, rows, features), messages.view(ranks, size), strict=True):
            data, scale = parts_of(message, rows, features)
            place.copy_(data.float() * scale)
    elif out.numel():
        flat = messages.view(-1)
        _launch_restore(flat, flat.view(torch.float32), out, rows, size, mx=False)
    return out


def from_mx_rows(payload: Tensor, features: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """[rows, features] from rows of e4m3 bytes followed by their E8M0 codes, as gem.precision.quantize_shard has them.

    CUDA tensors only; gem.precision.join_shards is the definition.
    """
    rows, size = payload.shape
    if size != features + -(-features // MX_BLOCK):
        raise ValueError(f"from_mx_rows: rows of {size} bytes; allowed: {features} and a code for each {MX_BLOCK}")
    out = torch.empty(rows, features, dtype=dtype, device=payload.device) if out is None else out
    _launch_restore(payload, payload, out, rows, size, mx=True)
    return out


def _launch_restore(messages: Tensor, scales: Tensor, out: Tensor, rows: int, size: int, *, mx: bool) -> None:
    total, features = out.shape
    wide = min(triton.next_power_of_2(features), 1024)
    tall = TILE // wide
    grid = (triton.cdiv(total, tall), triton.cdiv(features, wide))
    _restore[grid](messages, scales, out, rows, features, size, total, MX=mx, R=tall, C=wide, num_warps=8)
