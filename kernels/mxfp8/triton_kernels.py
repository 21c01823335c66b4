"""Triton kernels of the quantiser: block maximum, E8M0 scale by bit arithmetic, cast, in one pass over memory.

Same bytes as formats.py and quantize.py in plain torch. On a GPU the cast to nearest is the hardware's, which rounds
to even and saturates; Triton's interpreter converts some values differently, so there the byte is put together from
bits (NATIVE = False). Block maxima keep a NaN, which a plain maximum would lose, so that what is not finite reaches
the scale. Six instructions an element are what a copy of the memory leaves room for.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Bits of |x| of float32 x as int32; their order is that of the magnitudes, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def top_bits(x, axis: tl.constexpr):
    """Bits of the largest magnitude along an axis: Inf above every number, NaN above Inf."""
    return magnitude_bits(tl.reduce(tl.abs(x), axis, _larger))


@triton.jit
def power_of_two(exponent):
    """2^exponent, exponent in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(bits, FORMAT: tl.constexpr, MODE: tl.constexpr):
    """E8M0 code (int32) of a block whose largest magnitude has these bits; modes as in formats.py."""
    TOP: tl.constexpr = 8 if FORMAT == "e4m3" else 15
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    code = exponent - TOP
    if MODE == "ceil":
        code += (mantissa > 0).to(tl.int32)
    elif MODE == "rceil":  # the largest element is 1.75 * 2^TOP in both formats
        code += (mantissa > 0x600000).to(tl.int32)
    code = tl.minimum(tl.maximum(code, 0), 254)
    return tl.where(exponent == 255, 255, code)


@triton.jit
def scale_value(code):
    """2^(code - 127) as float32; code 0 is a subnormal, code 255 is NaN."""
    bits = tl.where(code == 0, 0x400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(code):
    """2^(127 - code), what a block is multiplied by; NaN for code 255, so that all of such a block is NaN."""
    return tl.where(code == 255, float("nan"), scale_value(254 - code))


@triton.jit
def uniform(seed, index):
    """Number `index` (int64) of the counter-based sequence of formats.counter_uniform: in [0, 1), float32."""
    z = seed.to(tl.uint64, bitcast=True) + (1 + index).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = (z ^ (z >> 31)) >> 40
    return z.to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def round_stochastic(x, numbers, FORMAT: tl.constexpr):
    """x rounded to one of its two neighbours in the format, up where the number lies below the distance."""
    MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
    LEAST: tl.constexpr = -6 if FORMAT == "e4m3" else -14
    bits = magnitude_bits(x)
    magnitude = bits.to(tl.float32, bitcast=True)
    quantum = tl.maximum((bits >> 23) - 127, LEAST) - MANTISSA
    quantum = tl.minimum(quantum, 20)  # Inf and NaN keep themselves below
    steps = magnitude * power_of_two(-quantum)
    lower = tl.floor(steps)
    rounded = (lower + (numbers < steps - lower).to(tl.float32)) * power_of_two(quantum)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    rounded = (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(bits < 0x7F800000, rounded, x)


@triton.jit
def to_bytes(x, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """float32 x, finite or NaN, rounded to nearest even and saturated, as the byte of the format."""
    if NATIVE:
        if FORMAT == "e4m3":
            byte = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            byte = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
        return byte
    else:
        bits = magnitude_bits(x)
        MANTISSA: tl.constexpr = 3 if FORMAT == "e4m3" else 2
        LEAST: tl.constexpr = 121 if FORMAT == "e4m3" else 113  # biased exponent of the smallest normal element
        STEPS: tl.constexpr = 512.0 if FORMAT == "e4m3" else 65536.0  # 1 / smallest element
        LARGEST: tl.constexpr = 448.0 if FORMAT == "e4m3" else 57344.0
        clamped = tl.minimum(bits.to(tl.float32, bitcast=True), LARGEST)
        # Adding 1.5 * 2^23 quanta makes the float32 adder round at the quantum of the number's own exponent.
        exponent = tl.maximum(magnitude_bits(clamped) & 0x7F800000, LEAST << 23)
        magic = (exponent + (((23 - MANTISSA) << 23) | 0x400000)).to(tl.float32, bitcast=True)
        rounded = (clamped + magic) - magic
        normal = (magnitude_bits(rounded) >> (23 - MANTISSA)) - ((LEAST - 1) << MANTISSA)
        small = (rounded * STEPS).to(tl.int32)
        value = tl.where(magnitude_bits(rounded) < (LEAST << 23), small, normal)
        byte = value | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return tl.where(bits > 0x7F800000, 0x7F, byte).to(tl.uint8)


@triton.jit
def butterfly(x, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """One stage of the Walsh-Hadamard transform of x [COUNT, 32]: pairs WIDTH apart become their sum and difference."""
    split: tl.constexpr = 16 // WIDTH
    pairs = tl.permute(tl.reshape(x, [COUNT, split, 2, WIDTH]), [0, 1, 3, 2])
    a, b = tl.split(pairs)
    joined = tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2])
    return tl.reshape(joined, [COUNT, 32])


@triton.jit
def rotate(x, signs, COUNT: tl.constexpr):
    """Random Hadamard transform of the rows of x [COUNT, 32], in the order of additions of formats.Hadamard."""
    x = x * tl.load(signs + tl.arange(0, 32))[None, :]
    x = butterfly(x, COUNT, 1)
    x = butterfly(x, COUNT, 2)
    x = butterfly(x, COUNT, 4)
    x = butterfly(x, COUNT, 8)
    x = butterfly(x, COUNT, 16)
    return x * 0.1767766952966369


@triton.jit
def key_order(x, R: tl.constexpr, C: tl.constexpr):
    """Rows of x [R, C] in the order in which the second product of attention wants a tile's keys: of every 16, row
    8 g + 2 t + b goes to place 4 t + 2 g + b.

    Scores leave the tensor cores with keys 2 t, 2 t + 1 of every 8 in thread t, while an 8-bit operand holds four
    neighbours. With values stored in this order a thread's own scores are the operand, and nothing is exchanged.
    """
    return tl.reshape(tl.permute(tl.reshape(x, [R // 16, 2, 4, 2, C]), [0, 2, 1, 3, 4]), [R, C])


@triton.jit(do_not_specialize=["batch", "rows", "stored_rows", "s_row", "s_middle", "s_column"])
def quantize_kernel(
    x,
    data,
    scale,
    signs,
    seed,
    offsets,
    tiles,
    count,
    offsets_stride,
    batch,
    rows,
    columns,
    x_row,
    x_middle,
    x_column,
    d_row,
    d_middle,
    d_column,
    s_row,
    s_middle,
    s_column,
    stored_rows,
    padded_columns,
    middles,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    GROUP_R: tl.constexpr,
    GROUP_C: tl.constexpr,
    FORMAT: tl.constexpr,
    MODE: tl.constexpr,
    JAGGED: tl.constexpr,
    PADDED_DATA: tl.constexpr,
    PADDED_SCALE: tl.constexpr,
    KEY_ORDER: tl.constexpr,
    CODES: tl.constexpr,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """One tile [TILE_R, TILE_C] of x [rows, middles, columns] in blocks of GROUP_R x GROUP_C elements.

    JAGGED: tiles come from a tile list, so that blocks start and end with sequences; tile i of the list has the block
    rows from i * TILE_R / GROUP_R on. Otherwise offsets, if any, say which rows are real; the others give zeros.
    stored_rows >= rows: rows of the outputs, zeros behind. PADDED_DATA, PADDED_SCALE: rows of the output in the order
    of tiles, TILE_R a tile, also past a sequence's end.
    """
    place = tl.program_id(0)
    middle = tl.program_id(1).to(tl.int64)
    inside = tl.arange(0, TILE_R)
    if JAGGED:
        if place >= tl.load(count):
            return
        sequence = tl.load(tiles + 2 * place.to(tl.int64))
        tile = tl.load(tiles + 2 * place.to(tl.int64) + 1)
        begin = tl.load(offsets + sequence.to(tl.int64) * offsets_stride).to(tl.int64)
        end = tl.load(offsets + (sequence + 1).to(tl.int64) * offsets_stride, mask=sequence < batch, other=0)
        end = tl.where(sequence < batch, end.to(tl.int64), rows)
        row = begin + tile * TILE_R + inside
        exists = row < end
        real = exists & (sequence < batch)
    else:
        row = place.to(tl.int64) * TILE_R + inside
        exists = row < stored_rows
        if offsets is None:
            real = row < rows
        else:
            real = row < tl.load(offsets + batch * offsets_stride)
    column = tl.program_id(2) * TILE_C + tl.arange(0, TILE_C)
    within = column < columns
    pointers = x + row[:, None] * x_row + middle * x_middle + column[None, :].to(tl.int64) * x_column
    values = tl.load(pointers, mask=real[:, None] & within[None, :], other=0.0).to(tl.float32)
    if HADAMARD == "columns":
        values = tl.reshape(
            rotate(tl.reshape(values, [TILE_R * TILE_C // 32, 32]), signs, TILE_R * TILE_C // 32), [TILE_R, TILE_C]
        )
    elif HADAMARD == "rows":
        across = tl.reshape(tl.trans(values), [TILE_R * TILE_C // 32, 32])
        values = tl.trans(tl.reshape(rotate(across, signs, TILE_R * TILE_C // 32), [TILE_C, TILE_R]))
    blocks = tl.reshape(values, [TILE_R // GROUP_R, GROUP_R, TILE_C // GROUP_C, GROUP_C])
    top = top_bits(tl.reduce(tl.abs(blocks), 3, _larger), 1)
    code = scale_code(top, FORMAT, MODE)
    small = tl.reshape(blocks * inverse_scale(code)[:, None, :, None], [TILE_R, TILE_C])
    if STOCHASTIC:
        flat = row if not JAGGED else place.to(tl.int64) * TILE_R + inside
        index = (flat[:, None] * middles + middle) * padded_columns + column[None, :]
        small = round_stochastic(small, uniform(tl.load(seed), index), FORMAT)
    byte = to_bytes(small, FORMAT, NATIVE)
    out = row
    keep = exists[:, None] & within[None, :]
    if PADDED_DATA:
        if KEY_ORDER:
            byte = key_order(byte, TILE_R, TILE_C)
        out = place.to(tl.int64) * TILE_R + inside
        keep = (inside >= 0)[:, None] & within[None, :]
    tl.store(data + out[:, None] * d_row + middle * d_middle + column[None, :].to(tl.int64) * d_column, byte, mask=keep)
    block_row = tl.arange(0, TILE_R // GROUP_R)
    block_column = tl.program_id(2) * (TILE_C // GROUP_C) + tl.arange(0, TILE_C // GROUP_C)
    lines = place.to(tl.int64) * (TILE_R // GROUP_R) + block_row
    stored = lines * GROUP_R < stored_rows
    if JAGGED:
        if not PADDED_SCALE and GROUP_R == 1:
            lines = begin + tile * TILE_R + block_row
            stored = lines < end
        else:
            stored = (sequence < batch) & (block_row >= 0)
    if CODES:
        value = code.to(tl.uint8)
    else:
        value = scale_value(code)
    tl.store(
        scale + lines[:, None] * s_row + middle * s_middle + block_column[None, :].to(tl.int64) * s_column,
        value,
        mask=stored[:, None] & (block_column * GROUP_C < columns)[None, :],
    )
