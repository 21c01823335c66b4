"""Budgets of regions: what is kept and recomputed, the plan from measured points, and activations in fewer bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gem import checkpointing, regions, saved_activations, train
from gem.config import Checkpointing, SavedActivations
from gem.optim import Optimizers
from gem.regions import Point, plan, total_memory, total_time
from gem.train import Data
from tests.gem import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Data.open(tiny.dataset(tmp_path_factory.mktemp("checkpointing") / "d"))


def step(config, data, model=None):
    model = model or train.build(config, data, 0, CPU)
    optimizers = Optimizers(model, config, 4)
    loss, norm = train.train_step(model, optimizers, data.train.batch(np.arange(24)), config, 0, 0)
    return float(loss), float(norm)


def points_of(memory, times):
    """Points of regions r0, r1, .. at budgets 0, 0.5, 1 from nested lists."""
    return [
        Point(f"r{i}", budget, time, mem)
        for i, (mems, ts) in enumerate(zip(memory, times, strict=True))
        for budget, mem, time in zip((0.0, 0.5, 1.0), mems, ts, strict=True)
    ]


POSITIVE = st.floats(0.01, 10, allow_nan=False)
TABLE = st.lists(st.tuples(POSITIVE, POSITIVE, POSITIVE), min_size=3, max_size=3)


@given(TABLE, TABLE, st.floats(0, 1))
def test_a_plan_fits_and_no_uniform_budget_that_fits_is_faster(memory, times, share):
    points = points_of(memory, times)
    least = sum(min(row) for row in memory)
    limit = least + share * (sum(max(row) for row in memory) - least)
    chosen = plan(points, limit)
    assert set(chosen) == {"r0", "r1", "r2"}
    assert total_memory(points, chosen) <= limit * (1 + 1e-6)
    for level in (0.0, 0.5, 1.0):
        uniform = dict.fromkeys(chosen, level)
        if total_memory(points, uniform) <= limit:
            assert total_time(points, chosen) <= total_time(points, uniform) + 1e-9


@given(TABLE, TABLE, st.floats(0, 1))
def test_a_plan_is_one_step_short_of_the_best_at_most(memory, times, share):
    memory, times = [sorted(row) for row in memory], [sorted(row, reverse=True) for row in times]
    points = points_of(memory, times)
    limit = sum(row[0] for row in memory) + share * sum(row[-1] - row[0] for row in memory)
    fits = (
        total_time(points, dict(zip(("r0", "r1", "r2"), levels, strict=True)))
        for levels in itertools.product((0.0, 0.5, 1.0), repeat=3)
        if total_memory(points, dict(zip(("r0", "r1", "r2"), levels, strict=True))) <= limit
    )
    best, largest = min(fits), max(row[0] - row[-1] for row in times)
    assert best <= total_time(points, plan(points, limit)) + 1e-9 <= best + largest + 1e-6


def test_memory_goes_where_a_gigabyte_saves_the_most():
    points = [
        Point("cheap", 0.0, 10, 0),
        Point("cheap", 1.0, 9, 1),
        Point("dear", 0.0, 10, 0),
        Point("dear", 1.0, 2, 1),
    ]
    assert plan(points, 1.0) == {"cheap": 0.0, "dear": 1.0}
    assert plan(points, 2.0) == {"cheap": 1.0, "dear": 1.0}


def test_too_little_memory_is_an_error():
    with pytest.raises(ValueError, match=r"limit 0\.5 GiB; allowed: at least 1"):
        plan([Point("a", 0.0, 1, 1.0)], 0.5)


def test_regions_are_measured_and_recomputing_keeps_less(data):
    model = train.build(tiny.config(), data, 0, CPU)
    found = checkpointing.regions(model)
    steps = ("feed_forward", "attention", "pooler")
    assert [name for name in found if name.startswith("layer0.")] == [
        *(f"layer0.{event}_branch.{step}" for event in ("impression", "click") for step in steps), "layer0.interaction"
    ]  # fmt: skip
    forward = lambda: model(data.train.batch(np.arange(24)))  # noqa: E731
    points = regions.measure(model, forward, found, (0.0, 1.0), lambda m, b: checkpointing.set_budgets(m, b, "eager"))
    table = {(p.region, p.budget): p for p in points}
    assert len(table) == 2 * len(found)
    for name in found:
        assert table[name, 0.0].memory_gib < table[name, 1.0].memory_gib
        assert all(table[name, level].time_ms > 0 for level in (0.0, 1.0))
    assert all(value.grad is None for value in model.parameters())


@pytest.mark.parametrize("mode", ["uniform", "region"])
def test_a_budget_changes_memory_not_numbers(data, mode):
    plain = step(tiny.config(), data)
    assert step(tiny.config(checkpointing=mode), data) == plain


def test_a_region_plan_recomputes_some_regions_and_keeps_others(data, monkeypatch):
    def points(model, forward, found, levels, set_budgets):
        set_budgets(model, dict.fromkeys(found, levels[-1]))
        return [Point(n, b, 2 - b if "click" in n else 2 - 2 * b, b) for n in found for b in levels]

    monkeypatch.setattr(regions, "measure", points)
    calls = []
    original = checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda f, *a, **k: calls.append(f) or original(f, *a, **k))
    model = train.build(tiny.config(checkpointing="region"), data, 0, CPU)
    step(tiny.config(checkpointing="region"), data, model)
    recomputed = len(calls)
    assert 0 < recomputed < len(checkpointing.regions(model))
    again = train.build(tiny.config(checkpointing="region", train={"checkpoint_budget": 1.0}), data, 0, CPU)
    calls.clear()
    step(tiny.config(), data, again)
    assert not calls


def test_the_partitioner_keeps_less_within_a_smaller_budget(data):
    """Compiled regions: the budget reaches the partitioner, numbers stay."""
    kept, results = {}, {}
    for budget in (0.0, 1.0):
        model = train.build(tiny.config(), data, 0, CPU)
        found = {"layer0.interaction": checkpointing.regions(model)["layer0.interaction"]}
        forward = lambda model=model: model(data.train.batch(np.arange(24)))  # noqa: E731
        points = regions.measure(
            model, forward, found, (budget,), lambda m, b: checkpointing.set_budgets(m, b, "aot_eager")
        )
        kept[budget] = points[0].memory_gib
        results[budget] = step(tiny.config(), data, model)
    assert kept[0.0] < kept[1.0]
    assert results[0.0] == pytest.approx(results[1.0], rel=1e-5)


def test_unknown_regions_and_budgets_are_errors(data):
    model = train.build(tiny.config(), data, 0, CPU)
    with pytest.raises(ValueError, match=r"unknown region 'layer9'; allowed: layer0\.impression_branch\.feed_forward"):
        checkpointing.set_budgets(model, {"layer9": 1.0}, "eager")
    with pytest.raises(ValueError, match=r"budget 1\.5 of region layer0\.interaction; allowed"):
        checkpointing.set_budgets(model, {"layer0.interaction": 1.5}, "eager")
    with pytest.raises(ValueError, match="region needs a forward pass"):
        checkpointing.apply(model, Checkpointing.REGION)
    with pytest.raises(ValueError, match="checkpoint_budget: 2"):
        tiny.config(train={"checkpoint_budget": 2})
    with pytest.raises(ValueError, match="unknown format 'int8'; allowed: fp8, mx4"):
        saved_activations.quantised(model, "int8")


def test_mx4_is_nearest_of_the_sixteen_values():
    codes = torch.tensor([*saved_activations.E2M1, *(-x for x in saved_activations.E2M1)])
    rows = torch.cat((codes, codes))[None] * 2.0**5  # on the grid, one block: exact
    assert torch.equal(saved_activations.unpack_mx4(saved_activations.pack_mx4(rows)), rows)
    values = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))  # a partial last block
    back = saved_activations.unpack_mx4(saved_activations.pack_mx4(values))
    assert back.shape == values.shape
    blocks = [values[:, :32], values[:, 32:]]
    for block, ours in zip(blocks, (back[:, :32], back[:, 32:]), strict=True):
        scale = 2.0 ** (torch.floor(torch.log2(block.abs().amax(1))) - 2)[:, None]
        grid = scale[..., None] * codes
        nearest = grid.sub(block[..., None]).abs().amin(-1)
        assert torch.allclose((ours - block).abs(), nearest, atol=1e-6)
    bad = torch.full((1, 32), float("nan"))
    assert saved_activations.unpack_mx4(saved_activations.pack_mx4(bad)).isnan().all()
    assert not saved_activations.unpack_mx4(saved_activations.pack_mx4(torch.zeros(1, 32))).any()


@pytest.mark.parametrize(("kind", "bits", "error"), [("fp8", 8.25, 0.05), ("mx4", 4.25, 0.2)])
def test_saved_tensors_are_packed_once_and_come_back_close(kind, bits, error):
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1), requires_grad=True)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(weight.detach().clone())

        def forward(self, x):
            h = x * 1.0
            return (h * h).sum() + torch.nn.functional.linear(h, self.weight).square().sum()

    layer, packed = Layer(), []
    name = f"pack_{kind}"
    original = getattr(saved_activations, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_activations, name, lambda v: packed.append(original(v)) or packed[-1])
        out = saved_activations.quantised(layer, kind)(layer, x)
        (gradient,) = torch.autograd.grad(out, x)
    (exact,) = torch.autograd.grad(layer(x), x)
    assert torch.equal(out, layer(x))  # the forward is untouched
    assert len(packed) == 2  # h, saved by three operations, and the linear layer's output
    parts = [t for t in (*packed[0][:2],) if isinstance(t, torch.Tensor)] or [packed[0][0].data, packed[0][0].scale]
    assert sum(t.nbytes for t in parts) * 8 == bits * x.numel()
    relative = float((gradient - exact).norm() / exact.norm())
    assert 0 < relative < error


def test_a_stale_address_is_not_taken_for_a_tensor():
    """Two activations that lived one after the other at one address: each backward gets its own."""
    packed = []

    class Layer(torch.nn.Module):
        def forward(self, x):
            total = 0
            for factor in range(1, 6):
                h = x * factor
                total = total + (h * h).sum()
                del h
            return total

    x = torch.ones(64, 64, requires_grad=True)
    out = saved_activations.quantised(Layer(), "fp8")(Layer(), x)
    (gradient,) = torch.autograd.grad(out, x)
    assert torch.allclose(gradient, torch.full_like(x, 2 * (1 + 4 + 9 + 16 + 25)), rtol=0.05), packed


@pytest.mark.parametrize("value", ["fp8", "mx4"])
def test_a_model_trains_with_packed_activations(data, value, monkeypatch):
    monkeypatch.setattr(saved_activations, "MIN_ELEMENTS", 64)
    plain, packed = step(tiny.config(), data), step(tiny.config(saved_activations=value), data)
    assert packed[0] == plain[0]
    assert packed[1] != plain[1] and packed[1] == pytest.approx(plain[1], rel=0.25)
    assert SavedActivations(value) is tiny.config(saved_activations=value).toggles.saved_activations


@pytest.mark.parametrize("kind", saved_activations.FORMATS)
def test_row_statistics_of_a_norm_stay_exact(monkeypatch, kind):
    """The gradient of a norm is a small difference of large terms, and a rounded 1 / std loses it."""
    name, shapes = f"pack_{kind}", []
    original = getattr(saved_activations, name)
    monkeypatch.setattr(saved_activations, name, lambda x: shapes.append(tuple(x.shape)) or original(x))
    layer = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.GELU())
    run = saved_activations.quantised(layer, kind)
    x = torch.randn(8192, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    run(layer, x).square().sum().backward()
    assert shapes and (8192, 1) not in shapes
