"""norm, norm_rotary and pffn against torch's own norms, float64 and finite differences."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kernels import flops, gdpa
from kernels.fused_norm import REGISTRIES, norm, norm_rotary, pffn
from kernels.gdpa.api import REGISTRY as GDPA
from kernels.jagged import lengths_to_offsets
from kernels.rotary import apply_rotary
from kernels.testing import LENGTH_PATTERNS, assert_within_eager, make_inputs, poisoned

KINDS = ("layer", "rms")
IMPLS = ("reference", "eager")
kinds = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("impl", IMPLS)
NOT_SHARED = [pattern for pattern in LENGTH_PATTERNS if pattern.name != "no_sequences"] + [LENGTH_PATTERNS[2]]


def offsets(*lengths):
    return lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))


def torch_norm(x, kind, eps=1e-5):
    shape = x.shape[-1:]
    functional = torch.nn.functional
    return functional.layer_norm(x, shape, eps=eps) if kind == "layer" else functional.rms_norm(x, shape, eps=eps)


@kinds
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    columns=st.integers(1, 70),
    offset=st.sampled_from([0.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_norm_is_torchs(kind, shape, columns, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, columns, generator=generator, dtype=torch.float64) + offset
    x.requires_grad_()
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    y, want = norm(x, kind=kind), torch_norm(x, kind)
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-9)
    (got,), (exact,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(want, x, dy)
    torch.testing.assert_close(got, exact, rtol=1e-8, atol=1e-8)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norm_is_as_exact_as_torchs(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(40, 200, generator=generator) * 3 + 5).to(dtype)
    dy = torch.randn(40, 200, generator=generator).to(dtype)

    def call(function, x, dy):
        x = x.clone().requires_grad_()
        y = function(x)
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    exact = call(lambda x: torch_norm(x, kind), values.double(), dy.double())
    eager = call(lambda x: torch_norm(x, kind), values, dy)
    for got, same_dtype, want in zip(call(lambda x: norm(x, kind=kind), values, dy), eager, exact, strict=True):
        assert_within_eager(got, same_dtype, want, roundings=4)


@kinds
def test_constant_and_zero_rows_stay_finite(kind):
    x = torch.stack([torch.zeros(16), torch.full((16,), 1e4), torch.full((16,), -3.0)]).requires_grad_()
    y = norm(x, kind=kind)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert y[0].eq(0).all()
    if kind == "layer":
        assert y.eq(0).all()


@kinds
@pytest.mark.parametrize("columns", [1, 5, 40, 128, 200, 512])
def test_a_row_depends_on_that_row_alone(kind, columns):
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(300, columns, generator=generator) * 3 for _ in range(2))

    def call(rows):
        leaf = x[rows].clone().requires_grad_()
        y = norm(leaf, kind=kind)
        return y.detach(), torch.autograd.grad(y, leaf, dy[rows])[0]

    whole = call(slice(None))
    for rows in (slice(0, 1), slice(5, 7), slice(299, 300), slice(11, 28)):
        for got, want in zip(call(rows), whole, strict=True):
            assert torch.equal(got, want[rows])


@kinds
@pytest.mark.parametrize("interleaved", [True, False])
def test_norm_rotary_is_norm_then_rotary(kind, interleaved):
    x = make_inputs("block_attention", (9, 0, 5), head_dim=12, dtype=torch.float64).leaves()
    fused = norm_rotary(x.q, x.cos, x.sin, interleaved, kind=kind)
    separate = apply_rotary(norm(x.q, kind=kind), x.cos, x.sin, interleaved)
    torch.testing.assert_close(fused, separate, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(fused, x.q, x.do), torch.autograd.grad(separate, x.q, x.do), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@kinds
def test_norm_rotary_rounds_once(kind):
    x = make_inputs("block_attention", (30,), head_dim=32, dtype=torch.bfloat16)
    want = norm_rotary(x.q.float(), x.cos, x.sin, kind=kind).bfloat16()
    assert torch.equal(norm_rotary(x.q, x.cos, x.sin, kind=kind), want)


@kinds
def test_gradcheck_norms(kind):
    x = make_inputs("block_attention", (2, 0, 3), head_dim=4, dtype=torch.float64).leaves()
    assert torch.autograd.gradcheck(lambda q: norm(q, kind=kind), (x.q,))
    assert torch.autograd.gradcheck(lambda q: norm_rotary(q, x.cos, x.sin, kind=kind), (x.q,))


def pffn_by_parts(s, k, v, q_offsets, kv_offsets, **settings_):
    """The equations of the source with torch's norms and the gdpa op."""
    q = torch.nn.functional.layer_norm(s.flatten(1), (s[0].numel(),) if len(s) else s.shape[1:].numel(), eps=1e-5)
    u = gdpa(q.view(s.shape), k, v, q_offsets, kv_offsets, **settings_).flatten(1) + q
    return torch.nn.functional.rms_norm(u, u.shape[1:], eps=1e-5).view(s.shape) + s


def run(inputs, dtype=None, impl="eager", **kwargs):
    x = inputs.leaves(dtype)
    out = pffn(*x.args, impl=impl, **kwargs)
    out.backward(x.do)
    return out.detach(), x.q.grad, x.k.grad, x.v.grad


@both
@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_tanh"])
def test_pffn_is_its_equations(impl, activation):
    x = make_inputs("gdpa", (70, 0, 3, 5), (8, 4, 0, 17), dtype=torch.float64).leaves()
    settings_ = {"activation": activation, "scale": 0.1}
    fused, parts = pffn(*x.args, impl=impl, **settings_), pffn_by_parts(*x.args, **settings_)
    torch.testing.assert_close(fused, parts, rtol=1e-10, atol=1e-10)
    leaves = (x.q, x.k, x.v)
    for one, other in zip(
        torch.autograd.grad(fused, leaves, x.do), torch.autograd.grad(parts, leaves, x.do), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@both
def test_gradcheck_pffn(impl):
    x = make_inputs("gdpa", (3, 0, 2), (2, 3, 4), head_dim=3, dtype=torch.float64).leaves()

    def call(s, k, v):
        return pffn(s, k, v, x.q_offsets, x.kv_offsets, activation="silu", scale=0.7, impl=impl)

    assert torch.autograd.gradcheck(call, (x.q, x.k, x.v))


@pytest.mark.parametrize("pattern", NOT_SHARED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pffn_eager_is_as_exact_as_the_reference(pattern, dtype):
    inputs = make_inputs("gdpa", pattern.q, pattern.kv, dtype=dtype)
    exact = run(inputs, torch.float64, "reference", scale=0.2)
    with poisoned():
        eager = run(inputs, impl="eager", scale=0.2)
    reference = run(inputs, impl="reference", scale=0.2)
    for name, got, same_dtype, want in zip(("out", "ds", "dk", "dv"), eager, reference, exact, strict=True):
        assert_within_eager(got, same_dtype, want, name=name, roundings=8)


@both
def test_pffn_spare_rows_and_sequences_without_keys(impl):
    """Spare rows hold NaN: zeros come out (O05). No keys: rms(layer(s)) + s, and no NaN (O02)."""
    inputs = make_inputs("gdpa", (7, 3), (4, 0), spare_rows=2)
    results = run(inputs, impl=impl)
    for result, end in zip(results, (10, 10, 4, 4), strict=True):
        assert result.isfinite().all() and result[end:].eq(0).all()
    rows = inputs.q[7:10].flatten(1)
    want = torch_norm(torch_norm(rows, "layer"), "rms") + rows
    torch.testing.assert_close(results[0][7:10].flatten(1), want)


@both
def test_pffn_batch_mates_change_no_bit(impl):
    own = make_inputs("gdpa", (37,), (21,), seed=3)
    alone = run(own, impl=impl)
    for trial in range(6):
        q, kv = ([40] * 3, [22] * 3) if trial % 2 else ([3, 0, 150], [5, 9, 64])
        place = trial % 4
        q.insert(place, 37), kv.insert(place, 21)
        batch = make_inputs("gdpa", q, kv, seed=20 + trial)
        rows_q = slice(sum(q[:place]), sum(q[:place]) + 37)
        rows_k = slice(sum(kv[:place]), sum(kv[:place]) + 21)
        batch.q[rows_q], batch.do[rows_q], batch.k[rows_k], batch.v[rows_k] = own.q, own.do, own.k, own.v
        for got, want, rows in zip(run(batch, impl=impl), alone, (rows_q, rows_q, rows_k, rows_k), strict=True):
            assert torch.equal(got[rows], want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("named", [None, "eager", "reference"])
def test_pffn_runs_the_named_gdpa(impl, named, monkeypatch):
    """gdpa_impl picks who runs between the norms, forward and backward; None keeps to the norms' own kind."""
    calls = []
    for name in IMPLS:
        loaded = GDPA.load(name)

        def spy(function, name):
            return lambda *args, **kwargs: calls.append(name) or function(*args, **kwargs)

        spied = dataclasses.replace(loaded, forward=spy(loaded.forward, name), backward=spy(loaded.backward, name))
        monkeypatch.setitem(GDPA._loaded, name, spied)
    inputs = make_inputs("gdpa", (5, 0, 3), (2, 3, 4))
    got = run(inputs, impl=impl, gdpa_impl=named)
    assert calls == [named or impl] * 2
    for one, other in zip(got, run(inputs, impl="reference"), strict=True):
        torch.testing.assert_close(one, other)


def test_pffn_with_a_gdpa_that_cannot_run_is_an_error():
    x = make_inputs("gdpa", (5, 3), (2, 4))
    with pytest.raises(ValueError, match="gdpa: impl 'tlx'"):
        pffn(*x.args, gdpa_impl="tlx")
    with pytest.raises(ValueError, match="unknown impl 'quack'; allowed: auto, tlx, triton, eager, reference"):
        pffn(*x.args, gdpa_impl="quack")


@kinds
def test_opcheck_norms(kind):
    x = make_inputs("block_attention", (4, 3), head_dim=8)
    rows = x.q.flatten(1).requires_grad_()
    torch.library.opcheck(torch.ops.gem_kernels.norm, (rows, kind, 1e-5, "reference"))
    q = x.q.detach().requires_grad_()
    torch.library.opcheck(torch.ops.gem_kernels.norm_rotary, (q, x.cos, x.sin, True, kind, 1e-5, "reference"))


@both
def test_opcheck_pffn(impl):
    x = make_inputs("gdpa", (3, 0, 2), (2, 3, 4)).leaves()
    arguments = (x.q, x.k, x.v, x.q_offsets, x.kv_offsets, "silu", 0.5, 1e-5, None, None, impl, impl)
    torch.library.opcheck(torch.ops.gem_kernels.pffn, arguments)


@both
def test_pffn_counts_the_flops_of_gdpa_and_norms_count_none(impl):
    x = make_inputs("gdpa", (3, 0, 5, 100), (4, 2, 0, 7), num_heads=4, head_dim=64).leaves()
    with FlopCounterMode(display=False) as forward:
        out = pffn(*x.args, impl=impl)
        norm(norm_rotary(x.q, x.cos, x.sin))
    with FlopCounterMode(display=False) as backward:
        out.backward(x.do)
    useful = 4 * 4 * 64 * (3 * 4 + 100 * 7)
    assert forward.get_total_flops() == useful == flops.gdpa((3, 0, 5, 100), (4, 2, 0, 7), 4, 64)
    assert backward.get_total_flops() == 2 * useful


def test_compiles_without_a_graph_break():
    x = make_inputs("gdpa", (5, 0, 7), (2, 3, 4)).leaves()

    def layer(s, k, v):
        return norm(norm_rotary(pffn(s, k, v, x.q_offsets, x.kv_offsets), x.cos, x.sin), kind="layer").sin()

    want = torch.autograd.grad(layer(x.q, x.k, x.v).sum(), (x.q, x.k, x.v))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for got, exact in zip(torch.autograd.grad(compiled(x.q, x.k, x.v).sum(), (x.q, x.k, x.v)), want, strict=True):
        torch.testing.assert_close(got, exact)


def test_bad_arguments_say_what_is_allowed():
    x, cos, ends = torch.randn(4, 2, 8), torch.zeros(4, 4), offsets(4)
    for call, message in (
        (lambda: norm(x, kind="batch"), "'batch'; allowed: layer, rms"),
        (lambda: norm(x, eps=0), "eps is 0; allowed: a finite number > 0"),
        (lambda: norm(x[..., :0]), "N >= 1"),
        (lambda: norm(x.long()), "torch.int64; allowed: a floating tensor"),
        (lambda: norm(x, impl="quack"), "allowed: auto, triton, reference"),
        (lambda: norm_rotary(x[0], cos, cos), "rows, heads, head_dim"),
        (lambda: norm_rotary(x[..., :7], cos, cos), "head_dim 7.*even"),
        (lambda: pffn(x, x, x, None, ends), "q_offsets is None"),
        (lambda: pffn(x, x, x, ends, activation="softmax"), "allowed: gelu"),
        (lambda: pffn(x, x, x, ends, eps=-1), "eps is -1"),
        (lambda: pffn(x, x, x, offsets(5)), r"offsets\[1\] = 5"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert REGISTRIES["pffn"].names == ["triton", "eager", "reference"]
