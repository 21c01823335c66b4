"""Every column of variants.tsv changes what runs: other operations, other numbers, or another order of samples.

`EFFECTS` says which. A column that changes the operations alone ("ops") is an implementation of the same mathematics:
it is there for time and memory, and the loss must not move. On a CPU the tiers map several values to one
implementation; what a value names on a GPU is checked in gpu.yaml, and that the name arrives is checked by naming
another implementation that runs here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gem import compile as compilation
from gem import config as configuration
from gem import train
from gem.config import TOGGLE_TYPES, Config, load_tier
from gem.optim import Optimizers
from gem.train import Data
from tests.gem import tiny

CPU = torch.device("cpu")
WIDE = dataclasses.replace(tiny.MODEL, width=32, table_dim=16, events=(configuration.EventSize(32, 2, 2, 3),))
MX = {"precision": "mx_full", "mx_recipe": "rceil"}
# column -> (what a flip changes, columns of the base row, values of the column)
EFFECTS = {
    "layout": ("ops", {}, {"jagged": {}, "padded": {"attention_impl": "padded"}}),
    "attention_impl": ("ops", {}, {"varlen": {}, "padded": {}}),
    "gdpa_impl": ("ops", {}, {"eager": {}, "triton": {}}),
    "self_attention": ("numbers", {}, {"full": {}, "window": {}, "block": {}}),
    "rotary": ("ops", {"self_attention": "block"}, {"separate": {}, "fused": {}}),
    "norm": ("ops", {}, {"separate": {}, "fused": {}}),
    "compskip": ("numbers", {}, {"off": {}, "on": {}}),
    "pooling": ("numbers", {}, {"pma": {}, "hsp": {}}),
    "sequence": ("numbers", {}, {"on": {}, "off": {}}),
    "precision": ("numbers", {}, {"bf16": {"mx_recipe": "none"}, **{
        name: {"mx_recipe": "rceil"} for name in ("mx_attention", "mx_mlp", "mx_full")}}),
    "mx_recipe": ("numbers", MX, {
        name: {} for name in ("naive", "rceil", "hadamard", "stochastic", "wgrad_high", "late_bf16", "full")}),
    "checkpointing": ("ops", {}, {"none": {}, "uniform": {}}),
    "saved_activations": ("numbers", {}, {"full": {}, "fp8": {}, "mx4": {}}),
    "balance": ("order", {}, {"none": {}, "local": {}, "bbs": {}}),
    "compile": ("wrapped", {}, {"off": {}, "on": {}}),
    "optimizer": ("ops", {}, {"foreach": {}, "fused": {}}),
    "launch": ("wrapped", {"attention_impl": "v4", "gdpa_impl": "tlx"}, {"eager": {}, "graph": {}}),
}  # fmt: skip
# What the smoke tier maps onto one implementation is given another one that runs here.
TIER = load_tier("smoke")
TIER["implementations"] = {
    **TIER["implementations"],
    "gdpa": {"eager": "eager", "triton": "reference", "tlx": "reference"},
    "compile": {"off": "eager", "on": "aot_eager"},
    "optimizer": {"foreach": "foreach", "fused": "fused"},
    "launch": {"eager": "eager", "graph": "static"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return Data.open(tiny.dataset(tmp_path_factory.mktemp("columns") / "d"))


def made(**columns) -> Config:
    config = Config.from_variant(tiny.ROW | columns, TIER, "smoke")
    return dataclasses.replace(config, model=WIDE, train=tiny.config().train)


class Recorded(TorchDispatchMode):
    """How often each operation ran, with its text arguments: the implementation is one of them."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[(str(function), *(x for x in args if isinstance(x, str)))] += 1
        return function(*args, **(kwargs or {}))


def step(config, data):
    """(operations, loss, gradient norm) of one training step."""
    model = train.build(config, data, 0, CPU)
    optimizers = Optimizers(model, config, 4)
    torch.manual_seed(1)
    with Recorded() as recorded:
        loss, norm = train.train_step(model, optimizers, data.train.batch(np.arange(24)), config, 0, 0)
    return recorded.seen, loss, norm


def test_every_column_is_looked_at():
    assert set(EFFECTS) == set(TOGGLE_TYPES)
    for column, (_, _, values) in EFFECTS.items():
        assert set(values) <= {member.value for member in TOGGLE_TYPES[column]}


STEPPED = [column for column, (effect, *_) in EFFECTS.items() if effect in ("ops", "numbers")]


@pytest.mark.parametrize("column", STEPPED)
def test_a_flip_changes_what_runs(data, column):
    effect, base, values = EFFECTS[column]
    results = {value: step(made(**base | {column: value} | extra), data) for value, extra in values.items()}
    for one, other in itertools.combinations(values, 2):
        (ops_one, *numbers_one), (ops_other, *numbers_other) = results[one], results[other]
        pair = f"{column}: {one} and {other}"
        if effect == "ops":
            assert ops_one != ops_other, f"{pair} run the same operations"
            assert numbers_one == pytest.approx(numbers_other, rel=1e-4), f"{pair} differ in numbers"
        else:
            assert numbers_one != pytest.approx(numbers_other, rel=1e-9, abs=1e-12), f"{pair} give the same numbers"


def test_balance_reorders_the_samples(data):
    orders = {}
    for value in EFFECTS["balance"][2]:
        config = made(balance=value)
        batches = list(train._batches(config, data.train, 0, 0, 8, 8))
        orders[value] = torch.cat([batch.dense for batch in batches])
    for one, other in itertools.combinations(orders.values(), 2):
        assert not torch.equal(one, other)
        assert torch.equal(one.sort(0).values, other.sort(0).values)  # the same samples


def test_compile_wraps_every_module_of_every_layer(data):
    for value in ("off", "on"):
        model = train.build(made(compile=value), data, 0, CPU)
        modules = [module for layer in model.layers for module in (layer.summary, *layer.modules_by_name().values())]
        assert {compilation.is_compiled(module) for module in (*modules, model.heads)} == {value == "on"}


def test_launch_replays_forward_and_backward(data):
    _, base, values = EFFECTS["launch"]
    for value in values:
        model = train.build(made(**base, launch=value), data, 0, CPU)
        assert (model.replay is not None) == (value == "graph")


def test_the_fused_norms_run_the_gdpa_that_the_row_names(data):
    """The two columns are independent: norm says who runs the norms, gdpa_impl who runs between them."""
    for value, expected in (("eager", "eager"), ("triton", "reference")):
        seen, _, _ = step(made(norm="fused", gdpa_impl=value), data)
        calls = [key for key in seen if key[0].startswith("gem_kernels.pffn")]
        assert len(calls) == 2 and all(key[-2:] == (expected, "eager") for key in calls), calls


def test_the_gpu_tiers_name_one_implementation_a_value():
    for tier in ("gpu", "gpu2"):
        table = load_tier(tier)["implementations"]
        for name in ("attention", "gdpa", "optimizer", "compile", "norm", *(["launch"] if tier == "gpu" else [])):
            assert len(set(table[name].values())) == len(table[name]), f"{tier}: {name} maps two values to one"
