"""MX attention and GDPA against a per-sequence loop on the public quantiser, and worked cases of jagged batches."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import mxfp8
from kernels.block_attention import Rotary
from kernels.gdpa import activations
from kernels.mxfp8 import RECIPES, Recipe
from kernels.testing import poisoned, relative_error

RCEIL, HIGH = RECIPES["rceil"], Recipe(attention=())
SQUARE = Recipe(attention_block=(32, 32))
LOOPED = {"rceil": RCEIL, "square": SQUARE, "naive": RECIPES["naive"], "e5m2": Recipe(gradient="e5m2")}
OPS = ("softmax", "gelu_tanh", "silu")


def offsets_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64)


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(op, q, k, v, q_offsets, kv_offsets, recipe, window=None):
    if op == "softmax":
        return mxfp8.jagged_attention_mx(q, k, v, q_offsets, kv_offsets, window=window, recipe=recipe)
    scale = q.shape[-1] ** -0.5
    return mxfp8.gdpa_mx(q, k, v, q_offsets, kv_offsets, activation=op, scale=scale, recipe=recipe)


def run(op, q, k, v, q_offsets, kv_offsets, do, recipe, window=None):
    """(o, dq, dk, dv)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    o = call(op, q, k, v, q_offsets, kv_offsets, recipe, window)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def one_sequence(op, q, k, v, do, recipe, window=None):
    """(o, dq, dk, dv) of one head of one sequence, [L, D], written out in float64 with the public quantiser."""
    scale = q.shape[1] ** -0.5

    def value(x, name, axis):
        if name not in recipe.attention:
            return x.double()
        turn = recipe.hadamard if name in ("q", "k", "v", "do") and axis == 1 else None
        q = mxfp8.quantize(
            x.float(),
            axis=axis,
            block=recipe.attention_block,
            scale_mode=recipe.scale_mode,
            dtype=recipe.dtype(name),
            hadamard=turn,
        )
        return q.dequantize(torch.float64, rotated=True)

    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))[None]
    seen = torch.ones(len(q), len(k), dtype=torch.bool) if window is None else (i - j).abs() <= window
    s = scale * value(q, "q", 1) @ value(k, "k", 1).T
    dp = value(do, "do", 1) @ value(v, "v", 1).T
    if op == "softmax":
        top = s.masked_fill(~seen, -torch.inf).amax(1, keepdim=True)
        e = torch.exp(s - top) * seen
        o = value(e, "p", 1) @ value(v, "v", 0) / e.sum(1, keepdim=True)
        p = e / e.sum(1, keepdim=True)
        ds = p * (dp - (do.double() * o).sum(1, keepdim=True))
    else:
        p = activations.value(op, s)
        o = value(p, "p", 1) @ value(v, "v", 0)
        ds = dp * activations.derivative(op, s)
    dv = value(p, "p", 0).T @ value(do, "do", 0)
    dq = scale * value(ds, "ds", 1) @ value(k, "k", 0)
    dk = scale * value(ds, "ds", 0).T @ value(q, "q", 0)
    return o, dq, dk, dv


def loop(op, q, k, v, q_offsets, kv_offsets, do, recipe, window=None):
    results = [torch.zeros(x.shape, dtype=torch.float64) for x in (q, q, k, v)]
    for (a, b), (c, d) in zip(
        itertools.pairwise(q_offsets.tolist()), itertools.pairwise(kv_offsets.tolist()), strict=True
    ):
        if b > a and d > c:
            for h in range(q.shape[1]):
                parts = one_sequence(op, q[a:b, h], k[c:d, h], v[c:d, h], do[a:b, h], recipe, window)
                for result, part, rows in zip(results, parts, ((a, b), (a, b), (c, d), (c, d)), strict=True):
                    result[slice(*rows), h] = part
    return results


CASES = {
    "self": ((20, 0, 12, 70, 33), None),
    "cross": ((20, 5, 0, 70), (64, 0, 3, 33)),
    "single": ((1,), (1,)),
}


def inputs(case, head_dim=48, heads=2):
    q_lengths, kv_lengths = CASES[case]
    q_offsets = offsets_of(*q_lengths)
    kv_offsets = q_offsets if kv_lengths is None else offsets_of(*kv_lengths)
    rows = int(q_offsets[-1]) + 3, int(kv_offsets[-1]) + 3
    q, do = (normal(rows[0], heads, head_dim, seed=seed) for seed in (1, 2))
    k, v = (normal(rows[1], heads, head_dim, seed=seed) for seed in (3, 4))
    return q, k, v, q_offsets, kv_offsets, do


@pytest.mark.parametrize("recipe", LOOPED.values(), ids=LOOPED.keys())
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_written_out_loop(case, op, recipe):
    q, k, v, q_offsets, kv_offsets, do = inputs(case)
    ours = run(op, q, k, v, q_offsets, kv_offsets, do, recipe)
    right = loop(op, q, k, v, q_offsets, kv_offsets, do, recipe)
    exact = loop(op, q, k, v, q_offsets, kv_offsets, do, HIGH)
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, right, exact, strict=True):
        # A value within float32 rounding of a tie may fall to the other side: a few elements by one step.
        assert relative_error(a, b) < 5e-3, name
        if case != "single":  # one key has no gradient through softmax: what is left there is rounding
            assert relative_error(a, c) < 0.12, name
            assert relative_error(a, c) > 10 * relative_error(a, b), name


@pytest.mark.parametrize("op", ["softmax", "silu"])
def test_blocks_lie_where_the_recipe_says(op):
    """Columns spread over 2^24, against each other in q and k, v and do: only now does it matter where a block lies."""
    q, k, v, q_offsets, kv_offsets, do = inputs("self")
    spread = torch.exp2(torch.linspace(-12, 12, 48)[torch.randperm(48, generator=torch.Generator().manual_seed(7))])
    arguments = q * spread, k / spread, v * spread, q_offsets, kv_offsets, do / spread
    rows, square = (run(op, *arguments, recipe) for recipe in (RCEIL, SQUARE))
    for recipe, ours in ((RCEIL, rows), (SQUARE, square)):
        for name, a, b in zip(("o", "dq", "dk", "dv"), ours, loop(op, *arguments, recipe), strict=True):
            assert relative_error(a, b) < 1e-2, (recipe.attention_block, name)
    assert max(relative_error(a, b.double()) for a, b in zip(rows, square, strict=True)) > 0.05


@pytest.mark.parametrize("operand", mxfp8.Recipe().attention)
def test_each_operand_is_quantised_only_when_named(operand):
    q, k, v, q_offsets, kv_offsets, do = inputs("self")
    recipe = Recipe(attention=(operand,))
    ours = run("softmax", q, k, v, q_offsets, kv_offsets, do, recipe)
    right = loop("softmax", q, k, v, q_offsets, kv_offsets, do, recipe)
    exact = loop("softmax", q, k, v, q_offsets, kv_offsets, do, HIGH)
    # o, dq, dk, dv that must change and that must not (P reaches dq and dk through D = rowsum(do o) alone).
    changed, same = {
        "q": ((0, 1, 2, 3), ()),
        "k": ((0, 1, 2, 3), ()),
        "v": ((0, 1, 2), (3,)),
        "p": ((0, 3), ()),
        "ds": ((1, 2), (0, 3)),
        "do": ((1, 2, 3), (0,)),
    }[operand]
    for i, (a, b, c) in enumerate(zip(ours, right, exact, strict=True)):
        assert relative_error(a, b) < 5e-3
        assert i not in changed or relative_error(a, c) > 1e-2
        assert i not in same or relative_error(a, c) < 1e-6


@pytest.mark.parametrize("op", OPS)
def test_high_precision_recipe_is_plain_attention(op):
    q, k, v, q_offsets, kv_offsets, do = inputs("cross")
    for ours, right in zip(
        run(op, q, k, v, q_offsets, kv_offsets, do, HIGH),
        loop(op, q, k, v, q_offsets, kv_offsets, do, HIGH),
        strict=True,
    ):
        assert relative_error(ours, right) < 2e-6


@pytest.mark.parametrize("window", [0, 5, 40])
def test_window(window):
    q, k, v, offsets, _, do = inputs("self")
    ours = run("softmax", q, k, v, offsets, None, do, RCEIL, window)
    right = loop("softmax", q, k, v, offsets, offsets, do, RCEIL, window)
    for a, b in zip(ours, right, strict=True):
        assert relative_error(a, b) < 5e-3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("recipe", [RCEIL, SQUARE], ids=["rows", "square"])
def test_outlier_of_one_sequence_changes_no_bit_of_another(op, recipe):
    offsets = offsets_of(20, 12)
    q, k, do = (normal(32, 1, 32, seed=seed) for seed in (1, 2, 3))
    v = torch.full((32, 1, 32), 0.0005)
    v[20:] = 0.0003
    before = run(op, q, k, v, offsets, offsets, do, recipe)
    for spoiled in (q, k, v, do):
        spoiled[20:] *= 1e6
    after = run(op, q, k, v, offsets, offsets, do, recipe)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:20], b[:20]) and not torch.equal(a[20:], b[20:])
    if op == "softmax":
        assert torch.allclose(before[0][:20], torch.tensor(0.00048828125), rtol=0.04)


@pytest.mark.parametrize("op", OPS)
def test_result_depends_on_the_own_sequence_alone(op):
    lengths = [40, 7, 0, 100, 40]
    offsets = offsets_of(*lengths)
    q, k, v, do = (normal(int(offsets[-1]), 2, 32, seed=seed) for seed in (1, 2, 3, 4))
    together = run(op, q, k, v, offsets, offsets, do, RCEIL)
    for start, end in itertools.pairwise(offsets.tolist()):
        part = slice(start, end)
        alone = run(op, q[part], k[part], v[part], offsets_of(end - start), None, do[part], RCEIL)
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a[part], b)


@pytest.mark.parametrize("op", OPS)
def test_empty_pairs_and_rows_past_the_end_are_zeros(op):
    q, k, v, q_offsets, kv_offsets, do = inputs("cross")
    for x in (q, k, v, do):
        x[-3:] = float("nan")
    with poisoned():
        o, dq, dk, dv = run(op, q, k, v, q_offsets, kv_offsets, do, RCEIL)
    assert all(x.isfinite().all() for x in (o, dq, dk, dv))
    assert all((x[20:25] == 0).all() and (x[-3:] == 0).all() for x in (o, dq))  # queries without keys
    assert all((x[64:67] == 0).all() and (x[-3:] == 0).all() for x in (dk, dv))  # keys without queries


def test_empty_batches():
    for offsets in (offsets_of(), offsets_of(0, 0, 0)):
        x = torch.zeros(0, 2, 32)
        for op in OPS:
            for result in run(op, x, x, x, offsets, None, x, RCEIL):
                assert result.shape == (0, 2, 32)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [16, 64])
def test_hadamard_leaves_the_function_alone(op, head_dim):
    q, k, v, q_offsets, kv_offsets, do = inputs("self", head_dim)
    turned = run(op, q, k, v, q_offsets, kv_offsets, do, replace(HIGH, hadamard=3))
    for a, b in zip(turned, run(op, q, k, v, q_offsets, kv_offsets, do, HIGH), strict=True):
        assert relative_error(a, b) < 1e-5
    low = run(op, q, k, v, q_offsets, kv_offsets, do, replace(RCEIL, hadamard=3))
    plain = run(op, q, k, v, q_offsets, kv_offsets, do, RCEIL)
    for a, b, c in zip(low, plain, turned, strict=True):
        assert relative_error(a, c) < 0.12 and not torch.equal(a, b)


def test_shared_queries():
    kv_offsets = offsets_of(64, 0, 3)
    q, k, v, do = (
        normal(5, 2, 32, seed=1),
        normal(67, 2, 32, seed=2),
        normal(67, 2, 32, seed=3),
        normal(3, 5, 2, 32, seed=4),
    )
    shared = run("softmax", q, k, v, None, kv_offsets, do, RCEIL)
    apart = run("softmax", q.repeat(3, 1, 1), k, v, offsets_of(5, 5, 5), kv_offsets, do.flatten(0, 1), RCEIL)
    assert shared[0].shape == (3, 5, 2, 32) and torch.equal(shared[0].flatten(0, 1), apart[0])
    assert torch.allclose(shared[1], apart[1].view(3, 5, 2, 32).sum(0), atol=1e-6)
    assert torch.equal(shared[2], apart[2]) and torch.equal(shared[3], apart[3])


@pytest.mark.parametrize("turned", [False, True])
def test_block_attention(turned):
    offsets = offsets_of(70, 0, 64, 3)
    blocks = offsets_of(64, 6, 64, 3)
    q, k, v, do = (normal(137, 2, 32, seed=seed) for seed in (1, 2, 3, 4))
    rotary = None
    if turned:
        angle = torch.rand(137, 16, generator=torch.Generator().manual_seed(5)) * 6
        rotary = Rotary(angle.cos(), angle.sin(), on=("q", "k"))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = mxfp8.block_attention_mx(*inputs, offsets, rotary=rotary, recipe=RCEIL)
    if turned:
        pairs = [torch.view_as_complex(x.detach().unflatten(-1, (16, 2)).contiguous()) for x in (q, k)]
        factor = torch.polar(torch.ones(137, 16), angle)[:, None]
        q, k = (torch.view_as_real(x * factor).flatten(-2) for x in pairs)
    right = loop("softmax", q.detach(), k.detach(), v.detach(), blocks, blocks, do, RCEIL)
    assert relative_error(o.detach(), right[0]) < 5e-3
    grads = torch.autograd.grad(o, inputs, do)
    if not turned:
        for ours, expected in zip(grads, right[1:], strict=True):
            assert relative_error(ours, expected) < 5e-3


def test_small_chunks_change_nothing(monkeypatch):
    q, k, v, q_offsets, kv_offsets, do = inputs("self")
    whole = run("softmax", q, k, v, q_offsets, kv_offsets, do, RCEIL)
    monkeypatch.setitem(sys.modules["kernels.mxfp8.attention"].GROUP_ELEMENTS, "cpu", 1)
    for a, b in zip(whole, run("softmax", q, k, v, q_offsets, kv_offsets, do, RCEIL), strict=True):
        assert torch.equal(a, b)


def test_strides_and_offset_dtypes_change_nothing():
    q, k, v, q_offsets, kv_offsets, do = inputs("cross")
    plain = run("softmax", q, k, v, q_offsets, kv_offsets, do, RCEIL)
    fused = torch.stack([k, v], 1)
    strided = torch.stack([q_offsets, q_offsets], 1)[:, 0]
    other = run("softmax", q, fused[:, 0], fused[:, 1], strided.int(), kv_offsets.int(), do, RCEIL)
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


def test_bfloat16_keeps_dtype_and_rounds_once():
    q, k, v, q_offsets, kv_offsets, do = inputs("cross")
    half = run("softmax", *(x.bfloat16() for x in (q, k, v)), q_offsets, kv_offsets, do.bfloat16(), RCEIL)
    right = loop(
        "softmax", *(x.bfloat16().float() for x in (q, k, v)), q_offsets, kv_offsets, do.bfloat16().float(), RCEIL
    )
    for a, b in zip(half, right, strict=True):
        assert a.dtype == torch.bfloat16 and relative_error(a, b) < 1e-2


@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_op_contract(activation):
    q, k, v, q_offsets, kv_offsets, _ = inputs("cross")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    arguments = (q, k, v, q_offsets, kv_offsets, 0.2, None, None, activation, SQUARE.encode())
    torch.library.opcheck(torch.ops.gem_kernels.mx_attention, arguments)


def test_flops_count_useful_pairs():
    x = normal(8, 2, 32, seed=1).requires_grad_()
    offsets = offsets_of(3, 0, 5)
    for window, pairs in ((None, 34), (1, 7 + 13)):
        with FlopCounterMode(display=False) as counter:
            o = mxfp8.jagged_attention_mx(x, x, x, offsets, window=window, recipe=RCEIL)
        assert counter.get_total_flops() == 4 * 2 * 32 * pairs
        with FlopCounterMode(display=False) as counter:
            o.sum().backward()
        assert counter.get_total_flops() == 8 * 2 * 32 * pairs
    with FlopCounterMode(display=False) as counter:
        mxfp8.block_attention_mx(x, x, x, offsets, block_size=2, recipe=RCEIL)
    assert counter.get_total_flops() == 4 * 2 * 32 * (4 + 1 + 4 + 4 + 1)


def test_compiles_without_a_graph_break():
    q, k, v, q_offsets, kv_offsets, _ = inputs("cross")

    def layer(q, k, v):
        return mxfp8.jagged_attention_mx(q.tanh(), k, v, q_offsets, kv_offsets, recipe=SQUARE) * 2

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(q, k, v), layer(q, k, v))


def test_bad_arguments_are_named():
    x, offsets = torch.ones(4, 2, 32), offsets_of(4)
    with pytest.raises(ValueError, match="recipe: NoneType"):
        mxfp8.jagged_attention_mx(x, x, x, offsets, recipe=None)
    with pytest.raises(ValueError, match="window: 3"):
        mxfp8.jagged_attention_mx(x, x, x, offsets, offsets.clone(), window=3, recipe=RCEIL)
    with pytest.raises(ValueError, match="k: shape"):
        mxfp8.gdpa_mx(x, x[..., :16], x, offsets, recipe=RCEIL)
    with pytest.raises(ValueError, match="unknown name 'tanh'"):
        mxfp8.gdpa_mx(x, x, x, offsets, activation="tanh", recipe=RCEIL)
    with pytest.raises(ValueError, match="kv_offsets: missing"):
        mxfp8.jagged_attention_mx(x, x, x, None, recipe=RCEIL)
    with pytest.raises(ValueError, match="kv_offsets: 2 sequences"):
        mxfp8.gdpa_mx(x, x, x, offsets, offsets_of(2, 2), recipe=RCEIL)
    with pytest.raises(ValueError, match="block_size: 0"):
        mxfp8.block_attention_mx(x, x, x, offsets, block_size=0, recipe=RCEIL)
