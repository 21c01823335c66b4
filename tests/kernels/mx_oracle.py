"""MX quantisation written a second time, by search over tables in float64: shares no code with kernels/mxfp8."""

from __future__ import annotations

import math

import numpy as np
import torch

LAYOUT = {torch.float8_e4m3fn: (4, 3, 7), torch.float8_e5m2: (5, 2, 15)}  # exponent bits, mantissa bits, bias
TOP = {torch.float8_e4m3fn: (448.0, 8), torch.float8_e5m2: (57344.0, 15)}  # largest value, its exponent


def table(dtype: torch.dtype) -> list[float]:
    """Value of each of the 256 codes, from the definition of the format."""
    exponent_bits, mantissa_bits, bias = LAYOUT[dtype]
    values = []
    for code in range(256):
        sign = -1.0 if code >> 7 else 1.0
        exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
        mantissa = code & ((1 << mantissa_bits) - 1)
        top = exponent == (1 << exponent_bits) - 1
        if dtype == torch.float8_e4m3fn and top and mantissa == (1 << mantissa_bits) - 1:
            values.append(math.nan)
        elif dtype == torch.float8_e5m2 and top:
            values.append(sign * math.inf if mantissa == 0 else math.nan)
        elif exponent == 0:
            values.append(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return values


def nearest(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Code of the nearest finite value of each finite x (float64), ties to the even code, by looking at all of them."""
    values = np.array(table(dtype)[:128])
    finite = np.flatnonzero(np.isfinite(values))
    distance = np.abs(np.abs(x)[..., None] - values[finite])
    tied = distance == distance.min(-1, keepdims=True)
    even = tied & (finite % 2 == 0)
    pick = np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))
    return (finite[pick] | np.where(np.signbit(x), 128, 0)).astype(np.uint8)


def code(amax: float, dtype: torch.dtype, mode: str) -> int:
    """Scale code of a block maximum, by trying all exponents. Powers of two and comparisons are exact in float64."""
    largest, top = TOP[dtype]
    if amax == 0:
        return 0
    for exponent in range(-127, 128):
        scale = 2.0**exponent
        fits = {
            "floor": amax < 2.0 * 2.0**top * scale,
            "ceil": amax <= 2.0**top * scale,
            "rceil": amax <= largest * scale,
        }
        if fits[mode]:
            return exponent + 127
    raise AssertionError("no exponent fits")


def quantize_blocks(x: np.ndarray, blocks: list[tuple], dtype: torch.dtype, mode: str) -> tuple[np.ndarray, list[int]]:
    """Bytes of x (float32) with one scale for each index tuple of `blocks`, and the codes."""
    data, codes = np.zeros(x.shape, np.uint8), []
    for index in blocks:
        part = x[index].astype(np.float64)
        codes.append(code(float(np.abs(part).max()) if part.size else 0.0, dtype, mode))
        data[index] = nearest(part / 2.0 ** (codes[-1] - 127), dtype)
    return data, codes
