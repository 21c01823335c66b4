"""The Triton rotary kernel on the GPU it is made for (`pytest -m gpu tests/gpu/test_rotary_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary import apply_rotary, triton_rotary
from kernels.rotary.function import rotary_op

from ..kernels import test_rotary_triton as checks
from .guards import guarded

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Every shape is a kernel of its own to compile; the interpreter runs more of them.
SHAPES = {
    "bf16": [(37, 3, 24), (0, 2, 32), (1000, 4, 128), (77, 16, 256)],
    "fp16": [(300, 3, 96)],
    "fp32": [(37, 3, 24)],
}


def _inputs(rows=70, heads=4, head_dim=64):
    x = torch.randn(rows, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    angles = torch.rand(rows, head_dim // 2, device="cuda") * 6
    return x, angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(interleaved, dtype):
    checks.agree(interleaved, "cuda", DTYPES[dtype], SHAPES[dtype])


def test_rows_beyond_2_to_the_31_elements():
    x = torch.full((262145, 64, 128), 0.5, dtype=torch.bfloat16, device="cuda")
    table = torch.full((262145, 64), 0.5, device="cuda")
    y = triton_rotary.forward(x, table, table, interleaved=True)
    assert torch.equal(y[-1:], triton_rotary.forward(x[-1:], table[-1:], table[-1:], interleaved=True))
    assert (y[-1, :, 1::2] == 0.5).all() and (y[-1, :, ::2] == 0).all()


def test_rows_and_guards():
    """A row's bits depend on that row alone, and nothing is stored outside the tensor."""
    x, cos, sin = _inputs()
    spoiled = x.clone()
    spoiled[20:30] = float("nan")
    with guarded(7) as buffers:
        plain, other = (triton_rotary.forward(t, cos, sin, interleaved=False) for t in (x, spoiled))
    alone = triton_rotary.forward(x[40:41], cos[40:41], sin[40:41], interleaved=False)
    assert torch.equal(plain[:20], other[:20]) and torch.equal(plain[30:], other[30:])
    assert torch.equal(plain[40:41], alone) and len(buffers) == 2


def test_opcheck():
    x, cos, sin = _inputs()
    torch.library.opcheck(rotary_op, (x.requires_grad_(), cos, sin, True, "triton"), atol=2e-2, rtol=2e-2)


def test_compiles_without_graph_breaks():
    x, cos, sin = _inputs()

    def results(function):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, x)[0]

    def call(t):
        return apply_rotary(t, cos, sin, impl="triton")

    for compiled, plain in zip(results(torch.compile(call, fullgraph=True)), results(call), strict=True):
        assert torch.equal(compiled, plain)
