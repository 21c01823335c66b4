"""What the TLX kernels for Hopper share: descriptors that end with a sequence, and how tiles of a list are dealt.

TLX (PyPI fbtriton) is Triton with explicit warp specialisation. A TMA descriptor knows the extent of a tensor, not of
a sequence inside it, so a plain one would read the next sequence's rows past a ragged end. `ragged_descriptor` adds
two dimensions whose strides cancel modulo 2^64, so that the hardware's own bounds check falls on the sequence's last
row: loads past it give zeros, stores past it are dropped, and no descriptor is rewritten on the device. (Same
arithmetic as triton.tools.ragged_tma.) A sequence without rows loads zeros only, so empty keys need no branch.
"""

from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl
import triton.language.extra.tlx as tlx  # raises ImportError under stock Triton; the registry turns that into a reason
from triton.tools.tensor_descriptor import TensorDescriptor

from .registry import Case

GROUP_ROWS = 64  # query rows of one consumer warp group: wgmma's M
_FAR = 1 << 30


_THREAD = threading.local()


def _bind_context(device: torch.device) -> None:
    """Bind the device's context to this thread: one is needed to encode a descriptor, and a thread of autograd's that
    has launched nothing yet has none. torch binds it with its first launch.
    """
    bound = _THREAD.__dict__.setdefault("devices", set())
    if device.type == "cuda" and device not in bound:
        torch.zeros(1, device=device)
        bound.add(device)


def ragged_descriptor(x: torch.Tensor, block_rows: int, block_columns: int | None = None) -> TensorDescriptor:
    """Descriptor of x [T, H, D] for tiles [1, 1, block_rows, block_columns or D] of `load_ragged` and `store_ragged`.

    Needs heads packed behind each other (stride(1) == D, stride(2) == 1) and 16-byte rows; see `packed_heads`.
    """
    _bind_context(x.device)
    heads, dim = x.shape[1:]
    stride = x.stride(0)
    shape = [0x7FFF0000, 0x7FFF0000, _FAR, heads * dim]
    return TensorDescriptor(x, shape, [2**34 - stride, stride, stride, 1], [1, 1, block_rows, block_columns or dim])


def packed_heads(x: torch.Tensor) -> torch.Tensor:
    """x itself when TMA can address it, else a contiguous copy. A view of a fused qkv buffer passes as it is."""
    aligned = x.data_ptr() % 16 == 0 and (x.stride(0) * x.element_size()) % 16 == 0
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] and aligned and x.stride(0) > 0 else x.contiguous()


@triton.jit
def load_ragged(desc, buffer, barrier, first, size, row, column):
    """TMA load of rows [row, row + block) of the sequence [first, first + size) into `buffer`; zeros past its end."""
    tlx.async_descriptor_load(desc, buffer, [1073741824, first + size, 1073741824 - size + row, column], barrier)


@triton.jit
def store_ragged(desc, buffer, first, size, row, column):
    """TMA store of `buffer` to rows [row, row + block) of a sequence; rows past its end are not written."""
    tlx.async_descriptor_store(desc, buffer, [1073741824, first + size, 1073741824 - size + row, column])


@triton.jit
def add_ragged(desc, buffer, first, size, row, column):
    """As store_ragged, but adds to what is there."""
    tlx.async_descriptor_store(
        desc, buffer, [1073741824, first + size, 1073741824 - size + row, column], store_reduce="add"
    )


@triton.jit
def zigzag(round_, program, programs):
    """Index of the tile that `program` takes in a round: tiles are sorted by work, odd rounds are dealt backwards."""
    return round_ * programs + tl.where(round_ % 2 == 0, program, programs - 1 - program)


@triton.jit
def my_tiles(total, program, programs):
    """How many tiles the zigzag deal gives to `program`."""
    full = total // programs
    place = tl.where(full % 2 == 0, program, programs - 1 - program)
    return full + (place < total % programs).to(tl.int32)


@triton.jit
def tile_entry(table, index, H, BLOCK_ROWS: tl.constexpr):
    """(first q row, q rows, first kv row, kv rows, output row, head, first row of the tile) of tile `index`."""
    slot = table + (index // H) * 8
    q_first = tl.load(slot)
    q_size = tl.load(slot + 1)
    kv_first = tl.load(slot + 2)
    kv_size = tl.load(slot + 3)
    start = tl.load(slot + 4)
    tiles = tl.load(slot + 5)
    out_first = tl.load(slot + 6)
    place = index - start * H
    head = place // tiles
    return q_first, q_size, kv_first, kv_size, out_first, head, (place - head * tiles) * BLOCK_ROWS


def hopper_only(case: Case) -> str | None:
    """Why a call cannot run on these kernels, or None."""
    if case.device_type != "cuda" or case.capability[0] != 9:
        return f"needs a Hopper GPU (compute capability 9.x); this is {case.device_type} {case.capability}"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, not {case.dtype}"
    if case.head_dim not in (64, 128):
        return f"needs head_dim 64 or 128, not {case.head_dim}"
    if "schedule" in case.features:
        return "builds its own tile list and takes no schedule="
    return None


_SMS: dict[int, int] = {}


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 elsewhere, where kernels are compiled but not run."""
    if device.type != "cuda":
        return 1
    index = device.index if device.index is not None else torch.cuda.current_device()
    if index not in _SMS:
        _SMS[index] = torch.cuda.get_device_properties(index).multi_processor_count
    return _SMS[index]
