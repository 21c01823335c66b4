"""CUDA graphs of a training step against the same step launched kernel by kernel, on batches of other lengths each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gem import config as configuration
from gem import train
from gem.bench.batches import MemorySplit, schema_of
from gem.optim import Optimizers
from kernels.mxfp8 import formats

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
BATCH, STEPS = 64, 6


@pytest.fixture(scope="module")
def split():
    tier = configuration.of_training(configuration.load_tier("gpu"))
    return MemorySplit(schema_of(tier["data"], 1000), BATCH * STEPS, tier["data"], seed=3)


def config_of(variant: str, launch: str):
    made = configuration.load(variant, "gpu", "quality")
    still = dataclasses.replace(made.train, table_lr=1e-3, dense_lr=1e-4, batch_size=BATCH)
    names = dataclasses.replace(made.implementations, launch=launch, compile="eager")
    return dataclasses.replace(made, train=still, implementations=names)


def trained(config, split, after_each=lambda model: None):
    """(losses, norms) of steps over all batches, twice."""
    model = train.build(config, train.Data(split, split), 0, GPU)
    model.train()
    optimizers = Optimizers(model, config, 2 * STEPS)
    found = []
    for step in range(2 * STEPS):
        first = step % STEPS * BATCH
        batch = split.batch(np.arange(first, first + BATCH)).to(GPU)
        loss, norm = train.step_once(model, optimizers, batch, config, step)
        found.append((float(loss), float(norm)))
        after_each(model)
    losses, norms = zip(*found, strict=True)
    return losses, norms, model


@pytest.mark.parametrize(
    "variant", ["full", "full_same_math", "drop_block_for_window", "drop_fused_norms", "saved_fp8"]
)
def test_graphs_follow_the_curve(split, variant):
    losses, norms, model = trained(config_of(variant, "graph"), split)
    wanted, wanted_norms, other = trained(config_of(variant, "eager"), split)
    assert losses == pytest.approx(wanted, rel=2e-3)
    assert norms == pytest.approx(wanted_norms, rel=5e-2)
    for (name, value), right in zip(model.named_parameters(), other.parameters(), strict=True):
        scale = float(right.detach().abs().max()) + 1e-6
        assert float((value - right).detach().abs().max()) < 2e-2 * scale + 5e-3, name
    assert len(model.replay.made) > 1  # several capacities, one memory
    assert all(graph.graph is not None for graph in model.replay.made.values())


def test_eight_bits_follow_the_curve(split):
    """Stochastic rounding draws other numbers, so the curves agree to its noise."""
    losses, _, model = trained(config_of("mxfp8_full", "graph"), split)
    wanted, _, _ = trained(config_of("mxfp8_full", "eager"), split)
    assert losses == pytest.approx(wanted, rel=2e-2)
    assert all(graph.graph is not None for graph in model.replay.made.values())


def test_each_replay_rounds_with_other_numbers():
    graph, found = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        seed = formats.draw_seed(None, GPU)
    for _ in range(4):
        graph.replay()
        found.append(int(seed))
    assert len(set(found)) == 4


def test_a_captured_step_waits_for_nothing(split):
    config = config_of("full", "graph")
    model = train.build(config, train.Data(split, split), 0, GPU)
    optimizers = Optimizers(model, config, STEPS)
    batch = split.batch(np.arange(BATCH)).to(GPU)
    train.step_once(model, optimizers, batch, config, 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _ = train.step_once(model, optimizers, batch, config, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()


def test_graphs_share_their_memory(split):
    """A second capacity takes its buffers and gradients, not the activations once more."""
    config = config_of("full", "graph")
    model = train.build(config, train.Data(split, split), 0, GPU)
    optimizers, held = Optimizers(model, config, STEPS), []
    for step in range(STEPS):
        batch = split.batch(np.arange(step * BATCH, (step + 1) * BATCH)).to(GPU)
        train.step_once(model, optimizers, batch, config, step)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append((len(model.replay.made), torch.cuda.memory_reserved()))
    first, last = held[0][1], held[-1][1]
    activations = first - torch.cuda.memory_allocated()
    assert held[-1][0] > held[0][0] and last - first < 0.5 * activations
