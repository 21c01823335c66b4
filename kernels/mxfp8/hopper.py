"""Format `hopper`: E4M3 / E5M2 elements with power-of-two scales as coarse as Hopper's tensor cores can afford.

Scaling products of 1 x 32 slabs in float32 costs as many issue slots as 8-bit products save, so blocks are longer:

    linear      activations 1 x 128 along the GEMM's reduction axis, weights 128 x 128
    attention   q and k one scale per row and head; v one per tile of 128 keys and channel

Scales are float32 tensors that hold powers of two (the values of E8M0 codes), because that is what the matrix product
takes. All functions run anywhere: Triton on a GPU, plain torch elsewhere, same bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import formats
from .formats import BLOCK, Hadamard
from .quantize import kernels

SLAB = 128
ROWS = 16  # cuBLAS wants rows and columns of 8-bit operands in multiples of this


class Scaled(NamedTuple):
    """Elements `data` (float8) and the float32 powers of two `scale` that multiply them."""

    data: Tensor
    scale: Tensor


def padded(count: int, multiple: int = ROWS) -> int:
    """count rounded up."""
    return -(-count // multiple) * multiple


def blocks_plainly(
    x: Tensor, group: tuple[int, int], dtype: torch.dtype, scale_mode: str, uniform: Tensor | None = None
) -> Scaled:
    """x [R, C] in blocks of `group` rows and columns, partial blocks zero-padded: data [R, C], scale [R / r, C / c]."""
    (rows, columns), (tall, wide) = x.shape, group
    pad = (0, -columns % wide, 0, -rows % tall)

    def split(values: Tensor) -> Tensor:
        values = torch.nn.functional.pad(values, pad)
        return values.view(values.shape[0] // tall, tall, values.shape[1] // wide, wide)

    blocks = split(x.float())
    codes = formats.scale_codes(blocks.abs().amax((1, 3), keepdim=True), dtype, scale_mode)
    data = formats.encode(blocks, codes, dtype, None if uniform is None else split(uniform))
    raw = data.view(torch.uint8).reshape(blocks.shape[0] * tall, blocks.shape[2] * wide)[:rows, :columns].contiguous()
    return Scaled(raw.view(dtype), scale_values(codes[:, 0, :, 0]))


def scale_values(codes: Tensor) -> Tensor:
    """float32 2^(code - 127) of E8M0 codes; NaN for 255."""
    return formats.scale_factors(codes, up=True)


def _quantize(
    x: Tensor,
    data: Tensor,
    scale: Tensor,
    group: tuple[int, int],
    tile: tuple[int, int],
    dtype: torch.dtype,
    scale_mode: str,
    hadamard: Hadamard | None,
    along: str,
    seed: Tensor | None,
    num_warps: int = 4,
) -> None:
    """Fill data [R' >= R, C] and scale (any strides) from x [R, C]; rows past R become zeros."""
    if runs_in_kernel(x):
        kernels().launch(
            x[:, None],
            data.view(torch.uint8)[:, None],
            scale[:, None],
            group=group,
            tile=tile,
            dtype=dtype,
            scale_mode=scale_mode,
            hadamard=hadamard,
            along=along,
            seed=seed,
            num_warps=num_warps,
        )
        return
    values = x.float()
    if hadamard is not None:
        values = hadamard.rotate(values) if along == "columns" else hadamard.rotate(values.T).T
    uniform = None if seed is None else formats.counter_uniform(values.numel(), seed).view(values.shape)
    full = torch.nn.functional.pad(values, (0, 0, 0, data.shape[0] - x.shape[0]))
    if uniform is not None:
        uniform = torch.nn.functional.pad(uniform, (0, 0, 0, data.shape[0] - x.shape[0]))
    found = blocks_plainly(full, group, dtype, scale_mode, uniform)
    data.view(torch.uint8).copy_(found.data.view(torch.uint8))
    scale.copy_(found.scale)


def runs_in_kernel(x: Tensor) -> bool:
    """Whether the Triton kernel quantises x."""
    return x.is_cuda and kernels() is not None and kernels().runs_on(x)


def by_row(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    hadamard: Hadamard | None = None,
    seed: Tensor | None = None,
) -> Scaled:
    """x [M, K] in blocks of 1 x 128 along K, for a GEMM that sums over K: data [M', K], scale [M', ceil(K / 128)].

    M' = M rounded up to 16, zeros behind. The scale's strides are (1, M'), as the product wants them.
    """
    rows, columns = padded(x.shape[0]), x.shape[1]
    data = torch.empty(rows, columns, dtype=dtype, device=x.device)
    scale = torch.empty(-(-columns // SLAB), rows, dtype=torch.float32, device=x.device).T
    _quantize(x, data, scale, (1, SLAB), (32, SLAB), dtype, scale_mode, hadamard, "columns", seed)
    return Scaled(data, scale)


def by_column(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    hadamard: Hadamard | None = None,
    seed: Tensor | None = None,
) -> Scaled:
    """x [M, N] in blocks of 128 x 1 along M, transposed, for a GEMM that sums over tokens: data [N, M'], scale
    [N, ceil(M' / 128)] of strides (1, N). M' as in `by_row`."""
    rows, columns = padded(x.shape[0]), x.shape[1]
    data = torch.empty(columns, rows, dtype=dtype, device=x.device)
    scale = torch.empty(-(-rows // SLAB), columns, dtype=torch.float32, device=x.device).T
    _quantize(x, data.T, scale.T, (SLAB, 1), (SLAB, 64), dtype, scale_mode, hadamard, "rows", seed, num_warps=8)
    return Scaled(data, scale)


def by_tile(
    w: Tensor,
    *,
    turned: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    hadamard: Hadamard | None = None,
) -> Scaled:
    """w [N, K] in blocks of 128 x 128: data [N, K], scale [ceil(N / 128), ceil(K / 128)], rows of the scale in a
    multiple of 4. turned: the same of w^T, data [K, N]; square blocks serve both orientations. hadamard: along the last
    axis of the result."""
    rows, columns = w.shape
    high, wide = (columns, rows) if turned else (rows, columns)
    data = torch.empty(high, wide, dtype=dtype, device=w.device)
    scale = torch.empty(-(-high // SLAB), padded(-(-wide // SLAB), 4), dtype=torch.float32, device=w.device)
    scale = scale[:, : -(-wide // SLAB)]
    along = "rows" if turned else "columns"
    out, out_scale = (data.T, scale.T) if turned else (data, scale)
    _quantize(w, out, out_scale, (SLAB, SLAB), (SLAB, SLAB), dtype, scale_mode, hadamard, along, None, num_warps=8)
    return Scaled(data, scale)


def values(operand: Scaled) -> Tensor:
    """float32 values of an operand; blocks follow from the shapes of data and scale."""
    tall = 1 if operand.scale.shape[0] == operand.data.shape[0] else SLAB
    spread = operand.scale.repeat_interleave(tall, 0)[: operand.data.shape[0]]
    spread = spread.repeat_interleave(SLAB, 1)[:, : operand.data.shape[1]]
    return operand.data.float() * spread


def product(a: Scaled, b: Scaled, rows: int, dtype: torch.dtype) -> Tensor:
    """a b^T [rows, N] of a [M', K] and b [N, K], accumulated accurately in float32 (no fast accumulation on a GPU).

    a in slabs, b in tiles or slabs. On a GPU the 8-bit tensor cores multiply (Hopper only, where these scales exist);
    elsewhere the same values are multiplied in float32. ValueError on a GPU that is not Hopper, or for K, N that are
    no multiple of 16.
    """
    if not a.data.numel():  # no tokens
        return torch.zeros(rows, b.data.shape[0], dtype=dtype, device=a.data.device)
    if not a.data.is_cuda:
        return (values(a) @ values(b).T)[:rows].to(dtype)
    why = unsupported(a.data.device, b.data.shape[0], b.data.shape[1])
    if why is not None:
        raise ValueError(f"mxfp8, format hopper: {why}")
    b_scale, blocks = b.scale, b.scale.shape[1]
    # torch and cuBLAS disagree on padded tiles; a single slab is a scale a row for torch, of b's rows too
    if b_scale.shape[0] != b.data.shape[0] and blocks % 4:
        b_scale = b_scale.repeat_interleave(SLAB, 0)[: b.data.shape[0]].T.contiguous().T
    return torch._scaled_mm(
        a.data, b.data.T, scale_a=a.scale, scale_b=b_scale.T, out_dtype=dtype, use_fast_accum=False
    )[:rows]


def unsupported(device: torch.device, *sizes: int) -> str | None:
    """Why 8-bit products with these scales cannot run on a GPU, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"compute capability {capability}; allowed: (9, 0), or a CPU, where the numbers are emulated"
    if any(size % ROWS for size in sizes):
        return f"sizes {sizes}; allowed: multiples of {ROWS}"
    return None


def fprop(x: Tensor, weight: Tensor, recipe) -> Tensor:
    """y = x weight^T in the dtype of x [M, K]; weight [N, K]."""
    turn = _rotation(recipe, x.shape[1])
    a = by_row(x, dtype=recipe.dtype("input"), scale_mode=recipe.scale_mode, hadamard=turn)
    b = by_tile(weight, dtype=recipe.dtype("weight"), scale_mode=recipe.scale_mode, hadamard=turn)
    return product(a, b, x.shape[0], x.dtype)


def dgrad(dy: Tensor, weight: Tensor, recipe) -> Tensor:
    """dx = dy weight in the dtype of dy [M, N]."""
    turn = _rotation(recipe, weight.shape[0])
    a = by_row(
        dy, dtype=recipe.dtype("gradient"), scale_mode=recipe.scale_mode, hadamard=turn, seed=_seed(recipe, dy)
    )  # fmt: skip
    b = by_tile(weight, turned=True, dtype=recipe.dtype("weight"), scale_mode=recipe.scale_mode, hadamard=turn)
    return product(a, b, dy.shape[0], dy.dtype)


def wgrad(dy: Tensor, x: Tensor, recipe, dtype: torch.dtype) -> Tensor:
    """dW = dy^T x [N, K] in `dtype`; tokens are summed over, so both operands are quantised along them."""
    turn = _rotation(recipe, x.shape[0])
    a = by_column(
        dy, dtype=recipe.dtype("gradient"), scale_mode=recipe.scale_mode, hadamard=turn, seed=_seed(recipe, dy)
    )  # fmt: skip
    b = by_column(x, dtype=recipe.dtype("input"), scale_mode=recipe.scale_mode, hadamard=turn)
    return product(a, b, dy.shape[1], dtype)


def _rotation(recipe, length: int) -> Hadamard | None:
    """The recipe's rotation of a reduction axis; ValueError where it has partial groups of 32."""
    if recipe.hadamard is None:
        return None
    if length % BLOCK:
        raise ValueError(f"hadamard: reduction axis of {length}; allowed in format hopper: multiples of {BLOCK}")
    return Hadamard(recipe.hadamard)


def _seed(recipe, x: Tensor) -> Tensor | None:
    return formats.draw_seed(None, x.device) if recipe.stochastic else None
