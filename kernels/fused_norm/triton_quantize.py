"""Norm and quantisation to format `hopper` in one pass: x is read once, 8-bit elements and scales are written.

Source: quantisation of activations is fused into the norm (or projection) before it, so that its overhead is gone.
Apart they move 7 bytes an element of a bf16 tensor (2 + 2 for the norm, 2 + 1 to quantise), together 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..mxfp8 import hopper
from ..mxfp8.triton_kernels import inverse_scale, scale_code, scale_value, to_bytes, top_bits
from ..mxfp8.triton_quantize import COMPILED, FORMATS
from ..mxfp8.triton_quantize import runs_on as quantizer_runs_on

MAX_COLUMNS = 8192  # a row lies in registers


def runs_on(x: torch.Tensor) -> bool:
    """Whether the kernel can take x [M, K]."""
    return quantizer_runs_on(x) and x.shape[1] <= MAX_COLUMNS


@triton.jit(do_not_specialize=["rows", "stored_rows", "s_column"])
def norm_quantize_kernel(
    x,
    data,
    scale,
    rows,
    stored_rows,
    columns,
    x_row,
    d_row,
    s_column,
    eps,
    NORM: tl.constexpr,
    TILE_R: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """TILE_R rows: standardise, round to x's type (what the norm alone would have stored), quantise in 1 x 128."""
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    column = tl.arange(0, WIDTH)
    within = (column < columns)[None, :]
    keep = (row < rows)[:, None] & within
    values = tl.load(x + row[:, None] * x_row + column[None, :], mask=keep, other=0.0).to(tl.float32)
    if NORM == "layer":
        values = tl.where(keep, values - (tl.sum(values, 1) / columns)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(values * values, 1) / columns + eps)
    values = (values * inverse[:, None]).to(x.dtype.element_ty).to(tl.float32)
    blocks = tl.reshape(values, [TILE_R, WIDTH // 128, 128])
    code = scale_code(top_bits(blocks, 2), FORMAT, MODE)
    byte = to_bytes(tl.reshape(blocks * inverse_scale(code)[:, :, None], [TILE_R, WIDTH]), FORMAT, NATIVE)
    stored = (row < stored_rows)[:, None]
    tl.store(data + row[:, None] * d_row + column[None, :], byte, mask=stored & within)
    block = tl.arange(0, WIDTH // 128)
    tl.store(
        scale + row[:, None] + block[None, :].to(tl.int64) * s_column,
        scale_value(code),
        mask=stored & (block * 128 < columns)[None, :],
    )


def norm_quantize(
    x: torch.Tensor,
    *,
    kind: str,
    eps: float,
    dtype: torch.dtype,
    scale_mode: str,
    config: tuple[int, int] | None = None,
) -> hopper.Scaled:
    """`hopper.by_row(norm(x))` of x [M, K], unit stride along K. config: rows a program, warps."""
    (count, columns), device = x.shape, x.device
    rows = hopper.padded(count)
    data = torch.empty(rows, columns, dtype=dtype, device=device)
    scale = torch.empty(-(-columns // hopper.SLAB), rows, dtype=torch.float32, device=device).T
    width = max(triton.next_power_of_2(columns), hopper.SLAB)
    tile_r, warps = config or (max(1, 2048 // width), 4 if width <= 2048 else 8)
    if rows:
        norm_quantize_kernel[(triton.cdiv(rows, tile_r),)](
            x,
            data.view(torch.uint8),
            scale,
            count,
            rows,
            columns,
            x.stride(0),
            data.stride(0),
            scale.stride(1),
            eps,
            NORM=kind,
            TILE_R=tile_r,
            WIDTH=width,
            FORMAT=FORMATS[dtype],
            MODE=scale_mode,
            NATIVE=COMPILED,
            num_warps=warps,
        )
    return hopper.Scaled(data, scale)
