"""MX number formats in plain torch: element formats, E8M0 scales, casts, random Hadamard transform, scale layout.

An MX block is 32 (or 32 x 32) elements of 8 bits that share one scale, a power of two held as one byte (E8M0: value
2^(code - 127), code 255 = NaN). Every step here is exact arithmetic on float32, so that a CPU without any 8-bit
hardware gives the bytes that such hardware would.

How the scale of a block with largest magnitude `amax` is rounded (`scale_mode`):

    floor   2^(floor(log2 amax) - emax)   the OCP rule. The maximum may lie up to 512/448 past the largest element
                                          and is then clipped: up to 12.5 % error on the largest value of the block
    ceil    2^(ceil(log2 amax) - emax)    never clips, leaves up to one bit of range unused
    rceil   2^ceil(log2(amax / max))      the smallest power of two that does not clip; the source's kernels use it

The exponent is read from the bits of the float, never from log2 ("scales by bit manipulation rather than log2, round
and clamp" is one of the source's kernel ideas): log2 of a float next to a power of two may round to the wrong side.

What is not finite stays visible: a block that holds an Inf or a NaN gets scale code 255 and decodes to NaN as a whole.
`saturating_cast` alone turns Inf into NaN in E4M3, which has no Inf, and keeps it in E5M2; finite values saturate.
A block of zeros gets code 0 and decodes to exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 32
SCALE_BIAS = 127
SCALE_NAN = 255
SCALE_MODES = ("floor", "ceil", "rceil")
SCALE_TILE = (128, 4)

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # splitmix64, written as signed 64-bit constants
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class ElementFormat:
    """An 8-bit float: bits of mantissa, exponents of the smallest and largest normal number, largest finite value."""

    name: str
    dtype: torch.dtype
    mantissa: int
    min_exponent: int
    max_exponent: int
    largest: float

    @property
    def max_mantissa_bits(self) -> int:
        """Mantissa of `largest`, left-aligned in the 23 bits of a float32."""
        return int(torch.tensor(self.largest).view(torch.int32)) & 0x7FFFFF


E4M3 = ElementFormat("e4m3", torch.float8_e4m3fn, 3, -6, 8, 448.0)
E5M2 = ElementFormat("e5m2", torch.float8_e5m2, 2, -14, 15, 57344.0)
_FORMATS = {f.dtype: f for f in (E4M3, E5M2)}


def element_format(dtype: torch.dtype) -> ElementFormat:
    """The element format stored as `dtype`; ValueError for a dtype that is none."""
    if dtype not in _FORMATS:
        raise ValueError(f"dtype: {dtype}; allowed: {', '.join(str(d) for d in _FORMATS)}")
    return _FORMATS[dtype]


def scale_codes(amax: Tensor, dtype: torch.dtype, mode: str) -> Tensor:
    """E8M0 codes (uint8) of block maxima `amax` (float32, >= 0, any shape) for elements of `dtype`; see the module's
    modes.

    Codes run from 0 (blocks of zeros, and magnitudes too small for any code) to 254; 255 where amax is Inf or NaN.
    """
    if mode not in SCALE_MODES:
        raise ValueError(f"scale_mode: {mode!r}; allowed: {', '.join(SCALE_MODES)}")
    fmt = element_format(dtype)
    bits = amax.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    codes = exponent - fmt.max_exponent
    if mode == "ceil":
        codes = codes + (mantissa > 0).int()
    elif mode == "rceil":  # amax / largest > 2^(difference of exponents) exactly when its mantissa is the larger one
        codes = codes + (mantissa > fmt.max_mantissa_bits).int()
    return torch.where(exponent == 255, SCALE_NAN, codes.clamp(0, SCALE_NAN - 1)).to(torch.uint8)


def power_of_two(exponent: Tensor) -> Tensor:
    """float32 2^exponent for int32 exponents in [-127, 127]; 2^-127 is the one that is no normal number."""
    return ((exponent + 127) << 23).clamp_(min=1 << 22).view(torch.float32)


def scale_factors(codes: Tensor, *, up: bool) -> Tensor:
    """float32 2^(code - 127) of scale codes (up), or its inverse, NaN under code 255: what decodes or encodes."""
    exponent = codes.to(torch.int32) - SCALE_BIAS
    return power_of_two(exponent if up else -exponent).masked_fill_(codes == SCALE_NAN, float("nan"))


def encode(x: Tensor, codes: Tensor, dtype: torch.dtype, uniform: Tensor | None = None) -> Tensor:
    """Elements (`dtype`) of float32 x under the scale codes of its blocks, broadcast to x, NaN under code 255;
    `uniform` (in [0, 1), x's shape): round stochastically."""
    fmt = element_format(dtype)
    # Every power that a code stands for is a float32 itself, so that one product scales exactly.
    scaled = x * scale_factors(codes, up=False)
    if uniform is not None:
        scaled = round_stochastically(scaled, fmt, uniform)
    return scaled.clamp_(-fmt.largest, fmt.largest).to(dtype)


def decode(data: Tensor, codes: Tensor) -> Tensor:
    """float32 values of elements under scale codes broadcast to them; NaN under code 255."""
    return element_values(data) * scale_factors(codes, up=True)


def element_values(data: Tensor) -> Tensor:
    """float32 values of elements; looked up on a CPU, where torch converts them one by one."""
    if data.device.type != "cpu":
        return data.float()
    return _values(data.dtype).index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)


@lru_cache(maxsize=2)
def _values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256).to(torch.uint8).view(dtype).float()


def saturating_cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to nearest, ties to even, in `dtype`. Finite values beyond the range become the largest one; NaN
    stays NaN; Inf becomes NaN in E4M3 and stays Inf in E5M2.

    The clamp comes first because conversions of out-of-range values differ between versions of torch and between
    eager and compiled code.
    """
    fmt = element_format(dtype)
    x = x.float()
    infinite = float("nan") if dtype == torch.float8_e4m3fn else x
    return torch.where(x.isinf(), infinite, x.clamp(-fmt.largest, fmt.largest)).to(dtype)


def round_to_elements(x: Tensor, fmt: ElementFormat) -> Tensor:
    """float32 x, |x| <= fmt.largest, rounded to the nearest element of `fmt`, ties to even, as float32.

    Adding and subtracting 1.5 * 2^23 quanta makes the float32 adder round at the quantum of x's own exponent. The sums
    are exact otherwise, so the result is that of the conversion; conversions to 8 bits are scalar code on a CPU.
    """
    exponent = (x.view(torch.int32) & 0x7F800000).clamp_(min=(fmt.min_exponent + 127) << 23)
    magic = exponent.add_(((23 - fmt.mantissa) << 23) | 0x400000).view(torch.float32)
    return (x + magic).sub_(magic)


def stochastic_cast(x: Tensor, dtype: torch.dtype, uniform: Tensor) -> Tensor:
    """x (float32) rounded to one of its two neighbours in `dtype`, the upper one with probability equal to the
    distance from the lower: the mean over `uniform` (in [0, 1)) is x itself where |x| is in range. The source uses it
    for gradients."""
    rounded = round_stochastically(x, element_format(dtype), uniform)
    return saturating_cast(torch.where(x.isfinite(), rounded, x), dtype)


def round_stochastically(x: Tensor, fmt: ElementFormat, uniform: Tensor) -> Tensor:
    """`stochastic_cast` of finite float32 x as float32, without saturation; NaN where x is not finite."""
    magnitude = x.abs()
    exponent = (magnitude.view(torch.int32) & 0x7F800000).clamp_(min=(fmt.min_exponent + 127) << 23)
    quantum = exponent.sub_(fmt.mantissa << 23)  # both powers of two as bits: the quantum of x, and its inverse
    steps = magnitude.mul_(((254 << 23) - quantum).view(torch.float32))
    lower = steps.floor()
    # one where uniform < steps - lower, else zero: the difference lies in (-1, 1), and its sign is exact
    upper = steps.sub_(lower).sub_(uniform).ceil_()
    return lower.add_(upper).mul_(quantum.view(torch.float32)).copysign_(x)


def counter_uniform(count: int, seed: Tensor) -> Tensor:
    """`count` numbers in [0, 1), multiples of 2^-24, float32, on seed's device: number i is splitmix64(seed, i), top
    24 bits.

    Counter-based: element i of a tensor has its number whatever else is computed, in any order, and a kernel that
    knows (seed, i) makes the same one. i is the flat index in the quantised tensor, not the position within a
    sequence: sequences that shared their numbers would share the sign of their rounding errors, which would not
    average out in a weight gradient. `seed`: int64 tensor of one element.
    """
    z = seed + _GOLDEN * (1 + torch.arange(count, dtype=torch.int64, device=seed.device))
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return _shift_right(z ^ _shift_right(z, 31), 40).float() * 2.0**-24


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def draw_seed(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """One int64 from `generator` (None: torch's default CPU generator), moved to `device`. While a CUDA graph is
    captured, without a generator, from the device's own, so that each replay draws another one."""
    if generator is None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)
    source = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=source)
    if source.type == "cpu" and device.type != "cpu":
        # a copy from the host waits for everything that is queued; a fill is queued behind it
        return torch.full((1,), drawn.item(), dtype=torch.int64, device=device)
    return drawn.to(device)


@dataclass(frozen=True)
class Hadamard:
    """Random Hadamard transform along an axis in groups of 32: x -> x D H / sqrt(32), D = signs drawn from `seed`.

    Orthogonal: (x D H) . (y D H) / 32 = x . y. So an outlier spreads over its group before quantising, and either
    `dequantize` rotates back, or both operands of a GEMM are rotated along its reduction axis by the same seed and
    nothing needs rotating back. (Source, on stability: a random Hadamard transform before quantising.)
    """

    seed: int

    def matrix(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 [32, 32], its own inverse transposed."""
        return self.rotate(torch.eye(BLOCK, device=device))

    def signs(self, device: torch.device | str = "cpu") -> Tensor:
        """float32 [32] of 1 and -1."""
        return _hadamard_signs(self.seed, str(device))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the last axis of float32 x, a multiple of 32. Additions in the order of the butterfly network, which
        every implementation shares, so that results agree to the last bit."""
        return _butterfly(x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK)), signs=self.signs(x.device)).flatten(-2)

    def rotate_back(self, x: Tensor) -> Tensor:
        """Undo `rotate`."""
        return (_butterfly(x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))) * self.signs(x.device)).flatten(-2)


def _butterfly(x: Tensor, signs: Tensor | None = None) -> Tensor:
    """x [..., 32], times `signs` [32], times the normalised Walsh-Hadamard matrix (Sylvester's order)."""
    # The axis comes first, so that every sum is one of long rows; where it lies so in memory, nothing is moved.
    front = x.movedim(-1, 0)
    moved = x.stride(-1) == 1
    here = front.contiguous() if moved else front
    here = here * (1.0 if signs is None else signs.view(-1, *[1] * (x.dim() - 1)))
    there = torch.empty_like(here)
    for width in (1, 2, 4, 8, 16):
        (a, b), (total, difference) = (
            y.unflatten(0, (BLOCK // (2 * width), 2, width)).unbind(1) for y in (here, there)
        )
        torch.add(a, b, out=total)
        torch.sub(a, b, out=difference)
        here, there = there, here
    out = here.mul_(BLOCK**-0.5).movedim(0, -1)
    return out.contiguous() if moved else out


@lru_cache(maxsize=64)
def _hadamard_signs(seed: int, device: str) -> Tensor:
    signs = torch.randint(0, 2, (BLOCK,), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return signs.float().to(device)


def scales_to_tiles(scale: Tensor) -> Tensor:
    """Lay scale codes [rows, columns] (uint8) out as block-scaled MMA instructions read them: tiles of 128 x 4 codes.

    Returns uint8 [ceil(rows / 128), ceil(columns / 4), 512]; code (r, c) of a tile is byte 16 (r mod 32) + 4 (r div
    32) + c. Padding bytes are 0 (a scale of 2^-127), never 255, which an MMA would read as NaN.
    """
    if scale.dim() != 2 or scale.dtype != torch.uint8:
        raise ValueError(f"scale: {scale.dtype} of shape {tuple(scale.shape)}; allowed: uint8 [rows, columns]")
    rows, columns = scale.shape
    tall, wide = SCALE_TILE
    down, across = -(-rows // tall), -(-columns // wide)
    padded = torch.zeros(down * tall, across * wide, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = scale
    tiles = padded.view(down, 4, 32, across, wide).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down, across, tall * wide)


def scales_from_tiles(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Codes [rows, columns] of tiles made by `scales_to_tiles`. Reads no padding byte."""
    tall, wide = SCALE_TILE
    shape = (-(-rows // tall), -(-columns // wide), tall * wide)
    if tuple(tiles.shape) != shape:
        raise ValueError(f"tiles: shape {tuple(tiles.shape)}; allowed: {shape} for {rows} x {columns} scales")
    logical = tiles.view(shape[0], shape[1], 32, 4, wide).permute(0, 3, 2, 1, 4)
    return logical.reshape(shape[0] * tall, shape[1] * wide)[:rows, :columns]
