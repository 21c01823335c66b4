"""Launches of the quantiser's Triton kernel: MX blocks as `quantize` defines them, and the blocks of format `hopper`.

Everything here takes CUDA tensors (CPU tensors under TRITON_INTERPRET=1) and gives the bytes of the plain torch form.
Tile sizes move about 4,096 elements a program, chosen to fill 128-byte lines both when bytes are stored as they came
and when they are stored transposed.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ..triton_common import tile_list
from . import formats
from .formats import Hadamard
from .triton_kernels import quantize_kernel

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
COMPILED = isinstance(quantize_kernel, triton.JITFunction)


def runs_on(x: Tensor) -> bool:
    """Whether the kernel can take x: a CUDA tensor, or any under the interpreter."""
    return (x.is_cuda or not COMPILED) and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def launch(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    *,
    group: tuple[int, int],
    tile: tuple[int, int],
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    offsets: Tensor | None = None,
    jagged: bool = False,
    padded: tuple[bool, bool] = (False, False),
    key_order: bool = False,
    hadamard: Hadamard | None = None,
    along: str = "columns",
    seed: Tensor | None = None,
    padded_columns: int | None = None,
    num_warps: int = 4,
) -> None:
    """Quantise x [R, M, C] (any strides) in blocks `group` over rows and columns into data and scale.

    data: [R' >= R, M, C] uint8, any strides; rows past R are written as zeros. scale: [block rows, M, block columns],
    any strides, uint8 codes or float32 powers of two. offsets with jagged: blocks of `group[0]` rows follow sequences
    (tile[0] == group[0], or group[0] == 1). offsets alone: rows past offsets[-1] count as zeros. padded: whether data
    and scale have tile[0] rows a tile of the tile list instead of x's rows; key_order: order of
    `triton_kernels.key_order` inside them. hadamard: first rotate along "columns" or "rows". seed: int64 [1], round
    stochastically; numbers are counted over rows (of tiles with jagged) and padded_columns.
    """
    rows, middles, columns = x.shape
    (tile_r, tile_c), (group_r, group_c) = tile, group
    signs = None if hadamard is None else hadamard.signs(x.device)
    if jagged:
        tiles, count, bound = tile_list(offsets, rows, tile_r)
    else:
        tiles = count = None
        bound = triton.cdiv(data.shape[0], tile_r)
    if not bound or not middles or not columns:
        return
    quantize_kernel[(bound, middles, triton.cdiv(columns, tile_c))](
        x,
        data,
        scale,
        signs,
        seed,
        offsets,
        tiles,
        count,
        1 if offsets is None else offsets.stride(0),
        0 if offsets is None else offsets.numel() - 1,
        rows,
        columns,
        *x.stride(),
        *data.stride(),
        *scale.stride(),
        data.shape[0],
        columns if padded_columns is None else padded_columns,
        middles,
        TILE_R=tile_r,
        TILE_C=tile_c,
        GROUP_R=group_r,
        GROUP_C=group_c,
        FORMAT=FORMATS[dtype],
        MODE=scale_mode,
        JAGGED=jagged,
        PADDED_DATA=padded[0],
        PADDED_SCALE=padded[1],
        KEY_ORDER=key_order,
        CODES=scale.dtype == torch.uint8,
        HADAMARD="" if hadamard is None else along,
        STOCHASTIC=seed is not None,
        NATIVE=COMPILED,
        num_warps=num_warps,
    )


def quantize_mx(
    x: Tensor,
    axis: int,
    dims: tuple[int, ...],
    block_rows: int | None,
    *,
    offsets: Tensor | None,
    dtype: torch.dtype,
    scale_mode: str,
    hadamard: Hadamard | None,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(data uint8 in x's shape, scale codes) of `quantize`; arguments checked there. axis and dims are not negative.

    block_rows: number of block rows of all sequences where blocks run along a jagged axis 0. x of rank 1 to 3, the
    blocked axes the first or last one; see `fits`.
    """
    square = len(dims) == 2
    if not square and axis == x.dim() - 1:  # blocks along the last axis: any leading shape is a list of rows
        view = x.reshape(math.prod(x.shape[:-1]), 1, x.shape[-1])
        along, group = "columns", (1, formats.BLOCK)
    else:
        others = math.prod(x.shape[1:])
        middles = others // x.shape[-1] if square and x.shape[-1] else 1
        view = x.reshape(x.shape[0], middles, others // middles if middles else 0)
        along = "columns" if axis == x.dim() - 1 else "rows"
        group = (formats.BLOCK, formats.BLOCK if square else 1)
    rows, middles, columns = view.shape
    jagged = offsets is not None and 0 in dims and x.dim() > 1
    data = torch.empty(view.shape, dtype=torch.uint8, device=x.device)
    lines = block_rows if jagged else triton.cdiv(rows, group[0])
    scale = torch.empty(lines, middles, triton.cdiv(columns, group[1]), dtype=torch.uint8, device=x.device)
    launch(
        view,
        data,
        scale,
        group=group,
        tile=(formats.BLOCK, 128),
        dtype=dtype,
        scale_mode=scale_mode,
        offsets=offsets,
        jagged=jagged,
        hadamard=hadamard,
        along=along,
        seed=seed,
        padded_columns=triton.cdiv(columns, formats.BLOCK) * formats.BLOCK if group[1] > 1 else columns,
    )
    scale_shape = list(x.shape)
    for dim in dims:
        scale_shape[dim] = triton.cdiv(x.shape[dim], formats.BLOCK)
    if jagged:
        scale_shape[0] = lines
    return data.view(x.shape), scale.view(scale_shape)


def fits(x: Tensor, axis: int, dims: tuple[int, ...], offsets: Tensor | None) -> bool:
    """Whether `quantize_mx` knows this arrangement of blocks; the plain form takes the rest."""
    if not runs_on(x) or x.dim() > 3:
        return False
    if len(dims) == 2:
        return dims == (0, x.dim() - 1)
    if axis == x.dim() - 1:
        return offsets is None or x.dim() == 2
    return axis == 0
