"""Steps on padded buffers, as CUDA graphs replay them, against steps on the batches themselves; on a CPU, so without
the graphs (tests/gpu/test_graphs_gpu.py has them)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from gem import graphs, train
from gem.config import Config
from gem.optim import Optimizers
from kernels.kept import kept, one_graph
from tests.gem import tiny

CPU = torch.device("cpu")
ROWS = {
    "full": {"self_attention": "block", "rotary": "fused", "norm": "fused", "compskip": "on", "pooling": "hsp"},
    "window": {"self_attention": "window"},
    "plain": {},
    "no_sequence": {"sequence": "off"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return train.Data.open(tiny.dataset(tmp_path_factory.mktemp("graphs") / "d"))


def config_of(launch: str, **columns) -> Config:
    """attention_impl and gdpa_impl as a graph takes them; in the smoke tier both run in plain torch."""
    made = tiny.config(**{"attention_impl": "v4", "gdpa_impl": "tlx", "launch": "graph"} | columns)
    return dataclasses.replace(made, implementations=dataclasses.replace(made.implementations, launch=launch))


def trained(config: Config, data, sizes=(16, 16, 8, 16)):
    """(losses, parameters and tables) after a step on batches of other lengths each."""
    model = train.build(config, data, 0, CPU)
    optimizers = Optimizers(model, config, len(sizes))
    losses, first = [], 0
    for step, size in enumerate(sizes):
        batch = data.train.batch(np.arange(first, first + size))
        losses.append(float(train.backward(model, batch, config)))
        optimizers.clip()
        optimizers.step(step)
        first += size
    return losses, {name: value.detach().clone() for name, value in model.named_parameters()}, model


@pytest.mark.parametrize("row", ROWS)
def test_padded_buffers_train_alike(data, row):
    wanted, right, _ = trained(config_of("eager", **ROWS[row]), data)
    losses, found, model = trained(config_of("static", **ROWS[row]), data)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name, value in right.items():
        torch.testing.assert_close(
            found[name], value, rtol=2e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    sizes = {size for size, *_ in model.replay.made}
    assert sizes == {8, 16}
    for graph in model.replay.made.values():
        assert all(rows % graphs.ALIGN == 0 for rows in graph.rows.values())


def test_what_lies_behind_a_batch_says_nothing(data, monkeypatch):
    """A longer batch before, a bad one at that, leaves nothing behind the end of a shorter one in the same buffers."""
    monkeypatch.setattr(graphs, "ALIGN", 4096)
    monkeypatch.setattr(graphs, "SPREADS", 0)
    config = config_of("static", **ROWS["full"])
    model = train.build(config, data, 0, CPU)
    lengths = data.train.sequence_lengths()
    order = np.argsort(sum(lengths.values()) if isinstance(lengths, dict) else lengths)
    short, long = data.train.batch(order[:16]), data.train.batch(order[-16:])
    plain = train.build(config_of("eager", **ROWS["full"]), data, 0, CPU)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    for ages in long.ages.values():
        ages[-1] = torch.nan
    assert not model.replay(long).isfinite()
    for own in (model, plain):
        own.load_state_dict(good)
        for value in own.parameters():
            value.grad = None
    wanted = train.backward(plain, short, config)
    assert float(model.replay(short)) == pytest.approx(float(wanted), rel=1e-5)
    assert len(model.replay.made) == 1
    own = dict(plain.named_parameters())
    for name, value in model.dense_parameters().items():
        if own[name].grad is not None:
            torch.testing.assert_close(value.grad, own[name].grad, rtol=2e-4, atol=2e-6)


def scale_of(**first: int):
    """Of a batch in which every sample has as much as any other, so that the step is the least."""
    found = graphs._Scale.of({name: torch.full((4,), count // 4) for name, count in first.items()})
    assert found.step == graphs.STEP
    return found


@pytest.mark.parametrize(
    ("click", "view", "level"),
    [(1000, 5000, 0), (1000, 5001, 1), (1020, 5000, 1), (1021, 5000, 2), (1000, 5500, 5), (979, 4700, -1)],
)
def test_a_level_holds_every_event_type(click, view, level):
    scale = scale_of(click=1000, view=5000)
    events = {"click": click, "view": view}
    assert scale.level(events) == level
    for name, rows in scale.capacity(level).items():
        assert events[name] <= rows < events[name] * 1.1 + graphs.ALIGN and rows % graphs.ALIGN == 0


def test_a_batch_without_events_has_a_level():
    scale = scale_of(click=0)
    assert scale.level({"click": graphs.ALIGN}) == 0
    assert scale.capacity(scale.level({"click": 0})) == {"click": graphs.ALIGN}
    assert graphs._Scale.of({}).level({}) == 0


def test_levels_of_small_batches_are_wider():
    lengths = torch.tensor([100, 300] * 8)  # the sum of 16 scatters by 12.5 %
    assert graphs._Scale.of({"view": lengths}).step == pytest.approx(0.0625)


def test_tables_of_a_graph_are_built_once_in_it(monkeypatch):
    built = []

    def build(q_offsets, kv_offsets, size):
        built.append(size)
        return [size]

    offsets = torch.tensor([0, 2])
    monkeypatch.setattr("kernels.kept._stream", lambda _: None)  # as while a graph is captured
    kept(build, None, offsets, 1), kept(build, None, offsets, 1)
    assert built == [1, 1]
    with one_graph():
        assert kept(build, None, offsets, 2) is kept(build, None, offsets, 2)
        kept(build, None, offsets, 3)
    assert built == [1, 1, 2, 3]
    with one_graph():
        kept(build, None, offsets, 2)
    assert built == [1, 1, 2, 3, 2]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"attention_impl": "varlen"}, "attention_impl 'varlen'"),
        ({"gdpa_impl": "eager"}, "gdpa_impl 'eager'"),
        ({"layout": "padded", "attention_impl": "padded", "gdpa_impl": "eager"}, "layout 'padded'"),
    ],
)
def test_what_a_graph_cannot_hold_is_refused(columns, named):
    with pytest.raises(ValueError, match=f"launch: graph does not go with {named}; allowed: layout jagged"):
        config_of("static", **columns)


def test_a_graph_needs_a_gpu(data):
    with pytest.raises(ValueError, match="launch: implementation 'graph' needs a GPU; allowed: eager, static"):
        train.build(config_of("graph"), data, 0, CPU)
    with pytest.raises(ValueError, match="launch: unknown implementation 'grahp'; allowed: eager, static, graph"):
        train.build(config_of("grahp"), data, 0, CPU)


def test_emulated_formats_are_launched_one_by_one():
    assert config_of("static").toggles.launch.value == "graph"
    made = tiny.config(attention_impl="v4", gdpa_impl="tlx", launch="graph", precision="mx_full", mx_recipe="rceil")
    assert made.implementations.launch == "eager"


def test_a_gradient_has_its_parameters_layout():
    parameter, gradient = torch.zeros(3, 5), torch.arange(15.0).view(5, 3).T
    found = graphs.like(gradient, parameter)
    assert found.is_contiguous() and torch.equal(found, gradient)
    assert graphs.like(found, parameter) is found and graphs.like(None, parameter) is None
