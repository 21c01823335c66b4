"""A model in real 8 bits on a GPU: held against its format in plain torch, and in training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gem import config as configuration
from gem import train
from gem.bench import batches, parity
from gem.bench.loop import Loop, with_batch
from gem.optim import Optimizers
from gem.train import Data
from kernels.mxfp8 import hopper

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]
DATA = configuration.load_tier("gpu")["data"]


def configured(variant: str):
    config = with_batch(configuration.load(variant, "gpu", "quality"), 64)
    still = dataclasses.replace(config.train, table_lr=1e-30)  # the check runs the model several times
    plain = dataclasses.replace(config.implementations, compile="eager")
    return dataclasses.replace(config, train=still, implementations=plain)


@pytest.mark.parametrize("variant", ("mxfp8_attention", "mxfp8_mlp", "mxfp8_full"))
def test_a_row_in_8_bits_is_its_format_in_plain_torch(variant, monkeypatch):
    pytest.importorskip("triton.language.extra.tlx")
    config, small, device = configured(variant), parity.small_split(DATA), torch.device("cuda")
    model, batch = train.build(config, Data(small, small), 0, device), parity.whole_batch(small, device)
    wrong, error = parity.problem(model, batch, config)
    assert wrong is None and 0.004 < error < 0.08
    if variant == "mxfp8_mlp":
        right = hopper.product
        monkeypatch.setattr(hopper, "product", lambda *given: right(*given).roll(1, 0))
        assert parity.problem(model, batch, config)[0] is not None


def test_steps_in_8_bits_lower_the_loss():
    pytest.importorskip("triton.language.extra.tlx")
    config, device = configured("mxfp8_full"), torch.device("cuda")
    split = batches.MemorySplit(batches.schema_of(DATA, 1000), 128, DATA, 0)
    model = train.build(config, Data(split, split), 0, device)
    model.train()
    loop, losses = Loop(model, Optimizers(model, config, 30), config, split, device), []
    try:
        for _ in range(3):
            for _ in range(10):  # fewer than the watch keeps before it looks
                loop.one()
            losses += [step.loss for step in loop.watch.flush()]
    finally:
        loop.close()
    assert len(losses) == 30 and sum(losses[-5:]) < sum(losses[:5])
