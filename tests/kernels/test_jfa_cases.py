"""Worked cases of jagged attention: faults that others hit, with the right value, for each implementation on a CPU."""

from __future__ import annotations

import pytest
import torch

from kernels import Bias, explain, jagged_attention
from kernels.jagged import lengths_to_offsets
from kernels.padded_batch import row_index
from kernels.testing import LENGTH_PATTERNS, make_inputs

from . import jfa_checks as checks
from .bad_offsets import BAD_OFFSETS, ROWS

OURS = ["reference", "eager"]
ALL = [*OURS, "padded"]


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize(
    "check",
    [
        checks.empty_sequence_in_the_middle,
        checks.queries_without_keys,
        checks.everything_empty,
        checks.spare_rows_are_zero,
        checks.offsets_of_any_kind,
        checks.views_of_a_fused_buffer,
        checks.own_keys_only,
        checks.window_is_symmetric,
        checks.strict_products,
    ],
    ids=lambda check: check.__name__,
)
def test_check(check, impl):
    check(impl)


# The padded baseline gives results that depend on the longest length in the batch, so these two are not laws of it.
@pytest.mark.parametrize("impl", OURS)
@pytest.mark.parametrize("keywords", [{}, {"window": 5}], ids=["full", "window"])
def test_neighbours_do_not_matter(impl, keywords):
    checks.neighbours_do_not_matter(impl, **keywords)


@pytest.mark.parametrize("impl", OURS)
def test_keys_without_queries(impl):
    checks.keys_without_queries(impl)


def test_padded_keeps_neighbours_out():
    """O10 for the padded baseline, where the tail of the batch is the same: finite and equal."""
    inputs = make_inputs("jagged_attention", [65, 7, 64])
    plain = checks.run(inputs, "padded")
    spoiled = inputs.leaves()
    for x in (spoiled.q, spoiled.k, spoiled.v, spoiled.do):
        x.detach()[65:72] = float("nan")
    got = checks.run(spoiled, "padded")
    outside = [*range(65), *range(72, 136)]
    for name in ("o", "dq", "dk", "dv"):
        assert torch.equal(got[name][outside], plain[name][outside]), name


@pytest.mark.parametrize("impl", ["eager", "padded"])
def test_head_dimensions(impl):
    checks.last_column_counts(impl)


def test_bias():
    checks.bias_has_its_gradient("eager")


@pytest.mark.parametrize("impl", ["eager", "padded"])
@pytest.mark.parametrize("pattern", LENGTH_PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_patterns_against_reference(pattern, dtype, impl):
    """O13, O18, O20 and the tile edges among them."""
    # A fused kernel rounds the weights to bfloat16 before the second product, which the reference does not.
    roundings = 4.0 if dtype == torch.float32 else 8.0
    checks.against_reference(
        impl, make_inputs("jagged_attention", pattern.q, pattern.kv, dtype=dtype), roundings=roundings
    )


@pytest.mark.parametrize("impl", ["eager", "padded"])
@pytest.mark.parametrize("lengths", [(3, 0, 5, 100), (0, 0), (1,)], ids=str)
def test_shared_queries_against_reference(lengths, impl):
    checks.against_reference(impl, make_inputs("jagged_attention", lengths, shared_q=4))


@pytest.mark.parametrize("impl", ALL)
@pytest.mark.parametrize("lengths, heads", [((6,), 4), ((6,), 1), ((1,), 4), ((1,), 1)])
def test_no_dimension_is_lost(impl, lengths, heads):
    """O18: one sequence, one row, one head."""
    inputs = make_inputs("jagged_attention", lengths, num_heads=heads, head_dim=32)
    for name, value in checks.run(inputs, impl).items():
        assert value.shape == (lengths[0], heads, 32), name


@pytest.mark.parametrize("impl", ALL)
def test_a_hint_below_the_longest_length_is_an_error(impl):
    """O06: lengths [5, 300, 20] with a hint of 256."""
    inputs = make_inputs("jagged_attention", (5, 300, 20))
    with pytest.raises(ValueError, match=r"max_q_len: 256, but q_offsets holds a sequence of 300 rows"):
        jagged_attention(*inputs.args, max_q_len=256, impl=impl)
    with pytest.raises(ValueError, match=r"max_kv_len: 256, but q_offsets holds a sequence of 300 rows"):
        jagged_attention(*inputs.args, max_kv_len=256, impl=impl)
    cross = make_inputs("jagged_attention", (5, 3), (7, 300))
    with pytest.raises(ValueError, match=r"max_kv_len: 256, but kv_offsets holds a sequence of 300 rows"):
        jagged_attention(*cross.args, max_kv_len=256, impl=impl)


def test_row_index_passes_two_to_the_31():
    """O11: the element index of row 262,144 of a [T, 64, 128] tensor is 2^31, and the row table holds it."""
    rows = row_index(torch.tensor([262_144]), torch.tensor([1]), 8, 1, torch.empty(0, 64, 128), total=262_145)
    assert rows.dtype == torch.int64
    assert rows[0, 0, 0].item() * 128 == 2**31


@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_bad_offsets_are_named(kind):
    """O08."""
    bad, message = BAD_OFFSETS[kind]
    q = torch.randn(ROWS, 2, 8)
    with pytest.raises(ValueError, match=f"^q_offsets: {message}"):
        jagged_attention(q, q, q, bad)


def _call(**changes):
    q = torch.randn(16, 2, 8)
    arguments = {"q": q, "k": q, "v": q, "q_offsets": torch.tensor([0, 4, 16]), **changes}
    return jagged_attention(**arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"q": torch.randn(16, 16)}, r"q has shape \(16, 16\); allowed: \[rows, heads, head_dim\]"),
        ({"q": torch.ones(16, 2, 8, dtype=torch.int64)}, "q has dtype torch.int64; allowed: bfloat16"),
        ({"k": torch.randn(16, 2, 8).half()}, "k is torch.float16 on cpu; allowed: torch.float32 on cpu"),
        ({"v": torch.randn(16, 2, 4)}, r"v has heads, head_dim \(2, 4\); allowed: \(2, 8\)"),
        ({"v": torch.randn(15, 2, 8)}, "k has 16 rows, v 15; allowed: the same number"),
        ({"k": torch.randn(15, 2, 8), "v": torch.randn(15, 2, 8)}, "self-attention, but q has 16 rows and k 15"),
        ({"q_offsets": None}, "q_offsets and kv_offsets are both None"),
        ({"kv_offsets": torch.tensor([0, 4, 8, 16])}, "kv_offsets: 3 sequences; allowed: 2"),
        ({"kv_offsets": torch.tensor([0, 4, 16]), "window": 2}, "window with cross; allowed: self-attention only"),
        ({"q_offsets": None, "kv_offsets": torch.tensor([0, 16]), "window": 2}, "window with shared_q; allowed"),
        ({"window": -1}, "window is -1; allowed: None or an integer >= 0"),
        ({"window": 1.5}, "window is 1.5; allowed"),
        ({"scale": float("nan")}, "scale is nan; allowed: a finite number"),
        ({"schedule": 3}, "schedule is int; allowed: None or schedule.tile_schedule"),
        ({"precision": "fp4"}, "precision is 'fp4'; allowed"),
        ({"impl": "fast"}, "unknown impl 'fast'; allowed: auto, v4"),
        ({"bias": Bias(torch.zeros(3, 4))}, r"bias.table has shape \(3, 4\); allowed: \(2, buckets >= 1\)"),
        ({"bias": Bias(torch.zeros(2, 4).half())}, "bias.table is torch.float16 on cpu; allowed: torch.float32"),
        ({"bias": Bias(torch.zeros(2, 4), "absolute")}, "bias.positions is 'absolute'; allowed: 'relative' or time"),
        (
            {"bias": Bias(torch.zeros(2, 4), torch.arange(3))},
            r"bias.positions has shape \(3,\) on cpu; allowed: \(16,\)",
        ),
        (
            {"bias": Bias(torch.zeros(2, 4), torch.arange(16)), "kv_offsets": torch.tensor([0, 4, 16])},
            "bias with time stamps and cross; allowed: self-attention only",
        ),
        ({"bias": Bias(torch.zeros(2, 4)), "impl": "padded"}, "impl 'padded' has no bias"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_explain_names_the_choice_and_every_reason():
    inputs = make_inputs("jagged_attention", (3, 4))
    text = explain(jagged_attention, *inputs.args, window=2)
    assert "jagged_attention: eager <- chosen" in text
    assert len(text.splitlines()) == 7
    with pytest.raises(ValueError, match="allowed: jagged_attention, gdpa, block_attention"):
        explain(len, [])


def test_weight_gradients_ignore_the_spare_rows():
    """O05 through two linear layers: their gradients are the bits of the trimmed run."""
    torch.manual_seed(0)
    first, last = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
    x = torch.randn(904, 32)
    x[901:] = 0

    def gradients(rows: int):
        q, k, v = first(x[:rows]).view(rows, 3, 4, 8).unbind(1)
        o = jagged_attention(q, k, v, lengths_to_offsets(torch.tensor([130, 270, 501])), impl="eager")
        last(o.flatten(1))[:901].square().sum().backward()
        got = [p.grad.clone() for layer in (first, last) for p in layer.parameters()]
        first.zero_grad(), last.zero_grad()
        return got

    for got, expected in zip(gradients(904), gradients(901), strict=True):
        assert bool(got.isfinite().all())
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_inputs_of_one_buffer_keep_their_values():
    """The call changes none of its arguments."""
    inputs = make_inputs("jagged_attention", (3, 70), fused=True)
    before = [x.clone() for x in (inputs.q, inputs.k, inputs.v)]
    jagged_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    assert all(torch.equal(x, y) for x, y in zip(before, (inputs.q, inputs.k, inputs.v), strict=True))
