"""Block attention on Hopper in TLX: 64-row blocks streamed through TMA, several in flight, rotary fused both ways.

The source's block attention holds a block's whole problem on the chip: no running maximum, no log-sum-exp, no pass for
D, and the rotary backward in the epilogue, in float32. That leaves memory as the limit, and this version is built for
it: a producer warp keeps loads in flight while two warp groups compute (tlx_kernels.py says how).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..registry import Case, Implementation
from ..tlx_common import hopper_only, num_sms, packed_heads, ragged_descriptor
from ..work_lists import forward_list
from .tlx_kernels import backward_kernel, forward_kernel

BLOCK_SIZE = 64
PHASES = ("fwd", "bwd")


@dataclass(frozen=True)
class Config:
    """stages: (block, head) units in flight, each the tiles q, k, v (backward: and dO). registers: of a consumer
    thread.
    """

    stages: int
    registers: int = 232


_DEFAULT = {("fwd", 128): Config(4), ("fwd", 64): Config(8), ("bwd", 128): Config(3), ("bwd", 64): Config(5)}


def candidates(phase: str, head_dim: int) -> list[Config]:
    """Configurations that a sweep tries for `phase` ("fwd", "bwd"), the default first."""
    default = _DEFAULT[phase, head_dim]
    return [default, Config(default.stages - 1)]


def _launch(kernel, config, tensors, offsets, block_size, scale, rotary, *rest):
    if block_size != BLOCK_SIZE:
        raise ValueError(f"block_attention: impl 'tlx' block_size {block_size}; allowed: {BLOCK_SIZE}")
    rows, heads, head_dim = tensors[0].shape
    on = () if rotary is None else rotary.on
    # A table is a tensor of one head to the descriptors. Without rotary any descriptor does: it is not used.
    tables = tuple(packed_heads(x[:, None]) for x in (rotary.cos, rotary.sin)) if on else tensors[:2]
    order = sum("qkv".index(name) << (2 * i) for i, name in enumerate(on))
    blocks, count = forward_list(offsets, offsets, rows, BLOCK_SIZE)
    kernel[(min(num_sms(offsets.device), blocks.shape[0]),)](
        *(ragged_descriptor(x, BLOCK_SIZE) for x in (*tensors, *tables)), blocks, count, heads, scale, len(on), order,
        *rest, HEAD_DIM=head_dim, STAGES=config.stages, REGISTERS=config.registers, ROTARY=bool(on),
        INTERLEAVED=bool(on) and rotary.interleaved, ON_Q="q" in on, ON_K="k" in on, ON_V="v" in on, num_warps=4,
        num_stages=1,
    )  # fmt: skip


def forward_with(config, q, k, v, offsets, *, block_size, scale, rotary):
    """Block attention forward with an explicit `Config` (None: the default)."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel():  # a tensor without rows has no address that a descriptor could hold
        tensors = (packed_heads(q), packed_heads(k), packed_heads(v), o)
        config = config or _DEFAULT["fwd", q.shape[-1]]
        _launch(forward_kernel, config, tensors, offsets, block_size, scale, rotary)
    return o


def backward_with(config, do, q, k, v, offsets, *, block_size, scale, rotary, out=None):
    """Block attention backward with an explicit `Config` (None: the default). out: where dq, dk, dv go."""
    dq, dk, dv = out or [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    if any(packed_heads(x) is not x for x in (dq, dk, dv)):
        raise ValueError("block_attention: impl 'tlx' out has strides that TMA cannot write; allowed: packed heads")
    if dq.numel():
        tensors = (*(packed_heads(x) for x in (q, k, v, do)), dq, dk, dv)
        config = config or _DEFAULT["bwd", q.shape[-1]]
        _launch(backward_kernel, config, tensors, offsets, block_size, scale, rotary, 2)
    return dq, dk, dv


def forward(q, k, v, offsets, *, block_size, scale, rotary):
    """o = softmax(scale q kT) v inside blocks of 64 rows counted from each sequence's start.

    q, k, v [T, H, D] bfloat16 or float16, D 64 or 128; copied when their heads are not packed behind each other.
    rotary: None or Rotary(cos, sin [T, D/2] float32). Rows past offsets[-1] are zeros. ValueError: another block_size.
    """
    return forward_with(None, q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary)


def backward(do, q, k, v, o, offsets, *, block_size, scale, rotary, out=None):
    """(dq, dk, dv) in the inputs' types. o is not needed: D is formed from the block's own weights."""
    return backward_with(None, do, q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary, out=out)


def _unsupported(case: Case) -> str | None:
    if "block_size" in case.features:
        return f"needs block_size {BLOCK_SIZE}"
    return hopper_only(case)


IMPLEMENTATION = Implementation("tlx", forward, backward, _unsupported)
