"""Low precision put on a model from outside: linear layers become MX linear layers, attention modules get their recipe.

The source runs only large GEMMs in low precision and leaves sensitive, later layers in bf16. So the rules are:
linears inside `model.layers` with at least `min_features` features on both sides become low; embeddings, feature
projections and heads stay as they are; the last `recipe.skip_last` layers stay as they are. A module that computes
attention declares it by an attribute `precision` (None = that of its inputs), which its forward hands to
`jagged_attention`, `gdpa` or `block_attention`. In format `hopper` that is the forward pass; the backward pass of
attention runs in the precision of its inputs, bf16, with the output and row sums of the 8-bit forward.

`quantize_shard` and `join_shards` are the source's rule for sharded weights: quantise the local shard before the
all-gather, so that the gather moves 8-bit payloads and no rank quantises another's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from kernels import mxfp8
from kernels.mxfp8 import MXTensor, Recipe


@dataclass(frozen=True)
class Rules:
    """Which linears become low: module names by shell patterns, and the least number of features in and out.

    32 is a whole block: below it a GEMM gains nothing from block scales. multiple: what both must be multiples of.
    """

    include: tuple[str, ...] = ("layers.*",)
    exclude: tuple[str, ...] = ()
    min_features: int = 32
    multiple: int = 1

    def why_kept(self, name: str, linear: nn.Linear) -> str | None:
        """Why a linear keeps its precision, or None."""
        if not any(fnmatchcase(name, pattern) for pattern in self.include):
            return f"name matches none of {', '.join(self.include)}"
        if any(fnmatchcase(name, pattern) for pattern in self.exclude):
            return f"name is excluded by {', '.join(self.exclude)}"
        if min(linear.in_features, linear.out_features) < self.min_features:
            return f"{linear.in_features} x {linear.out_features} features, fewer than {self.min_features}"
        if linear.in_features % self.multiple or linear.out_features % self.multiple:
            return f"{linear.in_features} x {linear.out_features} features, not multiples of {self.multiple}"
        return None


@dataclass(frozen=True)
class Change:
    """What happened to one module: kind "linear" or "attention"; kept = the reason it stays as it was, or None."""

    name: str
    kind: str
    kept: str | None


class MXLinear(nn.Linear):
    """nn.Linear whose GEMMs run by an MX recipe. Same parameters, same state_dict; quantised from them in every
    call."""

    def __init__(self, linear: nn.Linear, recipe: Recipe):
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        return mxfp8.linear(x, self.weight, self.bias, recipe=self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def apply(model: nn.Module, config) -> list[Change]:
    """Put the row's precision on a model: `config.toggles.precision` says where, `config.toggles.mx_recipe` how.

    bf16 changes nothing; mx_attention: attention; mx_mlp: linears; mx_full: both. config.implementations.precision says
    in which format: "mx" emulated, "hopper" real on that GPU. Call it before compiling,
    checkpointing and sharding. Returns what happened to each candidate.
    """
    where = str(config.toggles.precision)
    allowed = ("bf16", "mx_attention", "mx_mlp", "mx_full")
    if where not in allowed:
        raise ValueError(f"precision: {where!r}; allowed: {', '.join(allowed)}")
    if where == "bf16":
        return []
    recipe = mxfp8.get_recipe(str(config.toggles.mx_recipe))
    if config.implementations.precision == "hopper":
        recipe = recipe.on_hopper()
    return apply_recipe(
        model, recipe, linears=where in ("mx_mlp", "mx_full"), attention=where in ("mx_attention", "mx_full")
    )


def apply_recipe(
    model: nn.Module, recipe: Recipe, *, linears: bool = True, attention: bool = True, rules: Rules | None = None
) -> list[Change]:
    """Put `recipe` on the linears and / or attention modules of `model`, in place. A module reached by two names
    stays one.

    ValueError when nothing would change: a model without candidates, or a recipe that skips all layers. Format hopper
    keeps what its kernels cannot run: linears below 128 features or of sizes that 16 does not divide, attention in
    blocks or windows or with heads other than 128 wide.
    """
    hopper = recipe.format == "hopper"
    rules = Rules(min_features=128, multiple=16) if rules is None and hopper else rules or Rules()
    late = _late_layers(model, recipe.skip_last)
    changes: list[Change] = []
    done: dict[nn.Linear, MXLinear] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        skipped = f"one of the last {recipe.skip_last} layers" if name.startswith(late) else None
        if linears and isinstance(module, nn.Linear):
            kept = rules.why_kept(name, module) or skipped
            changes.append(Change(name, "linear", kept))
            if kept is None:
                parent, _, child = name.rpartition(".")
                low = done.setdefault(module, MXLinear(module, recipe))
                setattr(model.get_submodule(parent), child, low)
        elif attention and hasattr(module, "precision"):
            skipped = skipped or (_no_hopper_kernel(module) if hopper else None)
            changes.append(Change(name, "attention", skipped))
            if skipped is None:
                module.precision = recipe
    wanted = [kind for kind, on in (("linear", linears), ("attention", attention)) if on]
    for kind in wanted:
        if not any(change.kind == kind and change.kept is None for change in changes):
            reasons = "; ".join(f"{c.name}: {c.kept}" for c in changes if c.kind == kind) or "the model has none"
            raise ValueError(f"recipe {recipe.name!r}: no {kind} module to run in MX ({reasons})")
    return changes


def _no_hopper_kernel(module: nn.Module) -> str | None:
    """Why no 8-bit kernel computes an attention module, or None."""
    kind, size = getattr(module, "kind", None), getattr(module, "size", None)
    if kind is not None and str(kind) != "full":
        return f"no 8-bit kernel for {kind} attention"
    if size is not None and size.head_dim != 128:
        return f"heads of {size.head_dim}, and the 8-bit kernels have 128"
    return None


def _late_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """Name prefixes of the last `count` entries of model.layers."""
    if count == 0:
        return ()
    layers = getattr(model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) <= count:
        have = len(layers) if isinstance(layers, nn.ModuleList) else "no"
        raise ValueError(f"skip_last: {count}, but the model has {have} layers; allowed: fewer than its layers")
    return tuple(f"layers.{index}." for index in range(len(layers) - count, len(layers)))


def quantize_shard(shard: Tensor, recipe: Recipe) -> Tensor:
    """One rank's rows [rows, features] of a weight as bytes for an all-gather: elements, then scale codes; uint8
    [rows, n].

    Blocks lie along the features, so a row's bytes do not depend on how rows are sharded: n = features +
    ceil(features / 32), against 2 * features for bf16. Serves the forward GEMM; 32 x 32 blocks (recipe.block) would
    need shards of whole blocks and are a ValueError.
    """
    if recipe.block != (1, 32):
        raise ValueError(f"recipe.block: {recipe.block}; allowed: (1, 32) for row shards")
    q = mxfp8.quantize(shard, axis=-1, dtype=recipe.dtype("weight"), scale_mode=recipe.scale_mode)
    return torch.cat([q.data.view(torch.uint8), q.scale], 1)


def join_shards(payload: Tensor, features: int, recipe: Recipe) -> MXTensor:
    """The weight [rows, features] of the gathered payload (all ranks' rows one below another)."""
    blocks = -(-features // 32)
    if payload.dim() != 2 or payload.dtype != torch.uint8 or payload.shape[1] != features + blocks:
        raise ValueError(f"payload: {payload.dtype} {tuple(payload.shape)}; allowed: uint8 [rows, {features + blocks}]")
    data = payload[:, :features].contiguous().view(recipe.dtype("weight"))
    return MXTensor(data, payload[:, features:].contiguous(), axis=1, dims=(1,))
