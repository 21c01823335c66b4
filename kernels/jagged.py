"""Jagged tensors: what offsets mean, how they are checked, and the operations between packed and padded form.

A jagged batch is `values [T, ...]` with `offsets [B + 1]`: sequence b owns rows offsets[b] .. offsets[b + 1] - 1. This
module is the one place for the conventions of the whole package:

- offsets are int32 or int64, strided or not, start at 0, never decrease, and end at or before T;
- rows past offsets[-1] belong to no sequence: they get exact zeros in every output and every gradient;
- empty sequences, an empty batch (offsets = [0]) and an empty T are ordinary input.

Bad offsets are a ValueError that names the index and the value. Offsets in host memory are checked on every call.
Offsets on a GPU are checked once per tensor object (and again after an in-place change), because reading them stops the
host until the device catches up; who made them from a host copy says so with `remember`, and nothing is read back.
Under torch.compile the same conditions become device-side assertions. KERNELS_CHECK=0 in the environment (for compiled
code: when it is traced) switches both off.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary

OFFSET_DTYPES = (torch.int32, torch.int64)
LENGTH_LAWS = ("full", "uniform", "lognormal", "longtail")


class _Known(NamedTuple):
    """Host copy of a GPU offsets tensor, kept while that tensor object lives, so that a value is fetched once."""

    version: int
    host: torch.Tensor
    checked: bool


_KNOWN: WeakIdKeyDictionary = WeakIdKeyDictionary()


def checks_enabled() -> bool:
    """Whether offsets that live on a GPU have their values checked: True unless KERNELS_CHECK=0."""
    return os.environ.get("KERNELS_CHECK", "1") != "0"


_checked_when_traced = torch.compiler.assume_constant_result(checks_enabled)


def _on_host(offsets: torch.Tensor) -> bool:
    return offsets.device.type == "cpu"


def check_offsets(
    offsets: torch.Tensor,
    name: str,
    total: int,
    *,
    device: torch.device | None = None,
    batch: int | None = None,
    max_len: int | None = None,
    max_len_name: str = "max_len",
    strict: bool = False,
) -> None:
    """Check offsets [B + 1] of a packed tensor with `total` rows; ValueError that names what is wrong, at which index.

    device: where the values live (None: not checked). batch: the B that a partner tensor implies. max_len: the caller's
    hint of the longest length; a smaller one than the truth is an error. strict: offsets[-1] must equal total, so
    that no spare rows exist past the end.

    Shape, dtype and device are always checked. Values are checked as the module's docstring says.
    """
    if not isinstance(offsets, torch.Tensor):
        raise ValueError(f"{name}: got {type(offsets).__name__}; allowed: a tensor of int32 or int64, shape (B + 1,)")
    if offsets.dtype not in OFFSET_DTYPES:
        raise ValueError(f"{name}: dtype {offsets.dtype}; allowed: torch.int32, torch.int64")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{name}: shape {tuple(offsets.shape)}; allowed: (B + 1,) with B >= 0")
    if device is not None and offsets.device != device:
        raise ValueError(f"{name}: on device {offsets.device}; allowed: {device}, the device of the values")
    if batch is not None and offsets.shape[0] != batch + 1:
        raise ValueError(f"{name}: {offsets.shape[0] - 1} sequences; allowed: {batch}, as in the other offsets")
    if torch.compiler.is_compiling():
        _assert_on_device(offsets, name, total, max_len, max_len_name, strict)
        return
    if not has_values(offsets):
        return
    if _on_host(offsets):
        host = offsets.detach()
        _check_order(host, name)
    else:
        known = _recall(offsets)
        if known is None or not known.checked:
            if not checks_enabled():
                return
            host = host_offsets(offsets)
            _check_order(host, name)
            _KNOWN[offsets] = _Known(_version(offsets), host, True)
        else:
            host = known.host
    last = int(host[-1])
    if last > total:
        index = int((host > total).nonzero()[0])
        raise ValueError(f"{name}: offsets[{index}] = {int(host[index])}; allowed: at most {total}, the number of rows")
    if strict and last != total:
        raise ValueError(f"{name}: offsets[{host.shape[0] - 1}] = {last}; allowed: {total}, the number of rows")
    if max_len is not None and host.shape[0] > 1 and (longest := int(host.diff().max())) > max_len:
        raise ValueError(
            f"{max_len_name}: {max_len}, but {name} holds a sequence of {longest} rows; allowed: >= {longest}"
        )


def _check_order(host: torch.Tensor, name: str) -> None:
    if int(host[0]) != 0:
        raise ValueError(f"{name}: offsets[0] = {int(host[0])}; allowed: 0")
    falls = host.diff() < 0
    if bool(falls.any()):
        index = int(falls.nonzero()[0]) + 1
        raise ValueError(
            f"{name}: offsets[{index}] = {int(host[index])} is below offsets[{index - 1}] = {int(host[index - 1])}; "
            "allowed: non-decreasing"
        )


def _version(offsets: torch.Tensor) -> int:
    return 0 if offsets.is_inference() else offsets._version


def _recall(offsets: torch.Tensor) -> _Known | None:
    known = _KNOWN.get(offsets)
    return known if known is not None and known.version == _version(offsets) else None


def remember(offsets: torch.Tensor, host: torch.Tensor) -> None:
    """Say what a GPU offsets tensor holds: `host`, the copy in host memory that it was made from.

    Checks and implementations that need the values on the host then use this copy and never wait for the device. It is
    trusted to be equal; a later in-place change of `offsets` makes it forgotten.
    """
    if not _on_host(offsets):
        _KNOWN[offsets] = _Known(_version(offsets), host, False)


def has_values(offsets: torch.Tensor) -> bool:
    """False for tensors without storage (fake or meta), whose lengths nobody can know."""
    return not isinstance(offsets, FakeTensor) and offsets.device.type != "meta"


def host_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """The offsets in host memory. For a GPU tensor the copy waits for the device once per tensor object."""
    if _on_host(offsets):
        return offsets.detach()
    known = _recall(offsets)
    if known is None:
        known = _Known(_version(offsets), offsets.detach().cpu(), False)
        _KNOWN[offsets] = known
    return known.host


def _assert_on_device(offsets, name, total, max_len, max_len_name, strict) -> None:
    """The value checks as asynchronous assertions, which torch.compile keeps in the graph."""
    if not _checked_when_traced():
        return
    torch._assert_async(offsets[0] == 0, f"{name}: offsets[0] is not 0")
    torch._assert_async(offsets[-1] <= total, f"{name}: offsets[-1] is past the number of rows")
    if strict:
        torch._assert_async(offsets[-1] == total, f"{name}: offsets[-1] is not the number of rows")
    if offsets.shape[0] > 1:
        lengths = offsets.diff()
        torch._assert_async((lengths >= 0).all(), f"{name}: offsets decrease")
        if max_len is not None:
            torch._assert_async((lengths <= max_len).all(), f"{max_len_name} is below the longest length of {name}")


def longest_length(offsets: torch.Tensor) -> int | None:
    """The longest length where known without waiting for a device (host or already fetched offsets), else None."""
    if torch.compiler.is_compiling() or not has_values(offsets):
        return None
    known = None if _on_host(offsets) else _recall(offsets)
    if known is None and not _on_host(offsets):
        return None
    host = offsets if known is None else known.host
    return int(host.diff().max()) if host.shape[0] > 1 else 0


def lengths_to_offsets(lengths: torch.Tensor, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Offsets [B + 1] of lengths [B]."""
    if dtype not in OFFSET_DTYPES:
        raise ValueError(f"dtype: {dtype}; allowed: torch.int32, torch.int64")
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=dtype, device=lengths.device)
    offsets[1:] = lengths.cumsum(0)
    return offsets


def offsets_to_lengths(offsets: torch.Tensor) -> torch.Tensor:
    """Lengths [B] of offsets [B + 1]."""
    return offsets.diff()


def row_ids(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Sequence of each row, int64 [total]; B for rows past the end. No device synchronisation."""
    rows = torch.arange(total, dtype=offsets.dtype, device=offsets.device)
    # not searchsorted(offsets[1:]): Inductor (torch 2.11, Triton) reads such a slice from its tensor's start
    return torch.searchsorted(offsets.contiguous(), rows, right=True) - 1


def positions(offsets: torch.Tensor, total: int) -> torch.Tensor:
    """Position of each row in its own sequence, int64 [total]; rows past the end count on from offsets[-1]."""
    rows = torch.arange(total, dtype=torch.int64, device=offsets.device)
    return rows - offsets.long()[row_ids(offsets, total)]


def zero_tail_(rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Zero, in place, the rows [T, ...] past offsets[-1]. No device synchronisation. Returns `rows`."""
    past = torch.arange(rows.shape[0], device=rows.device) >= offsets[-1]
    return rows.masked_fill_(past.view(-1, *[1] * (rows.dim() - 1)), 0)


def time_buckets(gaps: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Logarithmic bucket min(floor(log2(1 + |gap|)), num_buckets - 1) of time gaps, int64 of the same shape.

    Exact at the powers of two (the exponent is read, no logarithm is rounded). Gaps in any unit, integers below 2^53 or
    floats.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets: {num_buckets}; allowed: >= 1")
    exponent = torch.frexp(gaps.abs().double() + 1).exponent.long() - 1
    return exponent.clamp_(max=num_buckets - 1)


def sample_lengths(
    law: str,
    batch: int,
    max_len: int,
    fill: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Lengths int64 [batch] in 1..max_len drawn from a named law, on the CPU.

    full: all max_len. uniform: the public benchmark's law with mean fill * max_len (which that benchmark calls
    sparsity): integers uniform on [(2 fill - 1) max_len, max_len] for fill >= 0.5, on [1, 2 fill max_len] below, all
    max_len at 1. lognormal, longtail (the same): median 0.2 max_len, sigma 1, clipped; fill is not a parameter of it.
    """
    if law not in LENGTH_LAWS:
        raise ValueError(f"law: {law!r}; allowed: {', '.join(LENGTH_LAWS)}")
    if batch < 0 or max_len < 1:
        raise ValueError(f"batch, max_len: {batch}, {max_len}; allowed: batch >= 0, max_len >= 1")
    if fill is not None and not 0 < fill <= 1:
        raise ValueError(f"fill: {fill}; allowed: (0, 1]")
    if law == "full" or (law == "uniform" and fill == 1):
        return torch.full((batch,), max_len, dtype=torch.int64)
    if law == "uniform":
        if fill is None:
            raise ValueError("fill: missing; allowed: (0, 1] for law 'uniform'")
        low, high = ((2 * fill - 1) * max_len, max_len) if fill >= 0.5 else (1, 2 * fill * max_len)
        low = max(1, round(low))
        return torch.randint(low, max(low, round(high)) + 1, (batch,), generator=generator)
    draws = torch.randn(batch, generator=generator, dtype=torch.float64).exp() * (0.2 * max_len)
    return draws.round().long().clamp(1, max_len)


def pad(values: torch.Tensor, offsets: torch.Tensor, max_len: int, value: float = 0.0) -> torch.Tensor:
    """Packed rows [T, ...] to [B, max_len, ...], `value` where a sequence has no row. Differentiable.

    A sequence longer than max_len keeps its first max_len rows; the dropped rows get a gradient of exactly zero. No
    device synchronisation beyond the check of the offsets. Indices are 64-bit: B * max_len * row size may pass 2^31.
    """
    check_offsets(offsets, "offsets", values.shape[0], device=values.device)
    if isinstance(max_len, bool) or max_len < 0:
        raise ValueError(f"max_len: {max_len}; allowed: an integer >= 0")
    return _pad_op(values, offsets, max_len, float(value))


def unpad(padded: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    """[B, L, ...] to packed rows [total, ...]; rows past the end and rows at positions >= L are zeros. Differentiable.

    What lies in `padded` beyond a sequence's length is not read, and its gradient is exactly zero.
    """
    check_offsets(offsets, "offsets", total, device=padded.device, batch=padded.shape[0])
    return _unpad_op(padded, offsets, total)


def concatenate(
    a: torch.Tensor, a_offsets: torch.Tensor, b: torch.Tensor, b_offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Join two jagged tensors sequence by sequence: first the rows of a, then those of b. Differentiable in a and b.

    a [Ta, ...], b [Tb, ...] with the same B, dtype and row shape. Returns values [Ta + Tb, ...] and offsets [B + 1] in
    a's offset dtype; where a or b have spare rows past their ends, the result's spare rows are zeros.
    """
    check_offsets(a_offsets, "a_offsets", a.shape[0], device=a.device)
    check_offsets(b_offsets, "b_offsets", b.shape[0], device=b.device, batch=a_offsets.shape[0] - 1)
    if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"b: rows {tuple(b.shape[1:])} of {b.dtype} on {b.device}; "
            f"allowed: {tuple(a.shape[1:])} of {a.dtype} on {a.device}, as a"
        )
    return _concatenate_op(a, a_offsets, b, b_offsets), a_offsets + b_offsets.to(a_offsets.dtype)


def _broadcast(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.view(*mask.shape, *[1] * (like.dim() - mask.dim()))


@torch.library.custom_op("gem_kernels::pad", mutates_args=())
def _pad_op(values: torch.Tensor, offsets: torch.Tensor, max_len: int, value: float) -> torch.Tensor:
    column = torch.arange(max_len, device=values.device)
    shape = (offsets.shape[0] - 1, max_len, *values.shape[1:])
    if values.shape[0] == 0:
        return values.new_full(shape, value)
    rows = offsets[:-1, None].long() + column
    missing = column >= offsets.diff()[:, None]
    out = values.index_select(0, rows.clamp_(max=values.shape[0] - 1).flatten()).view(shape)
    return out.masked_fill_(_broadcast(missing, out), value)


@_pad_op.register_fake
def _(values, offsets, max_len, value):
    return values.new_empty((offsets.shape[0] - 1, max_len, *values.shape[1:]))


@torch.library.custom_op("gem_kernels::unpad", mutates_args=())
def _unpad_op(padded: torch.Tensor, offsets: torch.Tensor, total: int) -> torch.Tensor:
    batch, length = padded.shape[:2]
    if batch == 0 or length == 0:
        return padded.new_zeros(total, *padded.shape[2:])
    sequence, position = row_ids(offsets, total), positions(offsets, total)
    missing = (sequence == batch) | (position >= length)
    rows = sequence.clamp(max=batch - 1) * length + position.clamp(max=length - 1)
    out = padded.reshape(batch * length, *padded.shape[2:]).index_select(0, rows)
    return out.masked_fill_(_broadcast(missing, out), 0)


@_unpad_op.register_fake
def _(padded, offsets, total):
    return padded.new_empty((total, *padded.shape[2:]))


def _pad_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.total = inputs[0].shape[0]


def _unpad_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])
    ctx.length = inputs[0].shape[1]


# Each is the other's transpose, so that both gradients are gathers: no atomics and no rows left unwritten.
_pad_op.register_autograd(
    lambda ctx, grad: (_unpad_op(grad, ctx.saved_tensors[0], ctx.total), None, None, None), setup_context=_pad_context
)
_unpad_op.register_autograd(
    lambda ctx, grad: (_pad_op(grad, ctx.saved_tensors[0], ctx.length, 0.0), None, None), setup_context=_unpad_context
)


def _targets(own: torch.Tensor, other: torch.Tensor, own_total: int, total: int, second: bool) -> torch.Tensor:
    """Row of the joined tensor for each row of one part; `total` for rows past that part's end."""
    sequence = row_ids(own, own_total)
    ahead = other.long().roll(-1) if second else other.long()  # the second part also follows its own sequence's first
    target = torch.arange(own_total, device=own.device) + ahead[sequence]
    return torch.where(sequence == own.shape[0] - 1, total, target)


@torch.library.custom_op("gem_kernels::concatenate", mutates_args=())
def _concatenate_op(a: torch.Tensor, a_offsets: torch.Tensor, b: torch.Tensor, b_offsets: torch.Tensor) -> torch.Tensor:
    total = a.shape[0] + b.shape[0]
    out = a.new_zeros(total + 1, *a.shape[1:])  # the last row takes what belongs nowhere
    out.index_copy_(0, _targets(a_offsets, b_offsets, a.shape[0], total, False), a)
    out.index_copy_(0, _targets(b_offsets, a_offsets, b.shape[0], total, True), b)
    return out[:-1]


@_concatenate_op.register_fake
def _(a, a_offsets, b, b_offsets):
    return a.new_empty((a.shape[0] + b.shape[0], *a.shape[1:]))


@torch.library.custom_op("gem_kernels::split", mutates_args=())
def _split_op(
    joined: torch.Tensor, a_offsets: torch.Tensor, b_offsets: torch.Tensor, a_total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Transpose of concatenate: the rows of a and of b, zeros past their ends."""
    total = joined.shape[0]
    rows = torch.cat([joined, joined.new_zeros(1, *joined.shape[1:])])
    a_rows = _targets(a_offsets, b_offsets, a_total, total, False)
    b_rows = _targets(b_offsets, a_offsets, total - a_total, total, True)
    return rows.index_select(0, a_rows), rows.index_select(0, b_rows)


@_split_op.register_fake
def _(joined, a_offsets, b_offsets, a_total):
    rows = joined.shape[1:]
    return joined.new_empty((a_total, *rows)), joined.new_empty((joined.shape[0] - a_total, *rows))


def _concatenate_context(ctx, inputs, output):
    a, a_offsets, _, b_offsets = inputs
    ctx.save_for_backward(a_offsets, b_offsets)
    ctx.a_total = a.shape[0]


def _concatenate_backward(ctx, grad):
    a_offsets, b_offsets = ctx.saved_tensors
    da, db = _split_op(grad, a_offsets, b_offsets, ctx.a_total)
    return da, None, db, None


def _split_context(ctx, inputs, output):
    ctx.save_for_backward(inputs[1], inputs[2])


def _split_backward(ctx, da, db):
    a_offsets, b_offsets = ctx.saved_tensors
    return _concatenate_op(da, a_offsets, db, b_offsets), None, None, None


_concatenate_op.register_autograd(_concatenate_backward, setup_context=_concatenate_context)
_split_op.register_autograd(_split_backward, setup_context=_split_context)
