"""The model's parts against their equations, written out by hand with loops, and the source's worked cases on them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gem.counts import Counts
from gem.dataset import Split
from gem.experts import WukongExpert
from gem.heads import normalised_loss
from gem.model import GEM
from gem.norms import layer_norm, rms_norm
from gem.sequence import PersonalisedFeedForward, Pooler, SumKronLinear
from tests.gem import tiny

SIZE = tiny.MODEL.events[0]


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return Split(tiny.dataset(tmp_path_factory.mktemp("equations") / "d"), "train")


def model_of(split, **columns) -> GEM:
    torch.manual_seed(0)
    return GEM(tiny.config(**columns), split.schema)


def events_of(split, rows=12, **columns):
    model, batch = model_of(split, **columns), split.batch(np.arange(rows))
    return model, batch, model.embed_events(batch)["impression"]


def test_seed_pooling_ends_in_a_sum_of_kronecker_products():
    """Y = sum_i Z_i^T H W_i with Z_i [seeds, tokens], W_i [width, width]; k (seeds tokens + width^2) parameters."""
    torch.manual_seed(0)
    layer = SumKronLinear(num_in=5, num_out=3, width_in=4, width_out=6, rank=2)
    hidden = torch.randn(7, 5, 4)
    z = layer.tokens.weight.view(3, 2, 5).permute(1, 2, 0)  # [rank, tokens, seeds]
    w = layer.channels.weight.view(6, 2, 4).permute(1, 2, 0)  # [rank, width in, width out]
    expected = torch.stack([sum(z[i].T @ h @ w[i] for i in range(2)) for h in hidden])
    torch.testing.assert_close(layer(hidden), expected)
    assert sum(p.numel() for p in layer.parameters()) == 2 * (5 * 3 + 4 * 6)
    assert layer.flops(Counts(7, {})) == 2 * 7 * 4 * 5 * 6 + 2 * 7 * 3 * 8 * 6


def test_wukong_expert_is_its_equation():
    """FMB(Z) = MLP(LN(flat(Z Z^T Y))) beside LCB(Z) = W_L Z; the interactions are those of all pairs of tokens."""
    torch.manual_seed(0)
    expert = WukongExpert(num_in=5, num_out=4, width=6, rank=3, hidden=8)
    tokens = torch.randn(2, 5, 6)
    y, w = expert.project.weight.T, expert.linear.weight
    for sample, got in zip(tokens, expert(tokens), strict=True):
        products = sample @ (sample.T @ y) / 6**0.5
        assert torch.allclose(products, (sample @ sample.T) @ y / 6**0.5, atol=1e-5)
        mixed = expert.down(F.gelu(expert.up(expert.norm(products.flatten()))))
        torch.testing.assert_close(got[:2], mixed.view(2, 6))
        torch.testing.assert_close(got[2:], w @ sample)


@pytest.mark.parametrize("pooling", ["pma", "hsp"])
def test_pooling_attends_to_the_samples_own_history(split, pooling):
    """Softmax of learned queries over one history at a time; no history, no attention output."""
    _, _, events = events_of(split)
    pooler = Pooler(tiny.config(pooling=pooling), SIZE)
    queries = pooler.query(layer_norm(pooler.seeds)) if pooling == "hsp" else pooler.seeds
    keys, items = pooler.keys_values(layer_norm(events.values)).chunk(2, -1)
    ends = events.offsets.tolist()
    rows = []
    for first, last in itertools.pairwise(ends):
        heads = []
        for columns in torch.arange(SIZE.width).split(SIZE.head_dim):
            scores = queries[:, columns] @ keys[first:last, columns].T / SIZE.head_dim**0.5
            heads.append(scores.softmax(-1) @ items[first:last, columns])
        rows.append(torch.cat(heads, -1))
    assert ends[1] == 0 and not rows[0].any()  # row 0 of the data has no history
    torch.testing.assert_close(pooler(events), pooler.out(torch.stack(rows)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["separate", "fused"])
def test_feed_forward_is_its_equation_and_personal(split, norm):
    """S' = RMS(o + LN(S)) + S with o = gelu(LN(S) k^T / sqrt(width)) v per head; k, v from the sample's summary."""
    _, batch, events = events_of(split)
    torch.manual_seed(1)
    layer = PersonalisedFeedForward(tiny.config(norm=norm), SIZE)
    summary = torch.randn(batch.size, tiny.MODEL.num_summary, tiny.MODEL.width)
    out = layer(events, summary).values
    generated = F.gelu(layer.mix(summary.transpose(1, 2)).transpose(1, 2))
    k, v = layer.keys_values(generated).unflatten(-1, (2, SIZE.num_heads, SIZE.head_dim)).unbind(2)
    k = F.normalize(k, dim=-1) * layer.key_norm.raw.sigmoid()
    ends = events.offsets.tolist()
    for sample, (first, last) in enumerate(itertools.pairwise(ends)):
        s = events.values[first:last]
        q = layer_norm(s).unflatten(-1, (SIZE.num_heads, SIZE.head_dim))
        scores = torch.einsum("qhd,khd->hqk", q, k[sample]) / SIZE.width**0.5
        assert scores.numel() == 0 or scores.abs().max() <= 1
        o = torch.einsum("hqk,khd->qhd", F.gelu(scores, approximate="tanh"), v[sample])
        expected = s + rms_norm((o + q).flatten(1))
        torch.testing.assert_close(out[first:last], expected, rtol=1e-5, atol=1e-5)
    other = summary.clone()
    other[5] += 1.0
    changed = (layer(events, other).values != out).any(1)
    mine = torch.zeros_like(changed)
    mine[ends[5] : ends[6]] = True
    assert ends[6] > ends[5] and changed[mine].all() and not changed[~mine].any()


def test_event_types_have_their_own_width_heads_depth_and_window(split):
    model = model_of(split, self_attention="window")
    first, second = (model.layers[0].branches[f"{name}_branch"] for name in ("impression", "click"))
    sizes = [branch.attention.size for branch in (first, second)]
    assert [(s.width, s.num_heads, s.num_layers, s.window) for s in sizes] == [(16, 2, 2, 3), (8, 1, 1, 2)]
    assert [branch.attention.qkv.in_features for branch in (first, second)] == [16, 8]
    assert list(model.layers[1].branches) == ["impression_branch"]  # the other type is one layer deep


@pytest.mark.parametrize("parts", [1, 2])
def test_o39_table_gradients_average_over_the_global_batch(parts):
    """Two ranks look up [0, 4] and [2, 5] with gradient 0.3: one process on the joined batch moves rows by 2 x 0.3 / 2.

    parts 1: the joined batch at once; 2: a rank's half at a time, sums divided by the count of both. lr is 2.
    """
    table = torch.nn.Embedding(6, 1)
    torch.nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=2.0)
    for ids in torch.tensor([[0, 4], [2, 5]]).chunk(1 if parts == 1 else 2):
        normalised_loss({"ctr": (0.3 * table(ids)).sum()}, {"ctr": 2}).backward()
    optimizer.step()
    expected = torch.tensor([-0.3, 0, -0.3, 0, -0.3, -0.3])
    torch.testing.assert_close(table.weight.flatten(), expected)
