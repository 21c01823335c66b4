"""Block attention on the GPU in stock Triton: one pass over 64-row blocks, rotary fused both ways.

The source's step from a sliding window to fixed aligned blocks: no partial windows, no loop over tiles, no
correction, no log-sum-exp and no separate pass for D; the rotary backward happens in the epilogue, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..registry import Case, Implementation
from ..triton_common import precision_of, tile_list
from .triton_kernels import backward_kernel, forward_kernel


@dataclass(frozen=True)
class Config:
    """heads: heads that one program takes in turn; num_stages > 1 fetches the next head early."""

    heads: int
    num_warps: int
    num_stages: int


PHASES = ("fwd", "bwd")
BLOCK_SIZES = (16, 32, 64, 128)
# Swept on an H200 (B = 1152, H = 4, D = 128, longest 2000, fill 0.7); TUNING.md has every outcome.
_DEFAULT = {("fwd", False): Config(4, 4, 1), ("fwd", True): Config(4, 4, 2),
            ("bwd", False): Config(4, 4, 1), ("bwd", True): Config(1, 4, 1)}  # fmt: skip
_CANDIDATES = {
    ("fwd", False): [(1, 4, 1), (2, 4, 1), (4, 4, 1), (4, 4, 2), (4, 4, 3), (1, 8, 1), (4, 8, 1), (4, 8, 2)],
    ("fwd", True): [(1, 4, 1), (4, 4, 1), (4, 4, 2), (2, 4, 2), (1, 8, 1), (4, 8, 1), (4, 8, 2)],
    ("bwd", False): [(1, 4, 1), (2, 4, 1), (4, 4, 1), (4, 4, 2), (1, 8, 1), (4, 8, 1), (4, 8, 2)],
    ("bwd", True): [(1, 4, 1), (4, 4, 1), (1, 8, 1), (2, 8, 1), (4, 8, 1), (4, 8, 2)],
}


def candidates(phase: str, head_dim: int, rotary: bool = False) -> list[Config]:
    """Configurations that a sweep tries for `phase` ("fwd", "bwd"), the default among them."""
    if phase not in PHASES:
        raise ValueError(f"phase: {phase!r}; allowed: {', '.join(PHASES)}")
    return [Config(*values) for values in _CANDIDATES[phase, rotary]]


def _constants(q, block_size, rotary, config):
    on = () if rotary is None else rotary.on
    layout = "none" if not on else "interleaved" if rotary.interleaved else "half"
    return {
        "ROTARY": layout, "ON_Q": "q" in on, "ON_K": "k" in on, "ON_V": "v" in on, "HEAD_DIM": q.shape[-1],
        "BLOCK_D": max(32, triton.next_power_of_2(q.shape[-1])), "BLOCK": block_size, "HEADS": config.heads,
        "STAGES": config.num_stages, "PRECISION": precision_of(q.dtype), "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }  # fmt: skip


def _config(phase, q, rotary):
    if q.dtype == torch.float32:
        return Config(1, 4, 1)
    return _DEFAULT[phase, rotary is not None]


def _launch(kernel, config, tensors, q, offsets, block_size, scale, rotary):
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"block_attention: impl 'triton' block_size {block_size}; allowed: {', '.join(map(str, BLOCK_SIZES))}"
        )
    cos, sin = (q, q) if rotary is None else (rotary.cos, rotary.sin)
    if rotary is not None and cos.stride(-1) != 1:
        cos = cos.contiguous()
    if rotary is not None and sin.stride(-1) != 1:
        sin = sin.contiguous()
    tiles, count, bound = tile_list(offsets, q.shape[0], block_size)
    groups = triton.cdiv(q.shape[1], config.heads)
    strides = [s for t in tensors for s in t.stride()[:2]]
    kernel[(bound * groups,)](
        *tensors, cos, sin, offsets, tiles, count, *strides, cos.stride(0), sin.stride(0), offsets.stride(0),
        offsets.numel() - 1, q.shape[0], q.shape[1], groups, scale, **_constants(q, block_size, rotary, config),
    )  # fmt: skip


def forward_with(config, q, k, v, offsets, *, block_size, scale, rotary):
    """Block attention forward with an explicit `Config` (None: the default)."""
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if o.numel():
        _launch(
            forward_kernel, config or _config("fwd", q, rotary), (q, k, v, o), q, offsets, block_size, scale, rotary
        )
    return o


def backward_with(config, do, q, k, v, offsets, *, block_size, scale, rotary, out=None):
    """Block attention backward with an explicit `Config` (None: the default). out: where dq, dk, dv go, strided."""
    dq, dk, dv = out or [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
    if dq.numel():
        tensors = (do, q, k, v, dq, dk, dv)
        _launch(backward_kernel, config or _config("bwd", q, rotary), tensors, q, offsets, block_size, scale, rotary)
    return dq, dk, dv


def forward(q, k, v, offsets, *, block_size, scale, rotary):
    """o = softmax(scale q kT) v inside blocks of `block_size` (16, 32, 64 or 128) rows counted from each sequence's
    start.

    q, k, v [T, H, D] bfloat16, float16 or float32, D even with rotary, last dimension contiguous. rotary: None or
    Rotary(cos, sin [T, D/2] float32). Rows past offsets[-1] are zeros.
    """
    return forward_with(None, q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary)


def backward(do, q, k, v, o, offsets, *, block_size, scale, rotary, out=None):
    """(dq, dk, dv) in the inputs' types. o is not needed: D is formed from the block's own weights."""
    return backward_with(None, do, q, k, v, offsets, block_size=block_size, scale=scale, rotary=rotary, out=out)


def unsupported(case: Case) -> str | None:
    """Why this implementation cannot run `case`, or None."""
    if case.device_type != "cuda" and isinstance(forward_kernel, triton.JITFunction):
        return f"needs a CUDA device, not {case.device_type}"
    if case.device_type == "cuda" and case.capability < (8, 0):
        return f"needs compute capability 8.0, not {case.capability[0]}.{case.capability[1]}"
    if case.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype {case.dtype}; allowed: bfloat16, float16, float32"
    if case.device_type != "cuda" and case.dtype == torch.bfloat16:
        return "bfloat16 products are wrong in Triton's interpreter"
    if case.head_dim > 256:
        return f"head_dim {case.head_dim}; allowed: up to 256"
    return None


IMPLEMENTATION = Implementation("triton", forward, backward, unsupported)
