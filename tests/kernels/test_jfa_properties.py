"""Laws of jagged attention over drawn lengths, dtypes and flags; finite differences; compilers and the FLOP counter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from kernels import Bias, flops, jagged, jagged_attention
from kernels.jfa import reference
from kernels.jfa.function import jagged_attention_backward_op, jagged_attention_op
from kernels.testing import make_inputs

from . import jfa_checks as checks

lengths = st.lists(st.one_of(st.sampled_from([0, 1, 7, 8, 9, 16, 17]), st.integers(0, 40)), min_size=0, max_size=6)


@st.composite
def calls(draw):
    """(inputs, keywords) of a valid call."""
    kind = draw(st.sampled_from(["self", "cross", "shared"]))
    q_lengths = draw(lengths)
    kv_lengths = None
    if kind == "cross":
        kv_lengths = draw(st.lists(st.integers(0, 40), min_size=len(q_lengths), max_size=len(q_lengths)))
    inputs = make_inputs(
        "jagged_attention",
        q_lengths,
        kv_lengths,
        num_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 5, 8, 16])),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])),
        seed=draw(st.integers(0, 100)),
        shared_q=draw(st.integers(1, 4)) if kind == "shared" else None,
        spare_rows=0 if kind == "shared" else draw(st.integers(0, 2)),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )
    keywords = {"scale": draw(st.sampled_from([None, 0.3, 1.0]))}
    if kind == "self":
        keywords["window"] = draw(st.sampled_from([None, 0, 1, 5, 100]))
    bias = draw(st.sampled_from(["none", "relative", "times"] if kind == "self" else ["none", "relative"]))
    if bias != "none":
        dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
        table = torch.randn(inputs.q.shape[1], draw(st.integers(1, 9)), generator=torch.Generator().manual_seed(5))
        times = torch.arange(inputs.q.shape[0]) ** 2
        keywords["bias"] = Bias(table.to(dtype), "relative" if bias == "relative" else times)
    return inputs, keywords


@given(call=calls())
@settings(max_examples=60)
def test_eager_is_as_exact_as_the_reference(call):
    inputs, keywords = call
    checks.against_reference("eager", inputs, roundings=8.0, **keywords)


@given(call=calls())
@settings(max_examples=25)
def test_padded_is_as_exact_as_the_reference(call):
    inputs, keywords = call
    keywords.pop("bias", None)
    checks.against_reference("padded", inputs, roundings=8.0, **keywords)


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_company_does_not_matter(impl, dtype):
    checks.company_does_not_matter(impl, dtype=dtype)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_does_not_matter_on_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        checks.company_does_not_matter("eager", window=9)
    finally:
        torch.set_num_threads(before)


def test_company_of_other_sizes_does_not_matter():
    checks.any_company_does_not_matter("eager")


def test_a_crowd_does_not_matter():
    checks.a_crowd_does_not_matter("eager")


@given(
    own=st.lists(st.integers(0, 70), min_size=1, max_size=12),
    seed=st.integers(0, 1000),
    head_dim=st.sampled_from([8, 16, 24]),
)
@settings(max_examples=25)
def test_permuted_sequences_give_permuted_bits(own, seed, head_dim):
    inputs = make_inputs("jagged_attention", own, head_dim=head_dim, seed=seed)
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(seed))
    offsets = inputs.q_offsets
    rows = torch.cat([torch.arange(int(offsets[b]), int(offsets[b + 1])) for b in order])
    permuted = inputs.leaves()
    permuted.q, permuted.k, permuted.v = (x.detach()[rows] for x in (permuted.q, permuted.k, permuted.v))
    permuted.do = permuted.do[rows]
    permuted.q_offsets = jagged.lengths_to_offsets(torch.tensor(own)[order])
    plain, got = checks.run(inputs, "eager"), checks.run(permuted, "eager")
    for name, value in plain.items():
        assert torch.equal(got[name], value[rows]), name


def _gradcheck_arguments(kind: str):
    q_lengths, kv_lengths, shared = {
        "self": ((3, 0, 5), None, None),
        "cross": ((2, 1, 0, 3), (1, 0, 3, 9), None),
        "shared": ((3, 0, 4), None, 2),
    }[kind]
    inputs = make_inputs("jagged_attention", q_lengths, kv_lengths, head_dim=4, dtype=torch.float64, shared_q=shared)
    table = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    return inputs.leaves(), table


@pytest.mark.parametrize("impl", ["reference", "eager", "padded"])
@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
def test_gradients_by_finite_differences(kind, impl):
    inputs, table = _gradcheck_arguments(kind)
    forms = [{}] if kind != "self" else [{}, {"window": 1}]
    for form in forms:
        assert torch.autograd.gradcheck(
            lambda q, k, v, form=form: jagged_attention(q, k, v, *inputs.args[3:], impl=impl, **form), inputs.args[:3]
        )
    if impl == "padded":
        return
    positions = ["relative"] if kind != "self" else ["relative", torch.arange(8) ** 2]
    for position in positions:
        assert torch.autograd.gradcheck(
            lambda q, k, v, t, position=position: jagged_attention(
                q, k, v, *inputs.args[3:], impl=impl, bias=Bias(t, position)
            ),
            (*inputs.args[:3], table),
        )


def test_the_specifications_backward_is_autograds():
    """The formulas written out in the reference against autograd through its own forward."""
    inputs = make_inputs("jagged_attention", (9, 0, 30), dtype=torch.float64).leaves()
    table = torch.randn(2, 5, dtype=torch.float64)
    offsets = inputs.q_offsets
    bias = Bias(table.requires_grad_())
    o, _ = reference.attention(*inputs.args[:4], offsets, scale=0.5, window=7, bias=bias)
    expected = torch.autograd.grad(o, (inputs.q, inputs.k, inputs.v, table), inputs.do)
    leaves = inputs.leaves()
    own = Bias(table.detach().clone().requires_grad_())
    jagged_attention(*leaves.args, scale=0.5, window=7, bias=own, impl="reference").backward(leaves.do)
    for got, wanted in zip((leaves.q.grad, leaves.k.grad, leaves.v.grad, own.table.grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def _op_arguments(kind: str, impl: str):
    inputs, table = _gradcheck_arguments(kind)
    kv_offsets = inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets
    times = torch.arange(inputs.q.shape[0]) ** 2 if kind == "self" else None
    window = 2 if kind == "self" else None
    settings = (table, times, 0.5, window, None, None, None, None, [], impl)
    return (*inputs.args[:3], inputs.q_offsets, kv_offsets, *settings), inputs


@pytest.mark.parametrize("impl", ["reference", "eager"])
@pytest.mark.parametrize("kind", ["self", "cross", "shared"])
def test_torch_library_accepts_the_ops(kind, impl):
    arguments, inputs = _op_arguments(kind, impl)
    torch.library.opcheck(jagged_attention_op, arguments)
    o, lse = jagged_attention_op(*arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    torch.library.opcheck(jagged_attention_backward_op, (inputs.do, *detached[:3], o.detach(), lse, *detached[3:]))


def test_lse_is_what_it_says():
    """Natural log of the sum of exponentials, +inf for rows without keys and past the end."""
    inputs = make_inputs("jagged_attention", (2, 1, 3), (3, 0, 2), num_heads=1, spare_rows=1)
    for impl in ("reference", "eager", "padded"):
        _, lse = jagged_attention_op(*inputs.args, None, None, 0.5, None, None, None, None, None, [], impl)
        assert lse.shape == (1, 7) and lse.dtype == torch.float32
        scores = 0.5 * inputs.q[:2, 0] @ inputs.k[:3, 0].t()
        torch.testing.assert_close(lse[0, :2], scores.exp().sum(1).log())
        assert lse[0, 2].item() == math.inf and lse[0, 6].item() == math.inf, impl
        assert bool(lse[0, 3:6].isfinite().all())


@pytest.mark.parametrize("impl", ["reference", "eager", "padded"])
def test_flop_counter_sees_the_useful_pairs(impl):
    """O42, O43: the closed form, forward and backward, whatever the implementation pads or recomputes."""
    inputs = make_inputs("jagged_attention", (3, 0, 5, 100), num_heads=4, head_dim=64).leaves()
    with FlopCounterMode(display=False) as counter:
        o = jagged_attention(*inputs.args, impl=impl)
    assert counter.get_total_flops() == 10_274_816
    with FlopCounterMode(display=False) as counter:
        o.backward(inputs.do)
    assert counter.get_total_flops() == 20_549_632


@given(call=calls())
def test_flop_counter_is_the_closed_form(call):
    inputs, keywords = call
    keywords.pop("bias", None)
    leaves = inputs.leaves()
    kv_lengths = (inputs.q_offsets if inputs.kv_offsets is None else inputs.kv_offsets).diff()
    shared = inputs.q_offsets is None
    q_lengths = torch.full_like(kv_lengths, inputs.q.shape[0]) if shared else inputs.q_offsets.diff()
    with FlopCounterMode(display=False) as counter:
        jagged_attention(*leaves.args, impl="eager", **keywords).backward(leaves.do)
    heads, head_dim = inputs.q.shape[1:]
    expected = flops.jagged_attention(
        q_lengths, kv_lengths, heads, head_dim, window=keywords.get("window"), phase="step"
    )
    assert counter.get_total_flops() == expected


def test_flop_counter_of_a_square_batch():
    """O44: heads and rows are not swapped."""
    inputs = make_inputs("jagged_attention", (500, 500, 500), num_heads=6, head_dim=48)
    with FlopCounterMode(display=False) as counter:
        jagged_attention(*inputs.args, impl="padded")
    assert counter.get_total_flops() == 864_000_000


def test_compiles_without_a_graph_break_and_gives_the_same_bits():
    table = torch.randn(2, 9)

    def step(q, k, v, offsets, table):
        return jagged_attention(q * 2, k, v, offsets, window=30, bias=Bias(table)) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lengths_ in ((3, 0, 70), (9, 8, 7, 6)):
        results = []
        for function in (step, compiled):
            inputs = make_inputs("jagged_attention", lengths_).leaves()
            own = table.clone().requires_grad_()
            o = function(*inputs.args[:4], own)
            o.backward(inputs.do)
            results.append((o, inputs.q.grad, inputs.k.grad, inputs.v.grad, own.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled_code_checks_offsets_on_the_device():
    inputs = make_inputs("jagged_attention", (4, 4))
    compiled = torch.compile(lambda q, o: jagged_attention(q, q, q, o), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="q_offsets: offsets decrease"):
        compiled(inputs.q, torch.tensor([0, 6, 4]))


def test_exports():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, offsets):
            return jagged_attention(q, k, v, offsets, impl="eager")

    inputs = make_inputs("jagged_attention", (3, 5))
    program = torch.export.export(Attention(), inputs.args[:4])
    targets = {str(node.target) for node in program.graph.nodes}
    assert "gem_kernels.jagged_attention.default" in targets
    assert torch.equal(program.module()(*inputs.args[:4]), jagged_attention(*inputs.args, impl="eager"))
