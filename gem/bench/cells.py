"""Modules of the model alone: one module under one setting of the toggles that concern it, with inputs of real lengths.

A cell is what a layer's time is made of: the feed-forward, self-attention or pooling of one event type, the summary or
the experts. `COLUMNS` says which columns of variants.tsv a module feels; all other columns are those of
`baseline_varlen`, so that many variants share a cell and each is timed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import nn

from gem import compile as compilation
from gem import config as configuration
from gem import train
from gem.attention import Events, rotary_tables
from gem.bench import parity, units
from gem.bench.batches import MemorySplit, schema_of
from gem.config import Config, SelfAttention
from gem.counts import Counts
from gem.embeddings import every
from gem.interaction import Interaction, Summary
from gem.sequence import PersonalisedFeedForward, Pooler, SelfAttentionBlock
from kernels.jagged import lengths_to_offsets, positions, remember

BASE = "baseline_varlen"
COLUMNS = {
    "feed_forward": ("gdpa_impl", "norm"),
    "self_attention": ("attention_impl", "self_attention", "rotary"),
    "pooling": ("attention_impl", "pooling"),
    "summary": (),
    "interaction": (),
}
PER_EVENT = ("feed_forward", "self_attention", "pooling")


@dataclass(frozen=True)
class Cell:
    """One module under one setting. columns: the columns that it feels, as (name, value)."""

    kind: str
    columns: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(kind: str, row: dict[str, str]) -> Cell:
        """The cell that a variant's module is."""
        return Cell(kind, tuple((name, row[name]) for name in COLUMNS[kind]))

    @property
    def name(self) -> str:
        return "-".join([self.kind, *(value for _, value in self.columns)])

    @cache  # noqa: B019 (cells are few, and asked again for each subset of toggles)
    def config(self, tier: str, preset: str | None) -> Config:
        """The configuration that the module is built from."""
        row = configuration.load_variants()[BASE] | dict(self.columns) | {"variant": self.name}
        return Config.from_variant(row, configuration.load_tier(tier), preset)

    def runs_as(self, config: Config) -> tuple[str, ...]:
        """What decides the code that runs, in this tier: cells that agree in it are one measurement."""
        impls, toggles = config.implementations, config.toggles
        if self.kind == "feed_forward":
            return (impls.gdpa, impls.norm if toggles.norm.value == "fused" else "separate")
        if self.kind == "self_attention":
            block = toggles.self_attention is SelfAttention.BLOCK
            impl = impls.block_attention if block else impls.attention
            return (toggles.self_attention.value, impl, toggles.rotary.value)
        if self.kind == "pooling":
            return (toggles.pooling.value, impls.attention)
        return ()

    def labels(self, config: Config) -> tuple[str, str]:
        """(subject, impl) of its records.

        The block attention that the source compares is Triton with its rotary apart and TLX with it inside: these two
        are plain "triton" and "tlx", any other pairing says so.
        """
        ran = self.runs_as(config)
        if self.kind == "feed_forward":
            return f"feed_forward_{config.toggles.norm.value}_norms", ran[0]
        if self.kind == "self_attention":
            usual = "fused" if ran[:2] == ("block", "tlx") else "separate"
            suffix = "" if ran[2] == usual else f":{ran[2]}_rotary"
            return f"self_attention_{ran[0]}", f"{ran[1]}{suffix}"
        if self.kind == "pooling":
            return f"pooling_{config.toggles.pooling.value}", ran[1]
        return self.kind, config.implementations.compile


@dataclass
class Built:
    """A module with inputs. run(): its outputs; inputs: leaves that take gradients; flops: forward and backward."""

    module: nn.Module
    call: Callable
    inputs: tuple
    flops: int


class Inputs:
    """Lengths of one batch and random activations over them, in the dtype in which layers exchange them."""

    def __init__(self, config: Config, lengths: dict[str, np.ndarray], device: torch.device, seed: int = 0):
        self.config, self.device = config, device
        self.lengths = {name: torch.from_numpy(value) for name, value in lengths.items()}
        self.batch = len(next(iter(lengths.values())))
        self.counts = Counts(self.batch, self.lengths)
        self.draws = torch.Generator(device).manual_seed(seed)
        self.dtype = getattr(torch, config.dtype)

    def rows(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.draws, device=self.device).to(self.dtype).requires_grad_()

    def tokens(self, count: int) -> torch.Tensor:
        return self.rows(self.batch, count, self.config.model.width)

    def events(self, index: int, name: str) -> Events:
        size, lengths = self.config.event_size(index), self.lengths[name]
        host = lengths_to_offsets(lengths, torch.int32)
        offsets = host.to(self.device)
        remember(offsets, host)
        total = int(host[-1])
        ages = 1e5 * torch.rand(total, generator=self.draws, device=self.device)
        cos, sin = rotary_tables(positions(offsets, total), ages, size.head_dim, self.config.model.time_scale)
        kv_offsets = every(self.config.model.num_kv, self.batch, self.device)
        return Events(self.rows(total, size.width), offsets, kv_offsets, None, cos, sin, int(lengths.max()))


def build(kind: str, config: Config, inputs: Inputs, event: int = 0) -> Built:
    """A module of its class, as `gem.model.Layer` makes it, uncompiled. event: index of the event type."""
    model = config.model
    names = list(inputs.lengths)
    with torch.device(inputs.device):
        if kind in PER_EVENT:
            size = config.event_size(event)
            made = {
                "feed_forward": PersonalisedFeedForward, "self_attention": SelfAttentionBlock, "pooling": Pooler
            }[kind](config, size)  # fmt: skip
            given = (inputs.events(event, names[event]),)
            if kind == "feed_forward":
                given += (inputs.tokens(model.num_summary),)
            flops = made.flops(inputs.counts, names[event])
        elif kind == "summary":
            made, given = Summary(model), (inputs.tokens(model.num_tokens),)
            flops = made.flops(inputs.counts)
        else:
            made = Interaction(model, len(names))
            pooled = [inputs.tokens(model.num_seeds) for _ in names]
            given = (inputs.tokens(model.num_tokens), inputs.tokens(model.num_summary), pooled)
            flops = made.flops(inputs.counts)
    return Built(made, made, given, 3 * flops)


def outputs_of(result) -> torch.Tensor:
    """The activation that a module returns."""
    return result.values if isinstance(result, Events) else result


def compiled(built: Built, config: Config) -> Built:
    """The same module under the tier's compiler."""
    backend = config.implementations.compile
    if backend == "eager":
        return built
    compilation.settle(2)
    compilation.compile_module(built.module, backend)
    return built


def problem(kind: str, built: Built, config: Config, data: dict, device: torch.device, event: int = 0):
    """(what is wrong or None, relative error) of a built module on a small batch, output and gradients, against the
    same mathematics in float32. The parameters are those of `built`."""
    split_lengths = small_lengths(data)
    found = {}
    for name, own in (("exact", "float32"), ("eager", config.dtype), ("mine", None)):
        use = config if own is None else parity.reference_of(config, own)
        # the same numbers in every precision: drawn in float32, rounded to the variant's dtype, then widened
        inputs = Inputs(dataclasses.replace(use, dtype=config.dtype), split_lengths, device, seed=3)
        if own is None:
            call, module = built.call, built.module
            given = build(kind, config, inputs, event).inputs
        else:
            other = build(kind, use, inputs, event)
            other.module.load_state_dict(built.module.state_dict())
            call, module, given = other.module, other.module, widened(other.inputs, getattr(torch, own))
        found[name] = evaluate(call, module, given, use, device)
    return parity.compare(found["mine"], [found["eager"]], found["exact"], config.dtype)


def small_lengths(data: dict) -> dict[str, np.ndarray]:
    schema = schema_of(data, parity.TABLE_ROWS)
    return {event.name: np.minimum(parity.LENGTHS, event.max_length).astype(np.int64) for event in schema.events}


def widened(inputs: tuple, dtype: torch.dtype) -> tuple:
    """Activations in another dtype; rotary tables and offsets stay."""

    def change(value):
        if isinstance(value, torch.Tensor):
            return value.detach().to(dtype).requires_grad_()
        if isinstance(value, Events):
            return value._replace(values=change(value.values))
        return [change(item) for item in value]

    return tuple(map(change, inputs))


def evaluate(call, module: nn.Module, inputs: tuple, config: Config, device: torch.device) -> dict[str, torch.Tensor]:
    """Output, gradients of inputs and of parameters, float32, for output gradients drawn from a fixed seed."""
    inputs = tuple(map(units.leaves, inputs))
    with train.autocast(config, device):
        output = outputs_of(call(*inputs))
    draws = torch.Generator(device).manual_seed(5)
    grad = torch.randn(output.shape, generator=draws, device=device).to(output.dtype)
    reached = [item for item in units.tensors(inputs) if item.requires_grad]
    named = dict(module.named_parameters())
    results = torch.autograd.grad(output, [*reached, *named.values()], grad, allow_unused=True)
    found = {"output": output.detach().float()}
    labels = [*(f"gradient of input {index}" for index in range(len(reached))), *(f"gradient of {n}" for n in named)]
    return found | {name: value.float() for name, value in zip(labels, results, strict=True) if value is not None}


def median_lengths(config: Config, data: dict, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Lengths of one batch of the tier's law: that of five whose number of events is the median."""
    split = MemorySplit(schema_of(data, parity.TABLE_ROWS), 5 * batch, data, seed)
    rows = split.sequence_lengths().reshape(5, batch)
    pick = int(np.argsort(rows.sum(1))[2])
    index = np.arange(pick * batch, (pick + 1) * batch)
    return {
        event.name: np.minimum(split.items[event.name].lengths[index], event.max_length).astype(np.int64)
        for event in split.schema.events
    }
