"""All-gather of quantised shards: a weight's local shard becomes 8-bit before FSDP gathers it, so that fewer bytes
travel and no rank quantises another's rows.

The source quantises each FSDP shard before the all-gather and gathers low-precision payloads. Here a weight is wrapped
in `LowGather`, a tensor whose two hooks FSDP2 calls around its all-gather: `fsdp_pre_all_gather` gives the bytes to
send, `fsdp_post_all_gather` makes the weight from everybody's bytes. The master weight, its gradient and the
optimiser's states stay in full precision on their shard; only what travels is low.

Shards are quantised once a step, right behind the optimiser (`prequantise`): forward and backward gathers then send
bytes that lie there already. Without it a gather quantises for itself.

scheme   bytes of a row of n features          scale
float8   n + 4                                 one float32 a row: largest magnitude over 448 (gem.parallel.fp8_rows)
mx       n + ceil(n / 32)                      one power of two for 32 features of a row (kernels.mxfp8)
bf16     2 n                                   for comparison: FSDP's own mixed precision, no wrapper
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from gem.parallel import fp8_rows
from gem.precision import join_shards, quantize_shard
from kernels.mxfp8 import Recipe

SCHEMES = ("float8", "mx")
MIN_FEATURES = 32  # a block of MX; below it scales cost as much as they save
MULTIPLE = 4  # bytes of a row, so that the scales behind the rows lie where a float32 may
RECIPE = Recipe("low_gather")
aten = torch.ops.aten
# What FSDP does to a parameter while it shards it, and what keeps it the same rows: the wrapper survives these.
KEPT = {
    aten.detach.default,
    aten.clone.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten._pin_memory.default,
}


class LowGather(torch.Tensor):
    """A weight [rows, features] that FSDP gathers in 8 bits. Any op but those of sharding sees the plain tensor."""

    @staticmethod
    def __new__(cls, plain: Tensor, scheme: str):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            layout=plain.layout,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )

    def __init__(self, plain: Tensor, scheme: str):
        self.plain, self.scheme = plain, scheme
        self.payload: Tensor | None = None  # what the next gathers send, as long as `plain` is not written to

    def __repr__(self) -> str:
        return f"LowGather({self.plain!r}, scheme={self.scheme!r})"

    def __tensor_flatten__(self):
        return ["plain"], {"scheme": self.scheme}

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return LowGather(inner["plain"], meta["scheme"])

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        schemes: set[str] = set()

        def unwrap(item: LowGather) -> Tensor:
            schemes.add(item.scheme)
            return item.plain

        plain_args, plain_kwargs = tree_map_only(LowGather, unwrap, (args, kwargs or {}))
        out = op(*plain_args, **plain_kwargs)
        if op not in KEPT:
            return out
        if op is aten.copy_.default:
            args[0].payload = None
            return args[0]
        return tree_map_only(Tensor, lambda item: LowGather(item, next(iter(schemes))), out)

    def quantised(self) -> Tensor:
        """The bytes of this shard, from its values now."""
        if self.scheme == "mx":
            return quantize_shard(self.plain.float(), RECIPE)
        return fp8_rows.to_message(self.plain)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy) -> tuple[tuple[Tensor, ...], Any]:
        """What this rank sends: one tensor of bytes (a shard group of one rank reads only the first)."""
        return (self.quantised() if self.payload is None else self.payload,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out: Tensor | None = None):
        """The whole weight in `param_dtype`, from what all ranks sent."""
        if out is not None:  # the same values again for the backward pass: autograd must not take it for a change
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                self._whole(all_gather_outputs[0], param_dtype, out)
            return None
        whole = self._whole(all_gather_outputs[0], param_dtype, None)
        return whole, (whole,)

    def _whole(self, payload: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        rows, features = self.shape
        if self.scheme == "float8":
            return fp8_rows.from_messages(payload, rows, features, dtype, out)
        if fp8_rows.runs_in_kernel(payload):
            return fp8_rows.from_mx_rows(payload, features, dtype, out)
        whole = join_shards(payload, features, RECIPE).dequantize().to(dtype)
        return whole if out is None else out.copy_(whole)


@torch.no_grad()
def prequantise(parameters: Iterable[Tensor]) -> None:
    """Quantise the shards of parameters that travel in 8 bits, for the gathers until the next call.

    Call it after every write to the shards: behind the optimiser's step, and when a checkpoint was read.
    """
    for parameter in parameters:
        shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        if isinstance(shard, LowGather):
            shard.payload = shard.quantised()


@dataclass(frozen=True)
class Change:
    """A parameter and why its gather stays as it was, or None where it is low."""

    name: str
    kept: str | None


def wrap(module: nn.Module, scheme: str, ranks: int, prefix: str = "") -> list[Change]:
    """Wrap the weights of the linear layers of `module` (not yet sharded) that `ranks` ranks will shard.

    A weight stays as it is when it has fewer than 32 features or a number of them that 4 does not divide, or rows that
    the ranks do not divide (a padded shard would need padded bytes). Returns what happened to each weight; ValueError
    for an unknown scheme.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"gather: {scheme!r}; allowed: {', '.join(SCHEMES)}, or the parameters' own dtype")
    changes = []
    for name, linear in module.named_modules():
        if not isinstance(linear, nn.Linear) or isinstance(linear.weight, DTensor):
            continue  # a unit inside has sharded it already
        rows, features = linear.weight.shape
        kept = None
        if features < MIN_FEATURES:
            kept = f"{features} features, fewer than {MIN_FEATURES}"
        elif features % MULTIPLE:
            kept = f"{features} features, not a multiple of {MULTIPLE}"
        elif rows % ranks:
            kept = f"{rows} rows do not divide over {ranks} ranks"
        changes.append(Change(f"{prefix}{name}.weight", kept))
        if kept is None:
            linear.weight = nn.Parameter(LowGather(linear.weight.data, scheme), linear.weight.requires_grad)
    return changes


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a wrapper holds: same storage."""
    return tensor.plain if isinstance(tensor, LowGather) else tensor
