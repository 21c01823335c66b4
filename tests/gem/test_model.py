"""The model: one mathematics in every layout and implementation, FLOPs in closed form, bounded scores, no graph
breaks."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from gem import attention, checkpointing
from gem import compile as compilation
from gem.config import Checkpointing
from gem.counts import Counts
from gem.dataset import Split, checked_kjt
from gem.heads import loss_sums, normalised_loss
from gem.model import GEM, branch_steps
from gem.norms import KeyNorm, layer_norm
from gem.train import train_step
from kernels import padded_batch
from kernels.jagged import row_ids
from tests.gem import tiny


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return Split(tiny.dataset(tmp_path_factory.mktemp("data") / "d"), "train")


def build(split, seed=0, **columns) -> GEM:
    torch.manual_seed(seed)
    return GEM(tiny.config(**columns), split.schema)


def loss_of(model, batch):
    sums = loss_sums(model(batch), batch.labels, batch.weights)
    return normalised_loss(sums, {task: weight.sum() for task, weight in batch.weights.items()})


def gradients(model, batch):
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(split, first, second, rows=20, tolerance=2e-5):
    """Same parameters, same loss, same gradients to rounding, for two sets of columns."""
    one, two = build(split, **first), build(split, seed=1, **second)
    two.load_state_dict(one.state_dict())
    batch = split.batch(np.arange(rows))
    (loss_one, grads_one), (loss_two, grads_two) = gradients(one, batch), gradients(two, batch)
    torch.testing.assert_close(loss_one, loss_two, rtol=tolerance, atol=0)
    scale = max(g.abs().max().item() for g in grads_one.values() if g is not None)
    for name, grad in grads_one.items():
        other = grads_two[name]
        assert (grad is None) == (other is None), name
        if grad is not None:
            torch.testing.assert_close(
                grad, other, rtol=1e-3, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
            )


PADDED = {"layout": "padded", "attention_impl": "padded"}


@pytest.mark.parametrize("self_attention", ["full", "window", "block"])
@pytest.mark.parametrize(("pooling", "compskip"), [("pma", "off"), ("hsp", "on")])
def test_padded_and_jagged_are_one_mathematics(split, self_attention, pooling, compskip):
    columns = {"self_attention": self_attention, "pooling": pooling, "compskip": compskip}
    assert_same(split, columns, columns | PADDED)


def test_padding_inside_the_attention_op_is_the_same_mathematics(split):
    assert_same(split, {}, {"attention_impl": "padded"})


@pytest.mark.parametrize("self_attention", ["full", "window", "block"])
@pytest.mark.parametrize(("rotary", "norm"), [("fused", "separate"), ("separate", "fused")])
def test_fused_ops_are_the_same_mathematics(split, self_attention, rotary, norm):
    assert_same(
        split, {"self_attention": self_attention}, {"self_attention": self_attention, "rotary": rotary, "norm": norm}
    )


def test_checkpointing_changes_nothing(split):
    batch = split.batch(np.arange(16))
    plain, checkpointed = build(split), build(split)
    checkpointing.apply(checkpointed, Checkpointing.UNIFORM)
    (loss_one, one), (loss_two, two) = gradients(plain, batch), gradients(checkpointed, batch)
    assert torch.equal(loss_one, loss_two)
    assert all(torch.equal(one[name], two[name]) for name in one if one[name] is not None)


def test_self_attention_kinds_differ_and_see_what_they_should(split):
    """A change far away in the history reaches a row under full attention only."""
    batch = split.batch(np.array([int(np.argmax(split.items["impression"].lengths))]))
    longest = batch.longest["impression"]
    assert longest == 12

    def row_after_change(kind, changed, row):
        model = build(split, self_attention=kind)
        branch = model.layers[0].branches["impression_branch"].attention
        events = model.embed_events(batch)["impression"]
        other = events.values.detach().clone()
        other[changed] = torch.randn(16, generator=torch.Generator().manual_seed(0))  # a constant would be normed away
        before, after = branch(events).values, branch(events._replace(values=other)).values
        return not torch.allclose(before[row], after[row], atol=1e-6)

    assert row_after_change("full", 11, 0)
    assert row_after_change("window", 3, 0) and not row_after_change("window", 4, 0)  # window 3
    assert row_after_change("block", 3, 0) and not row_after_change("block", 4, 3)  # blocks of 4


@pytest.mark.parametrize("columns", [{}, PADDED, {"self_attention": "block", "pooling": "hsp", "compskip": "on"}])
def test_empty_histories(split, columns):
    """A batch without a single event, and row 0, which has none: finite loss and gradients, same as in company."""
    model = build(split, **columns)
    data = tiny.columns(4, 9)
    for event in tiny.EVENTS:
        for part in ("item", "action", "time"):
            data[f"{event}_{part}"] = [[] for _ in range(4)]
    alone = split.batch(np.array([0]))
    assert alone.longest == {"impression": 0, "click": 0}
    loss, grads = gradients(model, alone)
    assert loss.isfinite() and all(g.isfinite().all() for g in grads.values() if g is not None)
    assert (
        grads[
            "layers.0.branches.impression_branch.pooler.seeds"
            if not columns.get("compskip")
            else "heads.logit.ctr.weight"
        ]
        is not None
    )
    together = model(split.batch(np.array([0, 5, 9])))
    for task, logit in model(alone).items():
        torch.testing.assert_close(logit, together[task][:1], rtol=1e-5, atol=1e-6)


def test_a_samples_logits_ignore_its_batch_mates(split):
    model = build(split)
    rows = np.array([3, 8, 21, 40])
    whole = model(split.batch(rows))
    permuted = model(split.batch(rows[::-1].copy()))
    for task in whole:
        torch.testing.assert_close(whole[task], permuted[task].flip(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole[task][2:3], model(split.batch(rows[2:3]))[task], rtol=1e-5, atol=1e-6)


VARIANTS = [
    {},
    {"self_attention": "window", "pooling": "hsp"},
    {"self_attention": "block", "rotary": "fused", "norm": "fused", "compskip": "on", "pooling": "hsp"},
    {"attention_impl": "padded"},
    {"sequence": "off"},
]


def columns_beside_items(model, counts) -> int:
    """Forward FLOPs that are not the model's: age, bias and zeros as eight columns of the events' first product."""
    widths = {name: model.embed[f"{name}_embed"].project.out_features for name in model.names}
    return sum(2 * counts.events(name) * 8 * width for name, width in widths.items())


@pytest.mark.parametrize("columns", VARIANTS)
def test_closed_form_flops_equal_the_counter(split, columns):
    model, batch = build(split, **columns), split.batch(np.arange(20))
    counts = Counts(batch.size, batch.lengths)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    parts = model.flops(counts)
    assert counter.get_total_flops() == sum(parts.values()) + columns_beside_items(model, counts)
    assert model.step_flops(counts) == 3 * sum(parts.values())
    assert all(isinstance(value, int) and value > 0 for value in parts.values())


def test_backward_flops_are_twice_the_forward(split):
    """Of the layers; the first projections need no gradient of their inputs where those are data."""
    model, batch = build(split), split.batch(np.arange(20))
    counts = Counts(batch.size, batch.lengths)
    loss = loss_of(model, batch)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    inputs = 2 * batch.size * model.features.dense_up.in_features * model.features.dense_up.out_features
    # seeds and the HSP query are parameters: their products have no gradient to save, all others have two
    work = 2 * sum(model.flops(counts).values()) - inputs
    assert counter.get_total_flops() == work + 2 * columns_beside_items(model, counts)


def test_padded_variants_are_charged_useful_work_only(split):
    batch = split.batch(np.arange(20))
    counts = Counts(batch.size, batch.lengths)
    assert build(split, **PADDED).flops(counts) == build(split).flops(counts)


def test_generalised_attention_scores_are_bounded(split):
    model, batch = build(split), split.batch(np.arange(40))
    branch = model.layers[0].branches["impression_branch"].feed_forward
    with torch.no_grad():
        branch.key_norm.raw.fill_(50.0)  # the learned scale at its limit
        events = model.embed_events(batch)["impression"]
        q = layer_norm(events.values * 1e3).unflatten(-1, (2, 8))
        keys = branch.key_norm(1e4 * torch.randn(50, 2, 8))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * branch.scale
    assert scores.abs().max() <= 1 + 1e-5
    assert torch.isfinite(KeyNorm(2)(torch.zeros(3, 2, 8))).all()


def test_rotary_depends_on_position_and_age():
    positions, ages = torch.arange(5), torch.tensor([9e4, 5e3, 5e3, 60.0, 1.0])
    cos, sin = attention.rotary_tables(positions, ages, 8, 3600.0)
    later, _ = attention.rotary_tables(positions, ages * 2, 8, 3600.0)
    shifted, _ = attention.rotary_tables(positions + 1, ages, 8, 3600.0)
    assert cos.shape == (5, 4) and not torch.allclose(cos, later) and not torch.allclose(cos, shifted)
    x = torch.randn(5, 2, 8)
    turned = attention.rotate(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    expected = x[2, 1, 2] * cos[2, 1] - x[2, 1, 3] * sin[2, 1]  # interleaved pairs
    torch.testing.assert_close(turned[2, 1, 2], expected)


def test_compskip_alternates_and_ends_with_fresh_pooling():
    steps = [branch_steps(layer, 3, True) for layer in range(4)]
    assert [s and s["attend"] for s in steps] == [False, True, False, None]
    assert all(s["feed_forward"] == s["pool"] != s["attend"] for s in steps[:3])
    assert branch_steps(0, 2, True)["attend"] and branch_steps(1, 2, True)["pool"]
    assert branch_steps(0, 2, False) == {"feed_forward": True, "attend": True, "pool": True}


def test_compskip_costs_less_and_sequence_off_has_no_history(split):
    batch = split.batch(np.arange(20))
    counts = Counts(batch.size, batch.lengths)
    on, off = build(split, compskip="on"), build(split)
    assert sum(on.flops(counts).values()) < sum(off.flops(counts).values())
    without = build(split, sequence="off")
    assert not any("history" in name or "branch" in name for name, _ in without.named_parameters())
    batch.ages["impression"][:] = 1e6
    assert torch.isfinite(loss_of(without, batch))


def test_every_dense_parameter_gets_a_gradient(split):
    for columns in VARIANTS[:3]:
        _, grads = gradients(build(split, **columns), split.batch(np.arange(40)))
        assert not [name for name, grad in grads.items() if grad is None or not grad.abs().sum() > 0], columns


def test_schemas_without_candidate_dense_or_second_task(tmp_path):
    shape = {"events": {"rating": (9, 5, 6)}, "sparse": {"user": 4}, "tasks": ("ctr",), "num_dense": 0}
    split = Split(tiny.dataset(tmp_path / "d", **shape), "train")
    for columns in (*VARIANTS, PADDED):
        loss, _ = gradients(build(split, **columns), split.batch(np.arange(16)))
        assert loss.isfinite()
    assert not split.schema.has_candidate


def test_item_table_is_shared_by_event_types_and_candidate(split):
    model = build(split)
    tables = {config.name: config.feature_names for config in model.history.tables.embedding_configs()}
    assert tables["table_items_30"] == ["item", "impression_item", "click_item"]
    assert set(model.table_parameters()) | set(model.dense_parameters()) == {n for n, _ in model.named_parameters()}
    assert len(model.table_parameters()) == 3 + 3


def bags(pooling, rows):
    made = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t", embedding_dim=1, num_embeddings=rows, feature_names=["f"], pooling=pooling)
        ]
    )
    return made, made.embedding_bags["t"].weight


def test_mean_pooling_of_an_empty_bag_is_zero():
    made, weight = bags(PoolingType.MEAN, 5)
    torch.nn.init.ones_(weight)
    out = made(checked_kjt(["f"], torch.tensor([1, 3]), torch.tensor([0, 2, 0]))).values()
    assert out.flatten().tolist() == [0.0, 1.0, 0.0]
    out.sum().backward()
    assert weight.grad.flatten().tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]


def test_mean_pooling_divides_by_the_whole_bag():
    made, weight = bags(PoolingType.MEAN, 4)
    with torch.no_grad():
        weight.copy_(torch.arange(1.0, 5.0)[:, None])
    out = made(checked_kjt(["f"], torch.tensor([0, 1, 3]), torch.tensor([3]))).values()
    assert out.item() == pytest.approx(7 / 3)


def test_layers_compile_without_graph_breaks(split):
    """One graph a module, shared by layers and by event types of the same sizes: fullgraph makes a break an error, and
    nothing is compiled again as lengths and sizes change. What follows from offsets is made once a batch and shared by
    layers, forward and backward."""
    plain = build(split, self_attention="block", pooling="hsp")
    compiled = build(split, self_attention="block", pooling="hsp")
    torch._dynamo.reset()
    compilation.apply(compiled, "aot_eager")
    before, batch, made = compilation.graphs(), None, []
    for rows in (np.arange(20), np.arange(7, 40), np.arange(3)):
        batch = split.batch(rows)
        padded_batch._KEPT.clear()
        gradients(compiled, batch)
        made.append(compilation.graphs() - before)
        assert len(padded_batch._KEPT) == len(tiny.EVENTS)
        (loss_one, one), (loss_two, two) = gradients(plain, batch), gradients(compiled, batch)
        torch.testing.assert_close(loss_one, loss_two, rtol=1e-5, atol=1e-6)
        for name, grad in one.items():
            torch.testing.assert_close(grad, two[name], rtol=1e-3, atol=1e-5)
    # two event types of different widths have an embedding and three steps each; features, summary, interaction, heads
    assert made == [2 * 4 + 4] * 3
    with pytest.raises(ValueError, match="unknown implementation 'jit'; allowed: eager, aot_eager, inductor"):
        compilation.apply(plain, "jit")


@pytest.mark.parametrize(
    "columns", [{"self_attention": "full"}, {"self_attention": "window", "rotary": "fused", "norm": "fused"}]
)
def test_a_layer_is_one_graph(split, columns):
    model, batch = build(split, **columns), split.batch(np.arange(20))
    x, events = model.features(batch), model.embed_events(batch)
    pooled = {name: x.new_zeros(batch.size, 2, 16) for name in model.names}
    torch._dynamo.reset()
    report = torch._dynamo.explain(model.layers[0])(x, events, pooled)
    assert (report.graph_count, report.graph_break_count) == (1, 0), report.break_reasons


def test_precision_is_put_on_from_outside(split):
    from gem import precision
    from gem.optim import Optimizers

    wide = dataclasses.replace(tiny.MODEL, width=32)
    config = dataclasses.replace(
        tiny.config(precision="mx_full", mx_recipe="rceil", self_attention="block", rotary="fused", norm="fused"),
        model=wide,
    )
    torch.manual_seed(0)
    model = GEM(config, split.schema)
    batch = split.batch(np.arange(16))
    exact = loss_of(model, batch).item()
    assert precision.apply(model, config)
    low = loss_of(model, batch).item()
    assert low != exact and abs(low - exact) < 0.05 * exact
    loss, norm = train_step(model, Optimizers(model, config, 10), batch, config, 0, 0)
    assert np.isfinite([loss, norm]).all()


def test_loss_is_a_mean_over_all_labels_not_a_mean_of_means():
    counts = {"ctr": torch.tensor(12.0)}
    total = sum(normalised_loss({"ctr": torch.tensor(part)}, counts) for part in (30.0, 4.0))
    assert total.item() == pytest.approx(34 / 12)


def test_micro_batches_give_the_gradients_of_the_whole_batch(split):
    one, parts = build(split), build(split)
    whole = split.batch(np.arange(12))
    counts = {task: weight.sum() for task, weight in whole.weights.items()}
    _, expected = gradients(one, whole)
    for rows in (np.arange(10), np.arange(10, 12)):
        batch = split.batch(rows)
        normalised_loss(loss_sums(parts(batch), batch.labels, batch.weights), counts).backward()
    for name, value in parts.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_cvr_counts_clicked_rows_only(split):
    batch = split.batch(np.arange(30))
    logits = {task: torch.randn(30) for task in ("ctr", "cvr")}
    before = loss_sums(logits, batch.labels, batch.weights)["cvr"]
    logits["cvr"][batch.labels["ctr"] == 0] += 10.0
    assert torch.equal(before, loss_sums(logits, batch.labels, batch.weights)["cvr"])
    none = {"ctr": torch.ones(30), "cvr": torch.zeros(30)}
    assert normalised_loss(loss_sums(logits, batch.labels, none), {t: w.sum() for t, w in none.items()}).isfinite()


# Code that torch.compile traces, and what torch 2.11 (the GPU environment) gets wrong there although 2.13 does not.
TRACED = ("attention", "embeddings", "experts", "heads", "interaction", "model", "norms", "sequence")
UNTRACEABLE = {"_replace": "Dynamo loses the fields of a NamedTuple", "_make": "the same"}


def test_compiled_code_keeps_to_what_the_gpu_environments_torch_can_trace():
    """The environments have different torch versions, so a CPU run cannot show this; the code's form can."""
    root = Path(attention.__file__).parents[1]
    files = [root / "gem" / f"{name}.py" for name in TRACED] + [root / "kernels" / "jagged.py"]
    bad = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, where = node.func.attr, f"{path.name}:{node.lineno}"
            if name in UNTRACEABLE:
                bad.append(f"{where} calls {name}: {UNTRACEABLE[name]}")
            if name in ("searchsorted", "bucketize") and any(isinstance(x, ast.Subscript) for x in ast.walk(node)):
                bad.append(f"{where} calls {name} on a slice: Inductor reads it from its tensor's start")
    assert not bad, bad


def test_rows_know_their_sequence_without_a_slice():
    """The form that needs none: empty sequences, first and last rows, rows past the end, strided offsets."""
    for offsets in ([0], [0, 0], [0, 3, 3, 7], [0, 0, 2, 2], [0, 5, 5, 5]):
        ends = torch.tensor(offsets, dtype=torch.int32)
        wanted = [sum(end <= row for end in offsets[1:]) for row in range(9)]
        assert row_ids(ends, 9).tolist() == wanted
        assert row_ids(ends.repeat_interleave(2)[::2], 9).tolist() == wanted
