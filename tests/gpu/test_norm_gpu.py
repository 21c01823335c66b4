"""The Triton norm kernels on the GPU they are made for (`pytest -m gpu tests/gpu/test_norm_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from kernels.fused_norm import norm, norm_rotary, pffn, triton_norm
from kernels.fused_norm.function import norm_op, norm_rotary_op, pffn_op
from kernels.testing import assert_within_eager, make_inputs, poisoned

from ..kernels import test_norm_triton as checks
from .guards import guarded

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# Every shape is a kernel of its own to compile; the interpreter runs more of them.
SHAPES = {"bf16": [(37, 3, 24), (1000, 4, 128), (300, 8, 64)], "fp16": [(300, 8, 64)], "fp32": [(37, 3, 24)]}


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(case, dtype):
    checks.agree(*case, device=DEVICE, dtype=DTYPES[dtype], shapes=SHAPES[dtype])


def test_no_rows():
    checks.empty(DEVICE)


def _feed_forward(x, dtype=None, **settings):
    """(s', ds, dk, dv) on fresh leaves, uninitialised memory full of NaN."""
    leaves = x.leaves(dtype)
    with poisoned():
        out = pffn(*leaves.args, scale=0.2, **settings)
        return out.detach(), *torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), leaves.do)


@pytest.mark.parametrize("gdpa_impl", ["triton", None])
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"), [(4, 128, "bf16"), (2, 64, "fp16"), (3, 40, "bf16"), (2, 32, "fp32")]
)
def test_feed_forward_against_float64(heads, head_dim, dtype, gdpa_impl):
    """As close to float64 as the plain form in the same dtype, up to rounding; NaN in the rows past the end."""
    if gdpa_impl is None and head_dim != 128:
        pytest.skip("what gdpa would take is tested at head_dim 128")
    dtype = DTYPES[dtype]
    for q_lengths, kv_lengths in (((7, 0, 200), (4, 1, 130)), ((70, 3, 0), (0, 0, 5)), ((65, 0, 20), None)):
        x = make_inputs(
            "gdpa", q_lengths, kv_lengths, num_heads=heads, head_dim=head_dim, dtype=dtype, device=DEVICE, spare_rows=2
        )
        found = _feed_forward(x, impl="triton", gdpa_impl=gdpa_impl)
        own, exact = _feed_forward(x, impl="reference"), _feed_forward(x, torch.float64, impl="reference")
        for name, value, plain, right in zip(("s'", "ds", "dk", "dv"), found, own, exact, strict=True):
            # q, GDPA's output and the gradients between the three kernels are stored in the inputs' dtype.
            assert_within_eager(value, plain, right, name=name, roundings=8.0 if dtype != torch.float32 else 64.0)


def test_stores_stay_between_guard_rows():
    x = make_inputs("gdpa", (65, 0, 20), (5, 2, 130), num_heads=4, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    with guarded(7) as buffers:
        for cos in (None, x.cos):
            sin = None if cos is None else x.sin
            triton_norm.norm_forward(x.q, cos, sin, kind="rms")
            triton_norm.norm_backward(x.do, x.q, cos, sin, kind="layer")
    assert len(buffers) == 4


def test_feed_forward_of_a_sequence_alone():
    """The same bits as among others, and none of the neighbours' NaN."""
    x = make_inputs("gdpa", (70, 5, 130), (9, 0, 40), num_heads=4, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    alone = make_inputs("gdpa", (130,), (40,), num_heads=4, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    alone.q, alone.k, alone.v, alone.do = x.q[75:], x.k[9:], x.v[9:], x.do[75:]
    for t in (x.q, x.do):
        t[:75] = float("nan")
    for t in (x.k, x.v):
        t[:9] = float("nan")
    settings = {"impl": "triton", "gdpa_impl": "triton"}
    starts = (75, 75, 9, 9)
    for whole, own, start in zip(_feed_forward(x, **settings), _feed_forward(alone, **settings), starts, strict=True):
        assert torch.equal(whole[start:], own)


def test_a_row_does_not_depend_on_the_others():
    x = torch.randn(300, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    spoiled = x.clone()
    spoiled[100:200] = float("nan")
    for kind in ("rms", "layer"):
        for over in ("head", "token"):
            whole, other = (triton_norm.norm_forward(t, kind=kind, over=over) for t in (x, spoiled))
            alone = triton_norm.norm_forward(x[250:251], kind=kind, over=over)
            assert torch.equal(whole[:100], other[:100]) and torch.equal(whole[200:], other[200:])
            assert torch.equal(whole[250:251], alone)


def test_opcheck():
    x = make_inputs("gdpa", (33, 0, 65), (5, 2, 40), head_dim=64, dtype=torch.bfloat16, device=DEVICE).leaves()
    rows = x.q.detach().flatten(1).requires_grad_()
    close = {"atol": 2e-2, "rtol": 2e-2}
    torch.library.opcheck(norm_op, (rows, "rms", 1e-5, "triton"), **close)
    torch.library.opcheck(norm_rotary_op, (x.q, x.cos, x.sin, True, "rms", 1e-5, "triton"), **close)
    settings = ("gelu_tanh", 0.2, 1e-5, None, None, "triton", "triton")
    torch.library.opcheck(pffn_op, (x.q, x.k, x.v, x.q_offsets, x.kv_offsets, *settings), **close)


def test_compile_without_graph_breaks():
    x = make_inputs("gdpa", (33, 0, 65), (5, 2, 40), head_dim=64, dtype=torch.bfloat16, device=DEVICE)

    def call(s, k, v):
        turned = norm_rotary(norm(s.flatten(1), impl="triton").view_as(s), x.cos, x.sin, impl="triton")
        return pffn(turned, k, v, x.q_offsets, x.kv_offsets, impl="triton", gdpa_impl="triton")

    def results(function):
        leaves = x.leaves()
        out = function(leaves.q, leaves.k, leaves.v)
        return out.detach(), *torch.autograd.grad(out, (leaves.q, leaves.k, leaves.v), x.do)

    for compiled, plain in zip(results(torch.compile(call, fullgraph=True)), results(call), strict=True):
        assert torch.equal(compiled, plain)
