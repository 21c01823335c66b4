"""The round trips of the emulated GEMMs on a GPU, one launch each: values in blocks of 8 bits, and rotations.

Emulation in plain torch costs some twenty launches a tensor, which is what a training step on emulated numerics spends
its time on. Same values as `quantize.round_to_mx` rounded to nearest and as `formats.Hadamard`, to the last bit;
stochastic rounding follows the same law with other random numbers (a counted sequence from one seed a call, drawn on
the device by torch's generator, so that nothing waits for it). Speed says nothing about 8-bit hardware.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formats import BLOCK, Hadamard
from .triton_kernels import _larger as larger
from .triton_kernels import (
    butterfly,
    inverse_scale,
    magnitude_bits,
    round_stochastic,
    scale_code,
    scale_value,
    top_bits,
    uniform,
)

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
ROTATED_ROWS = 64  # groups of 32 a program


@triton.jit
def round_nearest(x, FORMAT: tl.constexpr):
    """float32 x rounded to the nearest element of the format, ties to even, saturated; NaN is not kept."""
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    LEAST: tl.constexpr = 121 if FORMAT == "e4m3" else 113  # biased exponent of the smallest normal element
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    clamped = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    # Adding 1.5 * 2^23 quanta makes the float32 adder round at the quantum of the number's own exponent.
    exponent = tl.maximum(magnitude_bits(clamped) & 0x7F800000, LEAST << 23)
    magic = (exponent + (((23 - MANTISSA) << 23) | 0x400000)).to(tl.float32, bitcast=True)
    return (clamped + magic) - magic


@triton.jit(do_not_specialize=["rows", "x_outer"])
def round_kernel(
    x,
    out,
    seed,
    middles,
    rows,
    columns,
    x_outer,
    x_middle,
    x_row,
    x_column,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_C: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """One tile of a matrix of x [outer, middles, rows, columns]; out is contiguous."""
    LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
    matrix = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    column = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    start = x + (matrix // middles) * x_outer + (matrix % middles) * x_middle
    at = row[:, None].to(tl.int64) * x_row + column[None, :].to(tl.int64) * x_column
    values = tl.load(start + at, mask=inside, other=0.0)
    blocks = tl.reshape(values, [TILE_R // GROUP_R, GROUP_R, TILE_C // GROUP_C, GROUP_C])
    code = scale_code(top_bits(tl.reduce(tl.abs(blocks), 3, larger), 1), FORMAT, MODE)
    small = tl.reshape(blocks * inverse_scale(code)[:, None, :, None], [TILE_R, TILE_C])
    place = (matrix * rows + row[:, None]) * columns + column[None, :]
    if STOCHASTIC:
        small = round_stochastic(small, uniform(tl.load(seed), place), FORMAT)
        small = tl.minimum(tl.maximum(small, -LARGEST), LARGEST)
    else:
        small = round_nearest(small, FORMAT)
    blocks = tl.reshape(small, [TILE_R // GROUP_R, GROUP_R, TILE_C // GROUP_C, GROUP_C])
    rounded = tl.reshape(blocks * scale_value(code)[:, None, :, None], [TILE_R, TILE_C])
    tl.store(out + place, rounded, mask=inside)


@triton.jit(do_not_specialize=["groups"])
def rotate_kernel(x, out, signs, groups, BACK: tl.constexpr, GROUPS: tl.constexpr):
    """Groups of 32 of contiguous x through the random Hadamard transform, or back."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (group < groups)[:, None]
    sign = tl.load(signs + tl.arange(0, 32))[None, :]
    values = tl.load(x + at, mask=inside, other=0.0)
    if not BACK:
        values = values * sign
    values = butterfly(values, GROUPS, 1)
    values = butterfly(values, GROUPS, 2)
    values = butterfly(values, GROUPS, 4)
    values = butterfly(values, GROUPS, 8)
    values = butterfly(values, GROUPS, 16)
    values = values * 0.1767766952966369
    if BACK:
        values = values * sign
    tl.store(out + at, values, mask=inside)


def fits(x: Tensor, dims: tuple[int, ...]) -> bool:
    """Whether `round_values` knows this arrangement: blocks along one or both of the last two axes, rank 1 to 4."""
    return x.dtype == torch.float32 and 1 <= x.dim() <= 4 and all(dim >= x.dim() - 2 for dim in dims)


def round_values(x: Tensor, dims: tuple[int, ...], *, dtype: torch.dtype, scale_mode: str, stochastic: bool) -> Tensor:
    """`quantize.round_to_mx` of float32 x with any strides; dims are not negative. Contiguous, as float32."""
    view = x
    while view.dim() < 4:
        view = view.unsqueeze(0)
    outer, middles, rows, columns = view.shape
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not x.numel():
        return out
    last = x.dim() - 1
    group = (BLOCK if last - 1 in dims else 1, BLOCK if last in dims else 1)
    tile = (BLOCK, min(128, max(BLOCK, triton.next_power_of_2(columns))))
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), device=x.device) if stochastic else None
    grid = (outer * middles, triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1]))
    round_kernel[grid](
        view,
        out,
        seed,
        middles,
        rows,
        columns,
        *view.stride(),
        TILE_R=tile[0],
        TILE_C=tile[1],
        GROUP_R=group[0],
        GROUP_C=group[1],
        FORMAT=FORMATS[dtype],
        MODE=scale_mode,
        STOCHASTIC=stochastic,
        num_warps=4,
    )
    return out


def rotated(x: Tensor, hadamard: Hadamard, *, back: bool = False) -> Tensor:
    """`hadamard.rotate(x)`, or `rotate_back`, of float32 x along its last axis, a multiple of 32; contiguous."""
    x = x.contiguous()
    out, groups = torch.empty_like(x), x.numel() // BLOCK
    if groups:
        grid = (triton.cdiv(groups, ROTATED_ROWS),)
        rotate_kernel[grid](x, out, hadamard.signs(x.device), groups, BACK=back, GROUPS=ROTATED_ROWS, num_warps=4)
    return out
