"""MX quantiser: `quantize` makes an `MXTensor` of 8-bit elements and E8M0 scales; `round_to_mx` is its round trip.

Block scales belong to ONE axis, the one a GEMM sums over: an operand of two GEMMs is quantised twice from its
high-precision values, or once in 32 x 32 blocks, which serve both orientations (source: square blocks make a tensor
transpose-invariant, so that it is quantised once, which pays in the backward pass).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import jagged
from . import formats
from .formats import BLOCK, Hadamard

BLOCKS = ((1, 32), (32, 32))


class _TokenLayout(NamedTuple):
    """Where packed rows go when every sequence starts a new block: row i < valid -> padded row target[i]."""

    target: Tensor
    rows: int


def _token_layout(offsets: Tensor, total: int) -> _TokenLayout:
    jagged.check_offsets(offsets, "offsets", total)
    starts = offsets.long()
    blocks = (starts.diff() + BLOCK - 1) // BLOCK
    valid, count = int(starts[-1]), int(blocks.sum())
    first = (blocks.cumsum(0) - blocks) * BLOCK
    sequence = jagged.row_ids(offsets, total)[:valid]
    return _TokenLayout(first[sequence] + jagged.positions(offsets, total)[:valid], count * BLOCK)


def _spread(x: Tensor, layout: _TokenLayout) -> Tensor:
    """Packed rows -> padded rows, zeros (code 0 for bytes) between sequences."""
    padded = x.new_zeros(layout.rows, *x.shape[1:])
    padded[layout.target] = x[: layout.target.shape[0]]
    return padded


def _collect(padded: Tensor, layout: _TokenLayout, total: int) -> Tensor:
    """Padded rows -> packed rows; rows past the last sequence are zeros."""
    packed = padded.new_zeros(total, *padded.shape[1:])
    packed[: layout.target.shape[0]] = padded[layout.target]
    return packed


def in_memory_order(x: Tensor) -> tuple[int, ...]:
    """Axes of x from the largest stride to the smallest: permuted so, a transposed tensor is contiguous again."""
    return tuple(sorted(range(x.dim()), key=x.stride, reverse=True))


def pad_dims(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Zeros at the end of every axis of `dims` up to a multiple of 32; a transposed tensor stays transposed."""
    if all(x.shape[dim] % BLOCK == 0 for dim in dims):
        return x
    order = in_memory_order(x)
    pads = [pad for axis in reversed(order) for pad in (0, -x.shape[axis] % BLOCK if axis in dims else 0)]
    return F.pad(x.permute(order), pads).permute(_inverse(order))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(axis) for axis in range(len(order)))


def _split(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Split each axis n of ascending `dims` into (n / 32, 32), the inner one right behind."""
    for dim in reversed(dims):
        x = x.unflatten(dim, (x.shape[dim] // BLOCK, BLOCK))
    return x


def _join(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    for dim in dims:
        x = x.flatten(dim, dim + 1)
    return x


def _inner(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim + i + 1 for i, dim in enumerate(dims))


def _blocks(x: Tensor, dims, dtype, scale_mode) -> tuple[Tensor, Tensor]:
    """x with its blocked axes split, and the scale codes, broadcast to it."""
    blocks = _split(x, dims)
    return blocks, formats.scale_codes(blocks.abs().amax(_inner(dims), keepdim=True), dtype, scale_mode)


def _encode(x: Tensor, dims, dtype, scale_mode, uniform) -> tuple[Tensor, Tensor]:
    """Elements in x's shape and scale codes (blocked axes / 32) of float32 x whose `dims` are multiples of 32."""
    blocks, codes = _blocks(x, dims, dtype, scale_mode)
    data = formats.encode(blocks, codes, dtype, None if uniform is None else _split(uniform, dims))
    return _join(data.view(torch.uint8), dims).view(dtype), codes.squeeze(_inner(dims))


def _decode(data: Tensor, codes: Tensor, dims) -> Tensor:
    for dim in _inner(dims):
        codes = codes.unsqueeze(dim)
    blocks = _split(data.view(torch.uint8), dims).view(data.dtype)
    return _join(formats.decode(blocks, codes), dims)


@dataclass(frozen=True, eq=False)
class MXTensor:
    """A quantised tensor.

    data: elements, x's shape (rotated values if `hadamard` was given). scale: uint8 E8M0 codes, x's shape with every
    blocked axis replaced by its number of blocks; with `offsets` and a blocked token axis that is sum_i ceil(length_i
    / 32). axis: the reduction axis. dims: blocked axes. hadamard: the rotation that `dequantize` undoes.
    """

    data: Tensor
    scale: Tensor
    axis: int
    dims: tuple[int, ...]
    hadamard: Hadamard | None = None
    layout: _TokenLayout | None = None

    def dequantize(self, dtype: torch.dtype = torch.float32, *, rotated: bool = False) -> Tensor:
        """Values in the shape of x. rotated=True leaves the Hadamard transform in, for a GEMM whose other operand is
        rotated along the same axis by the same seed."""
        shape = self.data.shape
        raw = self.data.view(torch.uint8)
        raw = _spread(raw, self.layout) if self.layout is not None else raw
        values = _decode(pad_dims(raw, self.dims).view(self.data.dtype), self.scale, self.dims)
        if self.hadamard is not None and not rotated:
            values = _along(values, self.axis, self.hadamard.rotate_back)
        if self.layout is not None:
            values = _collect(values, self.layout, shape[0])
        for dim in self.dims:
            values = values.narrow(dim, 0, shape[dim])
        return values.to(dtype)

    def transpose(self) -> MXTensor:
        """The transpose of a matrix in 32 x 32 blocks: bytes and scale grid are transposed, nothing is requantised.

        ValueError for 1 x 32 blocks: their scales belong to the other reduction axis, so quantise the high-precision
        tensor along the new one.
        """
        if self.dims != (0, 1) or self.data.dim() != 2 or self.layout is not None or self.hadamard is not None:
            raise ValueError(
                "transpose: blocks of this tensor belong to one axis; allowed: matrices in plain (32, 32) blocks"
            )
        turned = self.data.view(torch.uint8).T.contiguous().view(self.data.dtype)
        return MXTensor(turned, self.scale.T.contiguous(), 1 - self.axis, self.dims)


def _along(x: Tensor, axis: int, function) -> Tensor:
    return function(x.movedim(axis, -1)).movedim(-1, axis)


def quantize(
    x: Tensor,
    *,
    axis: int = -1,
    block: tuple[int, int] = (1, 32),
    offsets: Tensor | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    hadamard: Hadamard | int | None = None,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> MXTensor:
    """Quantise x (bfloat16, float16, float32; float64 is first rounded to float32) to MX blocks.

    axis: the axis that the consuming GEMM sums over; blocks lie along it. block: (1, 32), or (32, 32), which also
    spans axis 0 (the last axis when `axis` is 0), per index of all other axes. A partial last block is as if
    zero-padded. offsets [B + 1]: axis 0 is a packed token axis. Blocks along it start and end with sequences, so that
    no sequence's scale depends on a neighbour; empty sequences have no block; rows past offsets[-1] become zeros.
    dtype: torch.float8_e4m3fn or torch.float8_e5m2. scale_mode: "floor", "ceil", "rceil" (see formats.py). hadamard:
    a `Hadamard` or its seed: rotate along `axis` first; partial blocks are a ValueError there, because a rotated
    block fills all its 32 places. stochastic: round stochastically with numbers counted from one seed drawn from
    `generator` (None: torch's default): same generator state, same bytes.

    Returns an `MXTensor`. Raises ValueError for anything not listed. Not differentiable: `linear` and the attentions
    define the gradients.
    """
    if not x.is_floating_point() or x.dim() == 0:
        raise ValueError(f"x: {x.dtype} of rank {x.dim()}; allowed: floating point, rank >= 1")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis: {axis}; allowed: {-x.dim()}..{x.dim() - 1}")
    formats.element_format(dtype)
    axis %= x.dim()
    dims = _blocked_axes(x.dim(), axis, block)
    hadamard = Hadamard(hadamard) if isinstance(hadamard, int) else hadamard
    layout = None if offsets is None else _token_layout(offsets, x.shape[0])
    if hadamard is not None:
        lengths = offsets.diff() if layout is not None and axis == 0 else torch.tensor(x.shape[axis])
        if bool((lengths % BLOCK != 0).any()):
            raise ValueError(
                f"hadamard: axis {axis} has partial blocks; allowed: lengths that are multiples of {BLOCK}"
            )
    seed = formats.draw_seed(generator, x.device) if stochastic else None
    if runs_in_kernel(x, axis, dims, offsets):
        return quantize_in_kernel(x, axis, dims, layout, offsets, dtype, scale_mode, hadamard, seed)
    values = x.detach().float()
    if layout is not None and 0 not in dims:  # blocks do not cross rows: only the rows past the end need care
        values = values.clone()
        values[layout.target.shape[0] :] = 0
        layout = None
    if layout is not None:
        values = _spread(values, layout)
    if hadamard is not None:
        values = _along(values, axis, hadamard.rotate)
    extent = values.shape
    values = pad_dims(values, dims)
    uniform = None if seed is None else formats.counter_uniform(values.numel(), seed).view(values.shape)
    data, scale = _encode(values, dims, dtype, scale_mode, uniform)
    raw = data.view(torch.uint8)
    for dim in dims:
        raw = raw.narrow(dim, 0, extent[dim])
    raw = _collect(raw, layout, x.shape[0]) if layout is not None else raw.contiguous()
    return MXTensor(raw.view(dtype), scale, axis, dims, hadamard, layout)


def runs_in_kernel(x: Tensor, axis: int, dims: tuple[int, ...], offsets: Tensor | None) -> bool:
    """Whether the Triton kernel makes these blocks: CUDA tensors, blocks along the first or last axis."""
    return x.is_cuda and kernels() is not None and kernels().fits(x, axis, dims, offsets)


def quantize_in_kernel(x, axis, dims, layout, offsets, dtype, scale_mode, hadamard, seed) -> MXTensor:
    """`quantize` by the Triton kernel: same bytes, one pass over memory. Arguments as checked there."""
    block_rows = None if layout is None else layout.rows // BLOCK
    data, scale = kernels().quantize_mx(
        x.detach(), axis, dims, block_rows, offsets=offsets, dtype=dtype, scale_mode=scale_mode, hadamard=hadamard,
        seed=seed,
    )  # fmt: skip
    return MXTensor(data.view(dtype), scale, axis, dims, hadamard, layout if 0 in dims else None)


@lru_cache(maxsize=1)
def kernels():
    """The module with the kernel's launches; None where there is no Triton."""
    try:
        from . import triton_quantize
    except ImportError:
        return None
    return triton_quantize


def _blocked_axes(rank: int, axis: int, block: tuple[int, int]) -> tuple[int, ...]:
    if tuple(block) == (1, 32):
        return (axis,)
    if tuple(block) == (32, 32) and rank >= 2:
        return (0, axis) if axis != 0 else (0, rank - 1)
    raise ValueError(f"block: {block} for rank {rank}; allowed: (1, 32), or (32, 32) for rank >= 2")


def round_to_mx(
    x: Tensor,
    dims: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    scale_mode: str = "rceil",
    stochastic: bool = False,
) -> Tensor:
    """float32 values of x after quantising in blocks of 32 along every axis of `dims`, partial blocks zero-padded.

    The round trip that the emulated GEMMs multiply: an 8-bit element times a power of two is exact in float32, and so
    is the product of two of them. Any rank; batched layouts [..., rows, columns] with dims (-2, -1) are square
    blocks.
    """
    dims = tuple(sorted(dim % x.dim() for dim in dims))
    shape = x.shape
    if x.is_cuda and round_kernels() is not None and round_kernels().fits(values := x.float(), dims):
        return round_kernels().round_values(values, dims, dtype=dtype, scale_mode=scale_mode, stochastic=stochastic)
    values = pad_dims(x.float(), dims)
    # torch's own generator: the counted numbers of `quantize` cost ten passes, and nothing here reads the bytes.
    uniform = torch.rand(values.shape, device=values.device) if stochastic else None
    order = in_memory_order(values)  # passes over a transposed tensor follow its memory
    back = _inverse(order)
    uniform = None if uniform is None else uniform.permute(order)
    inner = tuple(sorted(back[dim] for dim in dims))
    rounded = _round(values.permute(order), inner, dtype, scale_mode, uniform).permute(back)
    for dim in dims:
        rounded = rounded.narrow(dim, 0, shape[dim])
    return rounded


def rotate(x: Tensor, hadamard: Hadamard, *, back: bool = False) -> Tensor:
    """float32 x rotated by `hadamard` along its last axis (a multiple of 32), or back: one launch on a GPU."""
    if x.is_cuda and round_kernels() is not None:
        return round_kernels().rotated(x, hadamard, back=back)
    return hadamard.rotate_back(x) if back else hadamard.rotate(x)


@lru_cache(maxsize=1)
def round_kernels():
    """The module with the round trips' launches; None where there is no Triton."""
    try:
        from . import triton_round
    except ImportError:
        return None
    return triton_round


def _round(values: Tensor, dims, dtype, scale_mode, uniform) -> Tensor:
    """What decoding the encoded values gives (rounded to nearest, a zero loses its sign), without making bytes."""
    fmt = formats.element_format(dtype)
    blocks, codes = _blocks(values, dims, dtype, scale_mode)
    scaled = blocks * formats.scale_factors(codes, up=False)
    if scale_mode == "floor":  # the other modes never clip
        scaled.clamp_(-fmt.largest, fmt.largest)
    if uniform is None:
        rounded = formats.round_to_elements(scaled, fmt)
    else:
        rounded = formats.round_stochastically(scaled, fmt, _split(uniform, dims))
    return _join(rounded.mul_(formats.scale_factors(codes, up=True)), dims)
