"""Expert parallelism: the experts of a layer live on the ranks of an expert group, and activations travel to them.

The source's sequence: all-gather the expert's parameters over the ranks that shard them (FSDP does that), all-gather
activations over the expert group, run the local expert on the enlarged batch, reduce-scatter the outputs back to the
ranks whose samples they are; the backward mirrors it. There is no router: every sample visits every expert.

Rows may differ between ranks: samples of an uneven last batch, or events of a jagged tensor. They travel padded to the
longest rank and are packed again on arrival, so that neither results nor gradients know of the padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from gem.counts import Counts

# torch 2.13 renames both and warns of the old names
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# Names of the exchanges in a profile; FSDP names its own after the unit.
ACTIVATIONS, OUTPUTS = "experts::all_gather activations", "experts::reduce_scatter outputs"
OUTPUT_GRADIENTS, INPUT_GRADIENTS = "experts::all_gather output gradients", "experts::reduce_scatter input gradients"
SWAP, SWAP_GRADIENTS = "experts::all_to_all outputs", "experts::all_to_all output gradients"
COMBINES = ("reduce_scatter", "all_to_all")


def exchange_rows(rows: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Rows of every rank of the group. Reads a device tensor on the host; a trainer that knows the rows saves that."""
    found = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather(found, torch.tensor([rows], device=device), group=group)
    return found.tolist()


def _gather(x: Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> Tensor:
    """All ranks' rows one below another: [rows of this rank, ...] -> [sum of rows, ...]."""
    longest = max(rows)
    padded = x.contiguous()
    if x.shape[0] < longest:
        padded = torch.cat((x, x.new_zeros(longest - x.shape[0], *x.shape[1:])))
    out = x.new_empty(longest * len(rows), *x.shape[1:])
    all_gather(out, padded, group=group)
    if min(rows) == longest:
        return out
    return torch.cat([part[:count] for part, count in zip(out.split(longest), rows, strict=True)])


def _reduce(x: Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> Tensor:
    """Sum over ranks of [sum of rows, ...], of which each keeps its own rows."""
    longest, own = max(rows), rows[dist.get_rank(group)]
    if min(rows) < longest:
        padded = x.new_zeros(len(rows), longest, *x.shape[1:])
        for place, part in zip(padded, x.split(list(rows)), strict=True):
            place[: len(part)] = part
        x = padded.flatten(0, 1)
    out = x.new_empty(longest, *x.shape[1:])
    reduce_scatter(out, x.contiguous(), group=group)
    return out[:own]


class GatherRows(torch.autograd.Function):
    """All-gather forward, reduce-scatter of the gradients backward."""

    @staticmethod
    def forward(ctx, x, group, rows):
        ctx.group, ctx.rows = group, rows
        with record_function(ACTIVATIONS):
            return _gather(x, group, rows)

    @staticmethod
    def backward(ctx, grad):
        with record_function(INPUT_GRADIENTS):
            return _reduce(grad, ctx.group, ctx.rows), None, None


class ReduceRows(torch.autograd.Function):
    """Reduce-scatter forward, all-gather of the gradients backward."""

    @staticmethod
    def forward(ctx, x, group, rows):
        ctx.group, ctx.rows = group, rows
        with record_function(OUTPUTS):
            return _reduce(x, group, rows)

    @staticmethod
    def backward(ctx, grad):
        with record_function(OUTPUT_GRADIENTS):
            return _gather(grad, ctx.group, ctx.rows), None, None


class SwapRows(torch.autograd.Function):
    """All-to-all: [sum of rows, t, w] of this rank's experts -> [own rows, ranks * t, w], and back for gradients."""

    @staticmethod
    def forward(ctx, x, group, rows):
        ctx.group, ctx.rows = group, rows
        own, ranks = rows[dist.get_rank(group)], len(rows)
        out = x.new_empty(ranks * own, *x.shape[1:])
        with record_function(SWAP):
            dist.all_to_all_single(out, x.contiguous(), [own] * ranks, list(rows), group=group)
        return out.unflatten(0, (ranks, own)).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx, grad):
        own, ranks = grad.shape[0], len(ctx.rows)
        sent = grad.unflatten(1, (ranks, grad.shape[1] // ranks)).transpose(0, 1).flatten(0, 1).contiguous()
        out = sent.new_empty(sum(ctx.rows), *sent.shape[1:])
        with record_function(SWAP_GRADIENTS):
            dist.all_to_all_single(out, sent, list(ctx.rows), [own] * ranks, group=ctx.group)
        return out, None, None


def gather_rows(x: Tensor, group: dist.ProcessGroup, rows: Sequence[int]) -> Tensor:
    """Rows of all ranks of `group`: [rows[rank], ...] -> [sum(rows), ...], differentiable (gradients are summed).

    rows: of every rank, the same list everywhere. ValueError if this rank's tensor has another number.
    """
    own = rows[dist.get_rank(group)]
    if x.shape[0] != own:
        raise ValueError(f"gather_rows: {x.shape[0]} rows here, the group expects {own}; allowed: rows that agree")
    return GatherRows.apply(x, group, tuple(rows))


class ExpertParallel(nn.Module):
    """Stands in for the ModuleList of a layer's experts and holds those of this rank, under their own numbers.

    Iterating yields one module, this one, which gives the tokens of all experts side by side; so the model's code and
    the names of its parameters stay what they are. rows: samples of every rank of the group in the coming step; None
    (the default) asks the group in each call.

    combine: "reduce_scatter" as in the source: outputs are put in their expert's place among zeros and summed.
    "all_to_all" sends each rank its own samples' outputs alone: the same values from 1 / ranks of the bytes, since
    experts own disjoint tokens here.
    """

    def __init__(self, experts: nn.ModuleList, group: dist.ProcessGroup, combine: str = "reduce_scatter"):
        super().__init__()
        if combine not in COMBINES:
            raise ValueError(f"expert parallelism: combine {combine!r}; allowed: {', '.join(COMBINES)}")
        self.group, self.combine = group, combine
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if len(experts) % self.ranks:
            raise ValueError(
                f"expert parallelism: {len(experts)} experts on {self.ranks} ranks; allowed: a number of ranks that "
                "divides the experts"
            )
        self.count = len(experts) // self.ranks
        first = self.rank * self.count
        for index in range(first, first + self.count):
            self.add_module(str(index), experts[index])
        self.rows: list[int] | None = None

    def __iter__(self) -> Iterator[ExpertParallel]:
        yield self

    def forward(self, tokens: Tensor) -> Tensor:
        """[rows of this rank, num_in, width] -> [rows of this rank, tokens of all experts, width]."""
        rows = self.rows or exchange_rows(tokens.shape[0], self.group, tokens.device)
        everyone = gather_rows(tokens, self.group, rows)
        own = torch.cat([expert(everyone) for expert in self.children()], 1)
        if self.combine == "all_to_all":
            return SwapRows.apply(own, self.group, tuple(rows))
        before, after = self.rank * own.shape[1], (self.ranks - 1 - self.rank) * own.shape[1]
        return ReduceRows.apply(nn.functional.pad(own, (0, 0, before, after)), self.group, tuple(rows))

    def flops(self, counts: Counts) -> int:
        """Forward FLOPs of this rank: its experts on the samples of its group (as many on every rank, counted so)."""
        return self.ranks * sum(expert.flops(counts) for expert in self.children())
