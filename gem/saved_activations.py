"""Activations that wait for the backward in eight or four bits.

Source: tensors saved at the boundary of forward and backward are quantised to FP8 or MX4, so that larger local
batches fit. Every large floating-point tensor that a layer saves is packed when it is saved and unpacked when the
backward asks for it; the forward itself is untouched.

fp8: E4M3 in blocks of 32 along the last axis, one power-of-two scale (E8M0) a block, 8.25 bits a number.
mx4: E2M1 in the same blocks, two numbers a byte, 4.25 bits a number; packing is emulated in plain tensor operations.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from kernels import mxfp8
from kernels.mxfp8 import formats

FORMATS = ("fp8", "mx4")
BLOCK = 32
MIN_ELEMENTS = 4096  # below, scales and launches cost more than the memory
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantised(model: nn.Module, kind: str) -> Callable:
    """A stand-in for GEM.run_layer: runs a layer with its saved tensors packed as `kind` ("fp8" or "mx4").

    Parameters and their copies in lower precision stay as they are: a tensor whose shape, or that of its transpose, is
    a parameter's is not packed. Nor are row statistics, which must stay exact: those of an attention, [heads, rows],
    may be infinite, and those of a norm, [.., 1], make its gradient a small difference of large terms. ValueError:
    unknown format.
    """
    if kind not in FORMATS:
        raise ValueError(f"saved activations: unknown format {kind!r}; allowed: {', '.join(FORMATS)}")
    shapes = {tuple(value.shape) for value in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    pack_values, unpack_values = (pack_fp8, unpack_fp8) if kind == "fp8" else (pack_mx4, unpack_mx4)
    recent: dict[tuple, tuple[StorageWeakRef, weakref.ref]] = {}  # several operations save one tensor: pack it once

    def pack(value: torch.Tensor):
        small = value.numel() < MIN_ELEMENTS or value.dim() < 2 or tuple(value.shape) in shapes
        # an activation has more rows than columns, [heads, rows] has not
        statistics = value.dim() and (value.shape[-1] == 1 or value.numel() < value.shape[-1] ** 2)
        if small or statistics or value.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value._version)
        storage, packed = recent.get(key, (None, None))
        # an address says nothing once its tensor is gone
        if storage is not None and not storage.expired() and packed() is not None:
            return packed()
        made = _Packed(pack_values(value))
        recent[key] = StorageWeakRef(value.untyped_storage()), weakref.ref(made)
        return made

    def unpack(packed):
        return unpack_values(packed.parts) if isinstance(packed, _Packed) else packed

    def run(layer, *inputs):
        recent.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return layer(*inputs)

    return run


class _Packed:
    """What the graph keeps instead of a tensor."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: tuple):
        self.parts = parts


def pack_fp8(value: torch.Tensor) -> tuple:
    """(FP8 tensor with its scales, dtype). Non-contiguous values are packed in their logical order."""
    return mxfp8.quantize(value.contiguous(), scale_mode="rceil"), value.dtype


def unpack_fp8(packed: tuple) -> torch.Tensor:
    tensor, dtype = packed
    return tensor.dequantize().to(dtype)


def pack_mx4(value: torch.Tensor) -> tuple:
    """(codes uint8 [.., blocks, 16], exponents int8 [.., blocks, 1], shape, dtype). NaN and inf make a block of NaN."""
    rows = _blocks(value)
    amax = rows.abs().amax(-1, keepdim=True).view(torch.int32)
    exponent = (amax >> 23) - 129  # amax / 2^exponent lies in [4, 8): the largest code is 6
    exponent = exponent.clamp_(-127, 126)
    scaled = rows * formats.power_of_two(-exponent)
    # Codes count in steps of the exponent's own size, which are half a unit up to 2; halves of a step go down.
    binade = (scaled.view(torch.int32) & 0x7F800000).clamp_(min=127 << 23)
    steps = scaled.abs().mul_(((255 << 23) - binade).view(torch.float32)).sub_(0.5).ceil_().to(torch.int32)
    code = steps.add_(binade.sub_(127 << 23) >> 22).clamp_(0, 7)
    code = code.add_((scaled < 0).to(torch.int32) << 3).to(torch.uint8)
    exponent = torch.where(amax >> 23 == 255, 127, exponent).to(torch.int8)
    return code[..., ::2] | (code[..., 1::2] << 4), exponent, value.shape, value.dtype


def unpack_mx4(packed: tuple) -> torch.Tensor:
    codes, exponent, shape, dtype = packed
    pairs = _pairs_of_e2m1(str(codes.device)).index_select(0, codes.flatten().int())
    factor = formats.power_of_two(exponent.int()).masked_fill_(exponent == 127, torch.nan)
    rows = pairs.view(torch.float32).view(*codes.shape[:-1], BLOCK) * factor
    return rows.flatten(-2)[..., : shape[-1]].reshape(shape).to(dtype)


@lru_cache(maxsize=8)
def _pairs_of_e2m1(device: str) -> torch.Tensor:
    """The two float32 values of each byte, side by side as one float64, so that one look-up finds both."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((values[byte & 15], values[byte >> 4]), -1).view(torch.float64).flatten()


def _blocks(value: torch.Tensor) -> torch.Tensor:
    """float32 [.., blocks, 32] of the last axis, zero-padded."""
    wide = nn.functional.pad(value.float(), (0, -value.shape[-1] % BLOCK))
    return wide.unflatten(-1, (-1, BLOCK))
