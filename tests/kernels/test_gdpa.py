"""Laws of gdpa: the reference and eager against float64, finite differences, any lengths; compilers and messages."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import gdpa
from kernels.gdpa import ACTIVATIONS
from kernels.testing import LENGTH_PATTERNS, assert_within_eager, make_inputs, poisoned

from .gdpa_calls import both, offsets, run, toy


@both
def test_columns_that_are_not_adjacent(impl):
    inputs = make_inputs("gdpa", (9, 4))
    want = run(inputs, impl=impl)
    x = inputs.leaves()
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (x.q, x.k, x.v))
    assert q.stride(-1) != 1
    o = gdpa(q, k, v, x.q_offsets, impl=impl)
    assert torch.equal(o.detach(), want[0])
    gdpa(x.q, x.k, x.v, x.q_offsets, impl=impl).sum().backward()  # the gradient arrives expanded, with strides 0
    assert x.q.grad.isfinite().all()


@both
def test_scale_comes_before_the_activation(impl):
    o = toy((2,), (3,), (1,), offsets(1), None, impl, activation="silu", scale=0.5)[0]
    assert o.item() == pytest.approx(3 / (1 + math.exp(-3)), rel=1e-6)


@pytest.mark.parametrize("pattern", LENGTH_PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared", [None, 5])
def test_eager_is_as_exact_as_the_reference(pattern, dtype, shared):
    inputs = make_inputs("gdpa", pattern.q, pattern.kv, dtype=dtype, shared_q=shared)
    exact = run(inputs, torch.float64, "reference", activation="gelu", scale=0.8)
    with poisoned():
        eager = run(inputs, impl="eager", activation="gelu", scale=0.8)
    reference = run(inputs, impl="reference", activation="gelu", scale=0.8)
    for name, got, same_dtype, want in zip(("o", "dq", "dk", "dv"), eager, reference, exact, strict=True):
        assert_within_eager(got, same_dtype, want, name=name, roundings=4)


@both
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shared", [None, 3])
def test_gradcheck(impl, activation, shared):
    inputs = make_inputs("gdpa", (3, 0, 2), (2, 3, 4), head_dim=3, dtype=torch.float64, shared_q=shared).leaves()

    def call(q, k, v):
        arguments = (None if shared else inputs.q_offsets), inputs.kv_offsets
        return gdpa(q, k, v, *arguments, activation=activation, scale=1.3, impl=impl)

    assert torch.autograd.gradcheck(call, (inputs.q, inputs.k, inputs.v))


def test_reference_backward_is_autograd_of_its_forward():
    from kernels.gdpa import reference

    for shared in (None, 4):
        x = make_inputs("gdpa", (5, 0, 9), (2, 3, 7), dtype=torch.float64, shared_q=shared).leaves()
        settings = {"activation": "silu", "scale": 0.9}
        o = reference.forward(*x.args, **settings)
        automatic = torch.autograd.grad(o, (x.q, x.k, x.v), x.do)
        for got, want in zip(reference.backward(x.do, *x.args, **settings), automatic, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


lengths_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=0, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    lengths=lengths_lists,
    kind=st.sampled_from(["self", "cross", "shared"]),
    activation=st.sampled_from(ACTIVATIONS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 20),
    index=st.sampled_from([torch.int32, torch.int64]),
    scale=st.sampled_from([1.0, 0.37]),
)
def test_eager_equals_reference_for_any_lengths(lengths, kind, activation, dtype, heads, head_dim, index, scale):
    q_lengths, kv_lengths = [a for a, _ in lengths], [b for _, b in lengths]
    inputs = make_inputs(
        "gdpa",
        q_lengths,
        None if kind == "self" else kv_lengths,
        num_heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        shared_q=3 if kind == "shared" else None,
        spare_rows=0 if kind == "shared" else 2,
        offsets_dtype=index,
    )
    settings_ = {"activation": activation, "scale": scale}
    exact = run(inputs, torch.float64, "reference", **settings_)
    reference = run(inputs, impl="reference", **settings_)
    for got, same_dtype, want in zip(run(inputs, impl="eager", **settings_), reference, exact, strict=True):
        assert_within_eager(got, same_dtype, want, roundings=8)


@both
@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
def test_opcheck(impl, kind):
    shared = 3 if kind == "shared" else None
    x = make_inputs("gdpa", (3, 0, 2), None if kind == "self" else (2, 3, 4), shared_q=shared, fused=kind == "self")
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    kv_offsets = x.q_offsets if x.kv_offsets is None else x.kv_offsets
    arguments = (x.q_offsets, kv_offsets, "silu", 0.5, None, None, None, None, [], impl)
    torch.library.opcheck(torch.ops.gem_kernels.gdpa, (q, k, v, *arguments))
    torch.library.opcheck(torch.ops.gem_kernels.gdpa_backward, (x.do, x.q, x.k, x.v, *arguments))


def test_compiles_without_a_graph_break():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = torch.nn.Linear(8, 24)

        def forward(self, x, ends):
            q, k, v = self.projection(x).view(-1, 2, 12).split(4, dim=-1)
            return gdpa(q, k, v, ends, activation="silu").flatten(1) + x

    torch.manual_seed(0)
    layer = Layer()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ((5, 0, 7), (4, 30)):
        x = torch.randn(sum(lengths), 8)
        want, got = layer(x, offsets(*lengths)), compiled(x, offsets(*lengths))
        torch.testing.assert_close(got, want)
        for parameter, other in zip(
            torch.autograd.grad(want.sum(), layer.parameters()),
            torch.autograd.grad(got.sum(), layer.parameters()),
            strict=True,
        ):
            torch.testing.assert_close(other, parameter)


def test_bad_arguments_say_what_is_allowed():
    x = torch.randn(4, 2, 8)
    ends = offsets(4)
    for kwargs, message in (
        ({"activation": "softmax"}, "allowed: gelu, "),
        ({"impl": "fastest"}, "allowed: auto, tlx, triton, eager, reference"),
        ({"scale": float("nan")}, "finite"),
        ({"scale": torch.tensor(1.0)}, "finite"),
        ({"precision": "mxfp8"}, "allowed: None"),
        ({"schedule": 3}, "tile_schedule"),
        ({"impl": "triton"}, "needs a CUDA device|cannot be imported|not a"),
    ):
        if kwargs.get("impl") == "triton" and torch.cuda.is_available():
            continue
        with pytest.raises(ValueError, match=message):
            gdpa(x, x, x, ends, **kwargs)
    with pytest.raises(ValueError, match="head_dim"):
        gdpa(x, x[..., :4], x, ends)
    with pytest.raises(ValueError, match="both None"):
        gdpa(x, x, x, None)
    with pytest.raises(ValueError, match="3 sequences; allowed: 1"):
        gdpa(x, x, x, ends, offsets(1, 1, 2))


def test_explain_names_the_choice():
    from kernels import explain

    x = torch.randn(4, 2, 8)
    text = explain(gdpa, x, x, x, offsets(4))
    assert "gdpa: eager <- chosen" in text and "gdpa: reference could run, lower priority" in text
