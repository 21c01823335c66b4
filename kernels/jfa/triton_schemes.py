"""Backward of jagged softmax attention by named schemes, so that their costs can be compared.

The source tried four and kept a split one; each is here, with one more (owner):

- atomic:    parallel over key tiles; dQ by float32 atomics, or added by the copy engine. Not reproducible bit for bit.
- serial:    one program a (sequence, head); dQ by load, add, store into a zeroed float32 buffer, cast afterwards.
- recompute: one launch, parallel over query tiles and key tiles; scores computed in both.
- split:     two kernels, dQ (which also makes delta) and dK, dV; scores computed in both.
- owner:     serial without its extra passes: longest first, the first key tile starts dQ, the last one writes it.

GEMMS counts products of a (query tile, key tile) pair that the scheme really does; the FLOP convention counts 5.
"""

from __future__ import annotations

import torch
import triton

from .. import triton_common as common
from . import configs
from . import triton_backward as kernels
from .triton_forward import TIME, bias_arguments, check_scale, query_rows

GEMMS = {"atomic": 5, "serial": 5, "recompute": 7, "split": 7, "owner": 5}
SCHEMES = tuple(GEMMS)
ADDS = {"atomics": 1, "reduce": 4}  # how the atomic scheme adds to dQ, and the kernel's number of it


def unsupported(scheme: str, *, window: bool, bias: bool) -> str | None:
    """Why `scheme` cannot run such a call, or None."""
    if scheme not in GEMMS:
        return f"unknown scheme {scheme!r}; allowed: {', '.join(SCHEMES)}"
    if bias and scheme not in ("split", "recompute"):
        return f"scheme {scheme!r} has no gradient of the bias table; allowed: split, recompute"
    if window and scheme == "owner":
        return "scheme 'owner' has no window (its first key tile would have to see every query); allowed: the others"
    return None


class _Call:
    """Shapes, strides and buffers of one backward call, in the order in which the kernels take them."""

    def __init__(self, do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, bias, tma=None):
        self.heads, self.head_dim = q.shape[1], q.shape[2]
        self.shared = q_offsets is None
        self.offsets, self.rows = query_rows(q, q_offsets, kv_offsets)
        self.kv_offsets, self.batch = kv_offsets, kv_offsets.numel() - 1
        if do.dtype != q.dtype or do.stride(-1) != 1:
            do = do.to(q.dtype).contiguous()
        self.do, self.o = (x.reshape(self.rows, self.heads, self.head_dim) for x in (do, o))
        self.q, self.k, self.v, self.lse, self.scale = q, k, v, lse, scale
        self.kind, self.table, self.times, self.buckets = bias_arguments(bias, q.device)
        self.dtable = torch.zeros_like(self.table) if bias is not None else self.table
        self.window = window
        # A shared query's gradient is summed over the sequences, so its parts stay in float32 until then.
        dq_type = torch.float32 if self.shared else q.dtype
        self.dq = torch.empty((self.rows, self.heads, self.head_dim), dtype=dq_type, device=q.device)
        self.dk = torch.empty(k.shape, dtype=k.dtype, device=q.device)
        self.dv = torch.empty(v.shape, dtype=v.dtype, device=q.device)
        self.delta = torch.empty_like(lse)
        # One answer for both kernels: a sequence's bits must not depend on which of its tensors is aligned.
        self.tma = all(common.describable(x) for x in (q, k, v, self.do)) if tma is None else tma

    def flags(self, phase: str, *, tail: bool = True, tma: bool | None = None) -> dict:
        c = configs.select(phase, self.head_dim, self.q.dtype)
        flags = {
            "HEAD_DIM": self.head_dim, "BLOCK_D": configs.head_dim_class(self.head_dim), "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "SHARED_Q": self.shared, "WINDOW": self.window is not None, "BIAS": self.kind,
            "PRECISION": common.precision_of(self.q.dtype), "num_warps": c.num_warps, "num_stages": c.num_stages,
        }  # fmt: skip
        if tail:
            flags["TAIL_N"] = c.block_n if tma else c.tail  # a descriptor reads boxes of one size
        return flags if tma is None else flags | {"TMA": tma}

    @property
    def bias(self) -> tuple:
        return self.table, self.times

    @property
    def offset_strides(self) -> tuple:
        return self.offsets.stride(0), self.kv_offsets.stride(0), int(self.kind == TIME)

    @property
    def sizes(self) -> tuple:
        return self.heads, self.rows, self.buckets, 0 if self.window is None else self.window

    @property
    def strides(self) -> tuple:
        return *self.q.stride()[:2], *self.k.stride()[:2], *self.v.stride()[:2]

    @property
    def scales(self) -> tuple:
        return self.scale, self.scale * common.LOG2E

    def make_delta(self) -> None:
        block = 32
        kernels.delta_kernel[(triton.cdiv(self.rows, block) * self.heads,)](
            self.o, self.do, self.delta, self.rows, self.heads, *self.o.stride()[:2], *self.do.stride()[:2],
            HEAD_DIM=self.head_dim, BLOCK_D=configs.head_dim_class(self.head_dim), BLOCK=block, num_warps=4,
        )  # fmt: skip

    def query_side(self) -> None:
        flags = self.flags("dq_tma" if self.tma else "dq", tma=self.tma)
        tiles, count, bound = common.tile_list(self.offsets, self.rows, flags["BLOCK_M"])
        _, k, v = common.descriptors(self.tma, flags["BLOCK_N"], self.k, self.v)
        kernels.dq_kernel[(bound * self.heads,)](
            self.q, k, v, self.o, self.do, self.dq, self.lse, self.delta, tiles, count, self.offsets,
            self.kv_offsets,
            *self.bias, self.dtable, *self.offset_strides, self.batch, self.rows, *self.sizes, *self.strides,
            *self.o.stride()[:2], *self.do.stride()[:2], *self.dq.stride()[:2], *self.scales, **flags,
        )  # fmt: skip

    def key_side(self, dq_mode: int, scratch: torch.Tensor) -> None:
        """dk, dv by key tile. dq_mode 0: dq is made elsewhere. 1: added to `scratch` by atomics; 4: so by TMA."""
        phase = "dkdv" if dq_mode == 0 else "atomic"
        flags = self.flags(f"{phase}_tma" if self.tma else phase, tail=False, tma=self.tma)
        total = self.k.shape[0]
        tiles, count, bound = common.tile_list(self.kv_offsets, total, flags["BLOCK_N"])
        _, q, do = common.descriptors(self.tma, flags["BLOCK_M"], self.q, self.do)
        _, target = common.descriptors(dq_mode == 4, flags["BLOCK_M"], scratch)
        kernels.dkdv_kernel[(bound * self.heads,)](
            q, self.k, self.v, do, self.dq, target, self.dk, self.dv, self.lse, self.delta, tiles, count,
            self.offsets,
            self.kv_offsets, *self.bias, *self.offset_strides, self.batch, total, *self.sizes, *self.strides,
            *self.do.stride()[:2], *self.dq.stride()[:2], *scratch.stride()[:2], *self.dk.stride()[:2], *self.scales,
            DQ=dq_mode, **flags,
        )  # fmt: skip

    def both_sides(self) -> None:
        flags = self.flags("fused")
        total = self.k.shape[0]
        q_tiles, q_count, q_bound = common.tile_list(self.offsets, self.rows, flags["BLOCK_M"])
        kv_tiles, kv_count, kv_bound = common.tile_list(self.kv_offsets, total, flags["BLOCK_N"])
        kernels.fused_kernel[((q_bound + kv_bound) * self.heads,)](
            self.q, self.k, self.v, self.o, self.do, self.dq, self.dk, self.dv, self.lse, self.delta, q_tiles,
            q_count, kv_tiles,
            kv_count, self.offsets, self.kv_offsets, *self.bias, self.dtable, *self.offset_strides, self.batch,
            self.rows, total,
            q_bound, *self.sizes, *self.strides, *self.o.stride()[:2], *self.do.stride()[:2], *self.dq.stride()[:2],
            *self.dk.stride()[:2], *self.scales, **flags,
        )  # fmt: skip

    def owners(self, dq_mode: int, scratch: torch.Tensor, order: torch.Tensor) -> None:
        total = self.k.shape[0]
        kernels.owner_kernel[((self.batch + 1) * self.heads,)](
            self.q, self.k, self.v, self.do, self.dq, scratch, self.dk, self.dv, self.lse, self.delta, order,
            self.offsets,
            self.kv_offsets, *self.bias, *self.offset_strides, self.batch, self.rows, total, *self.sizes, *self.strides,
            *self.do.stride()[:2], *self.dq.stride()[:2], *scratch.stride()[:2], *self.dk.stride()[:2], *self.scales,
            DQ=dq_mode, **self.flags("owner", tail=False),
        )  # fmt: skip

    def scratch(self, *, zeroed: bool) -> torch.Tensor:
        make = torch.zeros if zeroed else torch.empty
        return make(self.dq.shape, dtype=torch.float32, device=self.dq.device)

    def longest_first(self) -> torch.Tensor:
        """Sequences by falling work, the rest past the end last; on the device."""
        work = self.offsets.diff().long() * self.kv_offsets.diff().long()
        rest = torch.full((1,), self.batch, dtype=torch.int64, device=work.device)
        return torch.cat([torch.argsort(work, descending=True, stable=True), rest])


def backward(
    do, q, k, v, o, lse, q_offsets, kv_offsets, *, scale, window, bias, max_q_len=None, max_kv_len=None, schedule=None,
    scheme="split", tma=None, add=None,
):  # fmt: skip
    """(dq, dk, dv, gradient of bias.table or None) by the named scheme; other arguments as in `api.py`.

    tma (split and atomic): read what the loops pass over by descriptors, by loads (False), or as can be (None). add:
    how atomic adds to dQ, "atomics" or the copy engine's "reduce" (with descriptors only; the default there).
    """
    reason = unsupported(scheme, window=window is not None, bias=bias is not None)
    if reason is not None:
        raise ValueError(f"jagged_attention backward: {reason}")
    check_scale(scale)
    if add not in (None, *ADDS):
        raise ValueError(f"jagged_attention backward: add {add!r}; allowed: {', '.join(ADDS)}")
    call = _Call(do, q, k, v, o, lse, q_offsets, kv_offsets, scale, window, bias, tma)
    empty = call.heads == 0 or (call.rows == 0 and k.shape[0] == 0)
    if empty:
        dq = call.dq
    elif scheme == "split":
        call.query_side()
        call.key_side(0, call.dq)
        dq = call.dq
    else:
        if call.rows:
            call.make_delta()
        if scheme == "recompute":
            call.both_sides()
            dq = call.dq
        elif scheme == "owner":
            call.owners(3, call.scratch(zeroed=False), call.longest_first())
            dq = call.dq
        else:
            dq = call.scratch(zeroed=True)
            if scheme == "atomic":
                call.key_side(ADDS[add or "reduce"] if call.tma else 1, dq)
            else:
                call.owners(2, dq, torch.arange(call.batch + 1, device=q.device))
    if call.shared:
        dq = dq.view(call.batch, *q.shape).sum(0)
    dtable = None if bias is None else call.dtable.view(bias.table.shape).to(bias.table.dtype)
    return dq.to(q.dtype), call.dk, call.dv, dtable
