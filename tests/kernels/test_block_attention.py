"""block_attention: blocks from each sequence's own start, rotary inside the op, reference and eager against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kernels import Rotary, block_attention, explain, flops
from kernels.block_attention import block_attention_qkv
from kernels.block_attention.eager import blocks
from kernels.jagged import lengths_to_offsets
from kernels.rotary import apply_rotary
from kernels.testing import LENGTH_PATTERNS, assert_within_eager, make_inputs, poisoned

from .bad_offsets import BAD_OFFSETS, ROWS

IMPLS = ("reference", "eager")
both = pytest.mark.parametrize("impl", IMPLS)
SELF_PATTERNS = [pattern for pattern in LENGTH_PATTERNS if pattern.kv is None]


def offsets(*lengths, dtype=torch.int64):
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64), dtype)


def run(inputs, dtype=None, impl="eager", rotary=None, **kwargs):
    """(o, dq, dk, dv) on fresh leaves; spare rows of dO, which are NaN, included."""
    x = inputs.leaves(dtype)
    o = block_attention(x.q, x.k, x.v, x.q_offsets, impl=impl, rotary=rotary, **kwargs)
    o.backward(x.do)
    return o.detach(), x.q.grad, x.k.grad, x.v.grad


def rotary_of(inputs, interleaved=True, on=("q", "k", "v")):
    return Rotary(inputs.cos, inputs.sin, interleaved, on)


@both
@pytest.mark.parametrize("lengths", [(70, 70), (0, 70, 1, 128), (64, 64), (63, 65, 200)])
def test_o16_blocks_restart_with_each_sequence(impl, lengths):
    """q = 0 gives every visible key the same weight; v one-hot in the row shows which keys a row saw."""
    total = sum(lengths)
    zeros = torch.zeros(total, 1, total)
    seen = block_attention(zeros, zeros, torch.eye(total)[:, None], offsets(*lengths), impl=impl)[:, 0] > 0
    start = 0
    want = torch.zeros(total, total, dtype=torch.bool)
    for length in lengths:
        for i in range(length):
            first = start + i // 64 * 64
            want[start + i, first : min(first + 64, start + length)] = True
        start += length
    assert torch.equal(seen, want)
    if lengths == (70, 70):
        assert seen.sum() == 8264 == flops.block_pairs(lengths)


def test_block_list():
    starts, lengths = blocks(offsets(70, 0, 64, 5), 64)
    assert starts.tolist() == [0, 64, 70, 134] and lengths.tolist() == [64, 6, 64, 5]
    starts, lengths = blocks(offsets(), 64)
    assert starts.tolist() == [] and lengths.tolist() == []


def test_a_block_equals_full_attention_of_the_block_alone():
    inputs = make_inputs("block_attention", (130,), head_dim=8, dtype=torch.float64)
    o = block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    for rows in (slice(0, 64), slice(64, 128), slice(128, 130)):
        q, k, v = (x[rows].transpose(0, 1) for x in (inputs.q, inputs.k, inputs.v))
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)
        torch.testing.assert_close(o[rows], want, rtol=1e-12, atol=1e-12)


@both
def test_o01_empty_sequence_softmax(impl):
    def wide(values):
        x = torch.zeros(3, 1, 16)
        x[:, 0, 0] = torch.tensor(values)
        return x.requires_grad_()

    q, k, v = wide((1.0, 2, 3)), wide((1.0, 2, 3)), wide((1.0, 10, 100))
    with poisoned():
        o = block_attention(q, k, v, offsets(2, 0, 1), scale=1.0, impl=impl)
        do = torch.zeros_like(o)
        do[:, 0, 0] = 1
        o.backward(do)
    for got, want in (
        (o, (7.579527, 8.927174, 100)),
        (q.grad, (1.769507, 0.944942, 0)),
        (k.grad, (-3.659392, 3.659392, 0)),
        (v.grad, (0.388144, 1.611856, 1)),
    ):
        torch.testing.assert_close(got[:, 0, 0].detach(), torch.tensor(want), rtol=1e-5, atol=1e-6)
    assert q.grad[2].eq(0).all() and k.grad[2].eq(0).all()


@both
@pytest.mark.parametrize("lengths", [(0, 0, 0), ()])
@pytest.mark.parametrize("turned", [False, True])
def test_o04_empty_batch(impl, lengths, turned):
    inputs = make_inputs("block_attention", lengths, num_heads=4, head_dim=64)
    rotary = rotary_of(inputs) if turned else None
    assert all(x.shape == (0, 4, 64) for x in run(inputs, impl=impl, rotary=rotary))


@both
@pytest.mark.parametrize("turned", [False, True])
def test_o05_spare_rows_past_the_end(impl, turned):
    """Spare rows hold NaN in q, k, v and dO: zeros come out, and the rest equals the run without them."""
    spare = make_inputs("block_attention", (130, 0, 70), spare_rows=3)
    with poisoned():
        results = run(spare, impl=impl, rotary=rotary_of(spare) if turned else None)
    own = make_inputs("block_attention", (130, 0, 70))
    own.cos, own.sin = spare.cos[:200], spare.sin[:200]
    alone = run(own, impl=impl, rotary=rotary_of(own) if turned else None)
    for got, want in zip(results, alone, strict=True):
        assert got[200:].eq(0).all() and torch.equal(got[:200], want)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_o07_batch_mates_change_no_bit(turned, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(2)
        own = make_inputs("block_attention", (101,), seed=3)
        alone = run(own, rotary=rotary_of(own) if turned else None)
        for trial in range(10):
            mates = torch.randint(0, 300, (5,), generator=generator).tolist() if trial % 2 else [101] * 5
            place = trial % 6
            mates.insert(place, 101)
            batch = make_inputs("block_attention", mates, seed=50 + trial)
            rows = slice(sum(mates[:place]), sum(mates[:place]) + 101)
            for name in ("q", "k", "v", "do", "cos", "sin"):
                getattr(batch, name)[rows] = getattr(own, name)
            results = run(batch, rotary=rotary_of(batch) if turned else None)
            for got, want in zip(results, alone, strict=True):
                assert torch.equal(got[rows], want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", BAD_OFFSETS)
def test_o08_bad_offsets_are_named(kind):
    bad, message = BAD_OFFSETS[kind]
    x = torch.randn(ROWS, 2, 8)
    with pytest.raises(ValueError, match=f"^offsets: {message}"):
        block_attention(x, x, x, bad)


@both
def test_o09_offsets_of_any_integer_kind(impl):
    inputs = make_inputs("block_attention", (7, 0, 65, 3))
    want = run(inputs, impl=impl)
    strided = torch.stack([inputs.q_offsets, inputs.q_offsets + 99], dim=1).flatten()[::2]
    for other in (inputs.q_offsets.int(), strided, strided.int()):
        inputs.q_offsets = other
        assert all(torch.equal(a, b) for a, b in zip(run(inputs, impl=impl), want, strict=True))


@both
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("lengths", [(65, 1, 64), (63, 64, 127), (128, 129, 1)])
def test_o10_neighbours_are_never_read(impl, poison, lengths):
    inputs = make_inputs("block_attention", lengths)
    rotary = rotary_of(inputs)
    clean = run(inputs, impl=impl, rotary=rotary)
    middle = slice(lengths[0], lengths[0] + lengths[1])
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x[middle] = poison
    for got, want in zip(run(inputs, impl=impl, rotary=rotary), clean, strict=True):
        for rows in (slice(0, lengths[0]), slice(middle.stop, None)):
            assert torch.equal(got[rows], want[rows])


@both
def test_blocks_of_one_sequence_do_not_see_each_other(impl):
    inputs = make_inputs("block_attention", (192,))
    clean = run(inputs, impl=impl)
    for x in (inputs.q, inputs.k, inputs.v, inputs.do):
        x[64:128] = float("nan")
    for got, want in zip(run(inputs, impl=impl), clean, strict=True):
        assert torch.equal(got[:64], want[:64]) and torch.equal(got[128:], want[128:])


@both
def test_o12_views_of_a_fused_buffer(impl):
    views = make_inputs("block_attention", (100, 0, 30), fused=True)
    assert not views.q.is_contiguous()
    leaf = torch.cat([views.q, views.k, views.v], dim=-1).requires_grad_()
    q, k, v = leaf.split(16, dim=-1)
    o = block_attention(q, k, v, views.q_offsets, impl=impl)
    o.backward(views.do)
    separate = run(views, impl=impl)
    assert torch.equal(o.detach(), separate[0])
    assert torch.equal(leaf.grad, torch.cat(separate[1:], dim=-1))


@both
@pytest.mark.parametrize("head_dim", [1, 7, 40, 72, 80, 128, 192])
def test_o14_any_head_dim_uses_its_last_column(impl, head_dim):
    q, v = torch.zeros(73, 2, head_dim), torch.zeros(73, 2, head_dim)
    q[0, :, -1], v[0] = 5.0, 1.0
    o = block_attention(q, q.clone(), v, offsets(70, 3), scale=1.0, impl=impl)
    want = math.exp(25) / (math.exp(25) + 63)
    torch.testing.assert_close(o[0], torch.full((2, head_dim), want), rtol=1e-6, atol=0)
    torch.testing.assert_close(o[1], torch.full((2, head_dim), 1 / 64), rtol=1e-6, atol=0)


@both
@pytest.mark.parametrize(("length", "heads"), [(6, 4), (6, 1), (1, 4), (1, 1)])
def test_o18_batch_of_one_keeps_its_shape(impl, length, heads):
    inputs = make_inputs("block_attention", (length,), num_heads=heads, head_dim=32)
    assert all(x.shape == (length, heads, 32) for x in run(inputs, impl=impl))


@both
@pytest.mark.parametrize("score", [80.0, 1e4, -1e4])
def test_large_scores_stay_finite(impl, score):
    q, k = torch.full((70, 1, 4), score), torch.ones(70, 1, 4)
    q.requires_grad_()
    o = block_attention(q, k, torch.ones(70, 1, 4), offsets(70), scale=1.0, impl=impl)
    o.sum().backward()
    torch.testing.assert_close(o, torch.ones(70, 1, 4))
    assert q.grad.isfinite().all()


@both
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("on", [("q", "k", "v"), ("q", "k"), ("v",), ()])
def test_rotary_inside_equals_rotary_outside(impl, interleaved, on):
    """The fused op, values and gradients, against apply_rotary followed by the op without rotary."""
    inputs = make_inputs("block_attention", (70, 0, 9), dtype=torch.float64)
    fused = run(inputs, impl=impl, rotary=rotary_of(inputs, interleaved, on))
    x = inputs.leaves()
    turned = [
        apply_rotary(t, inputs.cos, inputs.sin, interleaved) if name in on else t
        for name, t in (("q", x.q), ("k", x.k), ("v", x.v))
    ]
    o = block_attention(*turned, x.q_offsets, impl=impl)
    o.backward(x.do)
    for got, want in zip(fused, (o.detach(), x.q.grad, x.k.grad, x.v.grad), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@both
def test_rotation_is_done_in_float32(impl):
    """Sequences of one row return R(theta) v itself: one rounding to bfloat16, not those of tables and products too."""
    inputs = make_inputs("block_attention", (1,) * 64, head_dim=32, dtype=torch.bfloat16)
    o = block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets, rotary=rotary_of(inputs), impl=impl)
    exact = apply_rotary(inputs.v.double(), inputs.cos, inputs.sin)
    assert ((o.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@pytest.mark.parametrize("pattern", SELF_PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_eager_is_as_exact_as_the_reference(pattern, dtype, turned):
    inputs = make_inputs("block_attention", pattern.q, dtype=dtype)
    rotary = rotary_of(inputs) if turned else None
    exact = run(inputs, torch.float64, "reference", rotary)
    with poisoned():
        eager = run(inputs, impl="eager", rotary=rotary)
    reference = run(inputs, impl="reference", rotary=rotary)
    for name, got, same_dtype, want in zip(("o", "dq", "dk", "dv"), eager, reference, exact, strict=True):
        assert_within_eager(got, same_dtype, want, name=name, roundings=4)


@both
@pytest.mark.parametrize("interleaved", [None, True, False])
def test_gradcheck(impl, interleaved):
    inputs = make_inputs("block_attention", (3, 0, 6), head_dim=4, dtype=torch.float64).leaves()
    rotary = None if interleaved is None else rotary_of(inputs, interleaved)

    def call(q, k, v):
        return block_attention(q, k, v, inputs.q_offsets, block_size=4, rotary=rotary, impl=impl)

    assert torch.autograd.gradcheck(call, (inputs.q, inputs.k, inputs.v))


def test_reference_backward_is_autograd_of_its_forward():
    from kernels.block_attention import reference

    x = make_inputs("block_attention", (70, 0, 9), dtype=torch.float64).leaves()
    settings_ = {"block_size": 64, "scale": 0.3, "rotary": rotary_of(x)}
    o = reference.forward(x.q, x.k, x.v, x.q_offsets, **settings_)
    automatic = torch.autograd.grad(o, (x.q, x.k, x.v), x.do)
    for got, want in zip(reference.backward(x.do, x.q, x.k, x.v, o, x.q_offsets, **settings_), automatic, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=0, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    heads=st.integers(1, 3),
    half_dim=st.integers(1, 10),
    block_size=st.sampled_from([1, 7, 16, 64]),
    interleaved=st.sampled_from([None, True, False]),
    on=st.sampled_from([("q", "k", "v"), ("q", "k"), ("v",)]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_eager_equals_reference_for_any_lengths(lengths, dtype, heads, half_dim, block_size, interleaved, on, index):
    inputs = make_inputs(
        "block_attention",
        lengths,
        num_heads=heads,
        head_dim=2 * half_dim,
        dtype=dtype,
        spare_rows=2,
        offsets_dtype=index,
    )
    rotary = None if interleaved is None else rotary_of(inputs, interleaved, on)
    exact = run(inputs, torch.float64, "reference", rotary, block_size=block_size)
    reference = run(inputs, impl="reference", rotary=rotary, block_size=block_size)
    eager = run(inputs, impl="eager", rotary=rotary, block_size=block_size)
    for got, same_dtype, want in zip(eager, reference, exact, strict=True):
        assert_within_eager(got, same_dtype, want, roundings=8)


@both
@pytest.mark.parametrize("turned", [False, True])
def test_opcheck(impl, turned):
    x = make_inputs("block_attention", (3, 0, 70), fused=True)
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    tables = (x.cos, x.sin, True, "qv") if turned else (None, None, True, "")
    arguments = (64, 0.5, *tables, impl)
    torch.library.opcheck(torch.ops.gem_kernels.block_attention, (q, k, v, x.q_offsets, *arguments))
    saved = (x.do, x.q, x.k, x.v, torch.zeros_like(x.do), x.q_offsets)
    torch.library.opcheck(torch.ops.gem_kernels.block_attention_backward, (*saved, *arguments))


@both
def test_o43_o45_the_flop_counter_sees_visible_pairs(impl):
    inputs = make_inputs("block_attention", (70, 70), num_heads=1, head_dim=64).leaves()
    with FlopCounterMode(display=False) as forward:
        o = block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets, impl=impl)
    with FlopCounterMode(display=False) as backward:
        o.backward(inputs.do)
    assert forward.get_total_flops() == 2_115_584 == flops.block_attention((70, 70), 1, 64)
    assert backward.get_total_flops() == 2 * 2_115_584


def test_compiles_without_a_graph_break():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x, ends, cos, sin):
            q, k, v = self.projection(x).view(-1, 2, 12).split(4, dim=-1)
            return block_attention(q, k, v, ends, rotary=Rotary(cos, sin)).flatten(1) + x

    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ((5, 0, 70), (4, 30)):
        x, angle = torch.randn(sum(lengths), 8), torch.randn(sum(lengths), 2)
        arguments = x, offsets(*lengths), angle.cos(), angle.sin()
        want, got = layer(*arguments), compiled(*arguments)
        torch.testing.assert_close(got, want)
        for one, other in zip(
            torch.autograd.grad(want.sum(), layer.parameters()),
            torch.autograd.grad(got.sum(), layer.parameters()),
            strict=True,
        ):
            torch.testing.assert_close(other, one)


def test_bad_arguments_say_what_is_allowed():
    x, ends = torch.randn(4, 2, 8), offsets(4)
    odd, table = torch.randn(4, 2, 7), torch.zeros(4, 4)
    for arguments, kwargs, message in (
        ((x, x, x), {"block_size": 0}, ">= 1"),
        ((x, x, x), {"block_size": 64.0}, ">= 1"),
        ((x, x, x), {"scale": float("inf")}, "finite"),
        ((x, x, x), {"impl": "fastest"}, "allowed: auto, tlx, triton, eager, reference"),
        ((x, x[:3], x[:3]), {}, "4 rows and k 3"),
        ((x, x, x), {"rotary": (table, table)}, r"Rotary\(cos, sin\)"),
        ((odd, odd, odd), {"rotary": Rotary(table, table)}, "head_dim 7.*even"),
        ((x, x, x), {"rotary": Rotary(table[:, :2], table)}, r"cos has shape \(4, 2\); allowed: \(4, 4\)"),
        (
            (x, x, x),
            {"rotary": Rotary(table, table.double())},
            "sin is torch.float64; allowed: .*float32",
        ),
        ((x, x, x), {"rotary": Rotary(table.clone().requires_grad_(), table)}, "cos requires a gradient"),
    ):
        with pytest.raises(ValueError, match=message):
            block_attention(*arguments, ends, **kwargs)
    with pytest.raises(ValueError, match="allowed: distinct names out of q, k, v"):
        Rotary(table, table, on=("q", "o"))


def test_explain_names_the_choice():
    x = torch.randn(4, 2, 8)
    assert "block_attention: eager <- chosen" in explain(block_attention, x, x, x, offsets(4))


@pytest.mark.parametrize("rotary", [True, False])
def test_a_packed_buffer_gives_the_same_rows_and_one_gradient(rotary):
    """Rows, gradients and what lies past the end, against the op on three views."""
    offsets = torch.tensor([0, 70, 70, 75, 140])
    wide = torch.randn(150, 4, 2, 8, dtype=torch.float64)
    angle = torch.randn(150, 4)
    tables = Rotary(angle.cos(), angle.sin()) if rotary else None
    weight = torch.randn(150, 2, 8, dtype=torch.float64)
    results = []
    for packed in (True, False):
        x = wide[:, :3].detach().requires_grad_()
        if packed:
            o = block_attention_qkv(x, offsets, rotary=tables, impl="eager")
        else:
            o = block_attention(*x.unbind(1), offsets, rotary=tables, impl="eager")
        (o * weight).sum().backward()
        results.append((o.detach(), x.grad))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert not results[0][1][140:].any()
    own = wide[:, :3].contiguous().requires_grad_()
    parts = (offsets, 64, 0.3, *((tables.cos, tables.sin) if rotary else (None, None)), True, "qkv" if rotary else "")
    torch.library.opcheck(torch.ops.gem_kernels.block_attention_qkv, (own, *parts, "eager"))
    done = torch.randn(150, 2, 8, dtype=torch.float64)
    backward = torch.ops.gem_kernels.block_attention_qkv_backward
    torch.library.opcheck(backward, (done, own.detach(), done, *parts, "eager"))
    with pytest.raises(ValueError, match="block_attention: qkv is of shape"):
        block_attention_qkv(wide, offsets)
