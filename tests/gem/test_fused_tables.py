"""Fused tables: the same lookups, the same row-wise Adagrad, the same names as TorchRec's plain collections."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

from gem import fused_tables, train
from gem.optim import Optimizers
from tests.gem import tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train.Data.open(tiny.dataset(tmp_path_factory.mktemp("data") / "d", rows=96))


def assert_same_training(data, device, *, steps=3, pooling="mean", tolerance=1e-5):
    """A fused and a plain model from one state: equal losses, dense and table parameters after some steps."""
    if pooling != "mean":
        schema = data.train.schema
        sparse = {n: (size, pooling if n == "tag" else "mean") for n, (size, _) in schema.sparse.items()}
        data.train.schema = dataclasses.replace(schema, sparse=sparse)
    config = tiny.config(train={"table_lr": 0.3})
    models = [train.build(config, data, 0, device, fused_tables=fused) for fused in (False, True)]
    plain, own = models
    assert list(own.table_parameters()) == list(plain.table_parameters())
    for name, table in plain.table_parameters().items():
        assert torch.equal(table, own.table_parameters()[name]), name
    optimizers = [Optimizers(model, config, 10) for model in models]
    assert optimizers[0].fused_sums == {} and set(optimizers[1].fused_sums) == set(own.table_parameters())
    for step in range(steps):
        batch = data.train.batch(np.arange(step * 20, step * 20 + 20)).to(device)
        results = [train.train_step(m, o, batch, config, step, 0) for m, o in zip(models, optimizers, strict=True)]
        assert results[0] == pytest.approx(results[1], rel=1e-4)
    for name, table in plain.table_parameters().items():
        torch.testing.assert_close(own.table_parameters()[name], table, rtol=1e-3, atol=tolerance, msg=name)
        sums = table._in_backward_optimizers[0].state_dict()["state"][0]["sum"]
        torch.testing.assert_close(optimizers[1].fused_sums[name], sums.view(-1), rtol=1e-3, atol=1e-7, msg=name)
        assert sums.count_nonzero() > 0
    return own, optimizers[1], config


@pytest.mark.parametrize("pooling", ["mean", "sum"])
def test_fused_and_plain_tables_train_alike(data, pooling):
    before = data.train.schema
    try:
        assert_same_training(data, CPU, pooling=pooling)
    finally:
        data.train.schema = before


def test_states_come_back(data):
    config = tiny.config(train={"table_lr": 0.3})
    first, second = (train.build(config, data, seed, CPU, fused_tables=True) for seed in (0, 1))
    batch = data.train.batch(np.arange(20))
    optimizers = [Optimizers(model, config, 10) for model in (first, second)]
    train.train_step(first, optimizers[0], batch, config, 0, 0)
    second.load_state_dict(first.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, own in zip((first, second), optimizers, strict=True):
        train.train_step(model, own, batch, config, 1, 0)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_a_gradient_that_is_not_finite_does_not_reach_a_table(data):
    config = tiny.config()
    model = train.build(config, data, 0, CPU, fused_tables=True)
    Optimizers(model, config, 10)
    before = {name: value.detach().clone() for name, value in model.table_parameters().items()}
    (train.forward_loss(model, data.train.batch(np.arange(20)), config) * torch.nan).backward()
    for name, value in model.table_parameters().items():
        assert torch.equal(value, before[name]), name


def test_features_in_another_order_are_refused(data):
    model = train.build(tiny.config(), data, 0, CPU, fused_tables=True)
    batch = data.train.batch(np.arange(4))
    turned = batch.sequence.permute([1, 0, *range(2, len(batch.sequence.keys()))])
    with pytest.raises(ValueError, match=r"fused tables: features .*; allowed: .*, in this order"):
        model.history.tables(turned)
    with pytest.raises(NotImplementedError, match="stay on the device"):
        model.to("meta")


def test_tables_of_one_size_are_one_call(data):
    """What makes a lookup one kernel: features of a table lie side by side in the batch."""
    names = [name for _, features in data.train.schema.history_tables.values() for name in features]
    assert data.train.batch(np.arange(4)).sequence.keys() == names
    assert names[:3] == ["item", "impression_item", "click_item"]
    assert fused_tables.FusedRows.folder == "embeddings"
