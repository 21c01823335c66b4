"""Training on a GPU: fused tables, batches that arrive beside the step, losses read late, divergence named exactly."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from gem import train
from gem.dataset import Split
from gem.optim import Optimizers
from gem.prefetch import prefetch
from gem.sampler import batch_rows
from gem.watch import DivergedError, Watch
from kernels import jagged
from tests.gem import tiny
from tests.gem.test_fused_tables import assert_same_training

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.dataset(tmp_path_factory.mktemp("data") / "d", rows=480)


@pytest.fixture
def data(folder):
    return train.Data.open(folder)


def config_of(**kwargs):
    return dataclasses.replace(tiny.config(**kwargs), device="cuda")


def test_fused_and_plain_tables_train_alike(data):
    assert_same_training(data, GPU, tolerance=1e-4)


def test_prefetched_batches_are_the_batches_and_their_offsets_are_known(data):
    rows = [np.arange(start, start + 16) for start in range(0, 160, 16)]
    got = list(prefetch((data.train.batch(r) for r in rows), GPU))
    for own, batch in zip(rows, got, strict=True):
        wanted = data.train.batch(own)
        assert batch.dense.is_cuda and torch.equal(batch.dense.cpu(), wanted.dense)
        assert torch.equal(batch.sequence.values().cpu(), wanted.sequence.values())
        for name, offsets in batch.offsets.items():
            assert torch.equal(offsets.cpu(), wanted.offsets[name])
            torch.cuda.set_sync_debug_mode("error")
            try:
                assert torch.equal(jagged.host_offsets(offsets), wanted.offsets[name])
                jagged.check_offsets(offsets, name, int(wanted.offsets[name][-1]), device=offsets.device)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("optimizer", ["foreach", "fused"])
def test_a_step_waits_for_nothing(data, optimizer):
    config = config_of()
    names = dataclasses.replace(config.implementations, optimizer=optimizer)
    config = dataclasses.replace(config, implementations=names)
    model = train.build(config, data, 0, GPU)
    optimizers = Optimizers(model, config, 10)
    batches = [data.train.batch(np.arange(i, i + 16)).to(GPU) for i in range(4)]
    train.step_once(model, optimizers, batches[0], config, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (1, 2, 3):
            loss, norm = train.step_once(model, optimizers, batches[step], config, step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite() and norm > 0


def test_bad_input_is_named_with_its_step_although_it_is_noticed_late(data, tmp_path):
    bad = Split(data.train.directory, "train")
    order = batch_rows(bad.sequence_lengths(), 8, 3, 0)
    bad.dense = bad.dense.copy()
    bad.dense[order[33, 2], 1] = np.nan
    with pytest.raises(DivergedError, match="seed 3, step 33: loss is nan; first bad tensor: input dense"):
        train.train_seed(config_of(), train.Data(bad, data.eval), 3, tmp_path, GPU, steps=60, quiet=True)
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(33))


def test_bad_gradients_stop_the_fused_optimizer_on_the_device(data):
    config = config_of()
    config = dataclasses.replace(config, implementations=dataclasses.replace(config.implementations, optimizer="fused"))
    model = train.build(config, data, 0, GPU)
    optimizers, watch = Optimizers(model, config, 10), Watch(model, config, 0, GPU, window=2)
    weight, batch = model.heads.logit["ctr"].weight, data.train.batch(np.arange(16)).to(GPU)
    bad = torch.zeros((), device=GPU)
    weight.register_hook(lambda grad: torch.where(bad > 0, grad * torch.inf, grad))
    kept = None
    with pytest.raises(DivergedError, match=r"step 3: gradient norm is .*gradient of heads\.logit\.ctr\.weight"):
        for step in range(9):
            bad.fill_(float(step >= 3))
            if step == 3:
                kept = {name: value.detach().clone() for name, value in model.named_parameters()}
            for done in watch.add(step, batch, *train.step_once(model, optimizers, batch, config, step)):
                assert done.loss > 0 and done.norm > 0 and done.seconds > 0 and done.step < 3
        list(watch.flush())
    for name, value in model.dense_parameters().items():
        assert torch.equal(value, kept[name]), name


def test_killed_and_resumed_continues_the_curve(data, tmp_path, monkeypatch):
    """Atomic additions round in any order, so equal to rounding, not bit for bit."""
    config = config_of(train={"dense_lr": 1e-3})
    straight = train.train_seed(config, data, 3, tmp_path / "a", GPU, steps=30, quiet=True)
    step_once = train.step_once

    def killed(model, optimizers, batch, config, step):
        if step == 17:
            raise KeyboardInterrupt
        return step_once(model, optimizers, batch, config, step)

    monkeypatch.setattr(train, "step_once", killed)
    with pytest.raises(KeyboardInterrupt):
        train.train_seed(config, data, 3, tmp_path / "b", GPU, steps=30, quiet=True, checkpoint_every=10)
    monkeypatch.setattr(train, "step_once", step_once)
    resumed = train.train_seed(config, data, 3, tmp_path / "b", GPU, steps=30, quiet=True, resume=True)
    curves = []
    for name in ("a", "b"):
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(31))
        curves.append([line["loss"] for line in lines[:-1]])
    assert curves[0] == pytest.approx(curves[1], rel=2e-3)
    assert resumed["ne_ctr"] == pytest.approx(straight["ne_ctr"], rel=2e-3)


def test_packed_rotary_writes_one_gradient(poison):
    """The Triton form against the reference: rows of a wider buffer in, each gradient at its place."""
    from kernels.rotary import apply_rotary_qkv

    wide = torch.randn(301, 4, 4, 128, device=GPU, dtype=torch.bfloat16)
    angle = torch.randn(301, 64, device=GPU)
    results = []
    for impl in ("triton", "reference"):
        x = wide[:, :3].detach().requires_grad_()
        outputs = apply_rotary_qkv(x, angle.cos(), angle.sin(), impl=impl)
        weights = [torch.linspace(-1, 1, o.numel(), device=GPU).view(o.shape).to(o.dtype) for o in outputs]
        torch.autograd.backward(outputs, weights)
        results.append([*outputs, x.grad])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1.6e-2, atol=1e-2)


@pytest.mark.parametrize("impl", ["triton", "tlx"])
def test_packed_block_attention_writes_one_gradient(impl, poison):
    """Rows and gradient of a packed buffer against the op on three views, rows past the end included."""
    from kernels import Rotary, block_attention
    from kernels.block_attention import REGISTRY, block_attention_qkv
    from kernels.registry import Case

    x = torch.randn(1301, 3, 4, 128, device=GPU, dtype=torch.bfloat16)
    if reason := REGISTRY.why_not(impl, Case.of(x[:, 0], features=frozenset({"rotary"}))):
        pytest.skip(f"{impl}: {reason}")
    offsets = torch.tensor([0, 1, 1, 300, 364, 1290], device=GPU, dtype=torch.int32)
    angle = torch.randn(1301, 64, device=GPU)
    tables = Rotary(angle.cos(), angle.sin())
    results = []
    for packed in (True, False):
        own = x.detach().requires_grad_()
        if packed:
            o = block_attention_qkv(own, offsets, rotary=tables, impl=impl)
        else:
            o = block_attention(*own.unbind(1), offsets, rotary=tables, impl=impl)
        o.backward(torch.linspace(-1, 1, o.numel(), device=GPU).view(o.shape).to(o.dtype))
        results.append((o.detach(), own.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert not results[0][1][1290:].any()
