"""Precision applied from outside: which modules change, that training works, shards quantised before a gather."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gem import precision
from gem.precision import MXLinear, Rules
from kernels import mxfp8
from kernels.mxfp8 import RECIPES


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.precision = None
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x, offsets):
        q, k, v = self.qkv(x).unflatten(-1, (3, 1, -1)).unbind(-3)
        if self.precision is None:
            return mxfp8.jagged_attention_mx(q, k, v, offsets, recipe=mxfp8.Recipe(attention=())).flatten(-2)
        return mxfp8.jagged_attention_mx(q, k, v, offsets, recipe=self.precision).flatten(-2)


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention, self.up, self.gate = Attention(width), nn.Linear(width, width), nn.Linear(width, 1, bias=False)

    def forward(self, x, offsets):
        x = x + self.attention(x, offsets)
        return x + self.up(x) * self.gate(x)


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(40, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 64)

    def forward(self, x, offsets):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x, offsets)
        return self.head(x)


OFFSETS = torch.tensor([0, 30, 30, 41])
X = torch.randn(41, 40, generator=torch.Generator().manual_seed(1))


def config(where: str, recipe: str, format: str = "mx"):
    return SimpleNamespace(
        toggles=SimpleNamespace(precision=where, mx_recipe=recipe), implementations=SimpleNamespace(precision=format)
    )


def low_linears(model) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, MXLinear)}


def low_attention(model) -> set[str]:
    return {name for name, module in model.named_modules() if getattr(module, "precision", None) is not None}


def names(last: int, what: str) -> set[str]:
    kinds = ("attention.qkv", "up") if what == "linears" else ("attention",)
    return {f"layers.{i}.{kind}" for i in range(last) for kind in kinds}


@pytest.mark.parametrize(
    ("where", "recipe", "linears", "attention"),
    [
        ("bf16", "none", 0, 0),
        ("mx_mlp", "rceil", 3, 0),
        ("mx_attention", "rceil", 0, 3),
        ("mx_full", "naive", 3, 3),
        ("mx_full", "late_bf16", 2, 2),
        ("mx_full", "full", 2, 2),
    ],
)
def test_the_row_says_what_changes(where, recipe, linears, attention):
    model = Model()
    changes = precision.apply(model, config(where, recipe))
    assert low_linears(model) == names(linears, "linears")
    assert low_attention(model) == names(attention, "attention")
    assert {c.name for c in changes if c.kept is None} == low_linears(model) | low_attention(model)
    assert all(module.recipe == RECIPES[recipe] for module in model.modules() if isinstance(module, MXLinear))
    kept = {c.name: c.kept for c in changes if c.kept is not None and c.kind == "linear"}
    if linears:
        assert {"embed", "head", "layers.0.gate"} <= set(kept) and "32 x 1 features" in kept["layers.0.gate"]


def test_parameters_and_state_stay_the_same():
    model, plain = Model(), Model()
    before = dict(model.named_parameters())
    precision.apply(model, config("mx_full", "rceil"))
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert not any(p.is_meta for p in model.parameters())
    model.load_state_dict(plain.state_dict())
    assert "recipe=rceil" in repr(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_output_and_gradients_are_close_and_not_equal(recipe):
    model, plain = Model(), Model()
    precision.apply(model, config("mx_full", recipe))
    results = []
    for each in (model, plain):
        out = each(X, OFFSETS)
        out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in each.parameters())])
    for ours, right in zip(*results, strict=True):
        assert (ours - right).norm() < 0.12 * right.norm()
    assert not torch.equal(results[0][0], results[1][0])


def test_training_lowers_the_loss():
    model = Model()
    precision.apply(model, config("mx_full", "full"))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    target = torch.randn(41, 64, generator=torch.Generator().manual_seed(2))
    losses = []
    for _ in range(25):
        loss = (model(X, OFFSETS) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_rules_choose_by_name_and_size():
    model = Model()
    rules = Rules(include=("layers.*", "head"), exclude=("*.qkv",), min_features=1)
    precision.apply_recipe(model, RECIPES["rceil"], attention=False, rules=rules)
    assert low_linears(model) == {f"layers.{i}.{name}" for i in range(3) for name in ("up", "gate")} | {"head"}


def test_a_shared_module_stays_shared():
    model = Model()
    model.layers[1].up = model.layers[0].up
    precision.apply(model, config("mx_mlp", "rceil"))
    assert model.layers[1].up is model.layers[0].up and isinstance(model.layers[0].up, MXLinear)


def test_layers_compile_whole():
    model = Model(depth=1)
    precision.apply(model, config("mx_full", "rceil"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(X, OFFSETS), model(X, OFFSETS))


def test_nothing_to_change_is_an_error():
    with pytest.raises(ValueError, match=r"skip_last: 1, but the model has 1 layers"):
        precision.apply(Model(depth=1), config("mx_full", "late_bf16"))
    with pytest.raises(ValueError, match=r"no linear module to run in MX.*fewer than 32"):
        precision.apply(Model(width=16), config("mx_mlp", "rceil"))
    with pytest.raises(ValueError, match=r"no attention module to run in MX \(the model has none"):
        precision.apply(nn.Sequential(nn.Linear(32, 32)), config("mx_attention", "rceil"))
    with pytest.raises(ValueError, match="precision: 'fp8'"):
        precision.apply(Model(), config("fp8", "rceil"))
    with pytest.raises(ValueError, match="recipe: unknown name 'none'"):
        precision.apply(Model(), config("mx_full", "none"))


@pytest.mark.parametrize("features", [64, 40])
def test_shards_quantised_before_the_gather_equal_the_whole(features):
    weight, recipe = torch.randn(48, features, generator=torch.Generator().manual_seed(3)), RECIPES["rceil"]
    payload = torch.cat([precision.quantize_shard(shard, recipe) for shard in weight.split(13)])
    whole, joined = mxfp8.quantize(weight), precision.join_shards(payload, features, recipe)
    assert torch.equal(joined.data.view(torch.uint8), whole.data.view(torch.uint8))
    assert torch.equal(joined.scale, whole.scale) and torch.equal(joined.dequantize(), whole.dequantize())
    assert payload.numel() == 48 * (features + 2) < 48 * features * 2
    with pytest.raises(ValueError, match="payload"):
        precision.join_shards(payload[:, 1:], features, recipe)
    with pytest.raises(ValueError, match=r"recipe\.block"):
        precision.quantize_shard(weight, replace(recipe, block=(32, 32)))


class Sized(Attention):
    def __init__(self, width: int, kind: str | None, head_dim: int):
        super().__init__(width)
        self.kind, self.size = kind, SimpleNamespace(head_dim=head_dim)


def test_format_hopper_takes_what_its_kernels_run():
    model = Model(width=128, depth=2)
    model.layers[0].up, model.layers[0].attention = nn.Linear(128, 136), Sized(128, "block", 128)
    model.layers.insert(1, Layer(128))
    model.layers[1].attention = Sized(128, None, 64)
    changes = {change.name: change for change in precision.apply(model, config("mx_full", "rceil", "hopper"))}
    kept = {name: change.kept for name, change in changes.items() if change.kept is not None}
    assert "not multiples of 16" in kept["layers.0.up"] and "128 x 1 features" in kept["layers.2.gate"]
    assert "block attention" in kept["layers.0.attention"] and "heads of 64" in kept["layers.1.attention"]
    assert changes["layers.2.attention"].kept is None and changes["layers.2.up"].kept is None
    assert model.layers[2].up.recipe.format == model.layers[2].attention.precision.format == "hopper"


def test_format_hopper_trains_on_a_cpu():
    model, plain = Model(width=128, depth=2), Model(width=128, depth=2)
    precision.apply(model, config("mx_full", "wgrad_high", "hopper"))
    out, want = model(X, OFFSETS), plain(X, OFFSETS)
    assert not torch.equal(out, want) and float((out - want).norm() / want.norm()) < 0.1
    out.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.layers.parameters())
