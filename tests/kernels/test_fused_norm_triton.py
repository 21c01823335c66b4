"""The Triton norms behind the public ops: in Triton's interpreter, in a process of its own, and compiled for sm_90."""

from __future__ import annotations

import pytest
import torch

from kernels.fused_norm import norm, norm_rotary, pffn, triton_norm, triton_pffn
from kernels.gdpa.triton_gdpa import IMPLEMENTATION as TRITON_GDPA
from kernels.testing import make_inputs, poisoned

from . import triton_interpreted
from .triton_offline import compiling


def run(function, impl, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    with poisoned():
        out = function(*leaves, impl=impl)
        dout = torch.arange(out.numel()).float().cos().view(out.shape)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)


def same(function, *tensors, rtol=1e-5, atol=5e-6):
    for got, want in zip(run(function, "triton", *tensors), run(function, "reference", *tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=atol)


def norms():
    x = make_inputs("gdpa", (7, 0, 20), (4, 1, 9))
    for kind in ("layer", "rms"):
        same(lambda q, impl, kind=kind: norm(q.flatten(1), kind=kind, impl=impl), x.q)
        same(lambda q, impl, kind=kind: norm_rotary(q, x.cos, x.sin, False, kind=kind, impl=impl), x.q)


def feed_forward(q_lengths=(7, 0, 20), kv_lengths=(4, 1, 9), *, heads=2, head_dim=16, gdpa_impl=None, **settings):
    """Outputs and gradients, rows past the end NaN on both sides."""
    x = make_inputs("gdpa", q_lengths, kv_lengths, num_heads=heads, head_dim=head_dim, spare_rows=2)

    def call(s, k, v, impl):
        inner = gdpa_impl if impl == "triton" else None
        return pffn(s, k, v, *x.args[3:], scale=0.2, gdpa_impl=inner, impl=impl, **settings)

    same(call, x.q, x.k, x.v)


def strided():
    """s as a view of a fused buffer, heads far apart."""
    x = make_inputs("gdpa", (7, 0, 20), (4, 1, 9))
    wide = torch.randn(27, 2, 40)
    same(lambda s, k, v, impl: pffn(s[..., 3:19], k, v, *x.args[3:], impl=impl), wide, x.k, x.v)


def spare_rows():
    """Values that no row of a sequence may meet: the spare rows of s and of the incoming gradient are NaN."""
    x = make_inputs("gdpa", (7, 3), (4, 0), spare_rows=2).leaves()
    with poisoned():
        out = pffn(*x.args, impl="triton")
        dout = torch.ones_like(out)
        dout[10:] = float("nan")
        gradients = torch.autograd.grad(out, (x.q, x.k, x.v), dout)
    for result, end in zip((out, *gradients), (10, 10, 4, 4), strict=True):
        assert result.isfinite().all() and result[end:].eq(0).all()


def half_precision():
    """Stored in the inputs' dtype, computed in float32: within a few roundings of float64."""
    x = make_inputs("gdpa", (30, 0, 11), (9, 4, 16), dtype=torch.float16)
    exact = [t.double() for t in (x.q, x.k, x.v)]
    call = lambda s, k, v, impl: pffn(s, k, v, *x.args[3:], scale=0.2, impl=impl)  # noqa: E731
    for got, want in zip(run(call, "triton", x.q, x.k, x.v), run(call, "reference", *exact), strict=True):
        assert got.dtype == torch.float16
        assert (got.double() - want).abs().max() <= 6 * 2**-11 * want.abs().max()


def columns_limit():
    s = torch.zeros(1, 80, 128)
    with pytest.raises(ValueError, match=r"over 10240 columns .*; allowed: <= 8192"):
        pffn(s, s, s, torch.tensor([0, 1]), impl="triton")


CHECKS = {
    "norms": norms,
    "feed-forward": feed_forward,
    "no key, no query": lambda: feed_forward((7, 3, 0), (0, 0, 5)),
    "nothing": lambda: feed_forward((0, 0), (0, 0)),
    "self": lambda: feed_forward((7, 0, 20), None),
    "columns not a power of two": lambda: feed_forward(heads=3, head_dim=20),
    "one head of odd width": lambda: feed_forward(heads=1, head_dim=7, gdpa_impl="eager"),
    "one row a program": lambda: feed_forward((3,), (2,), heads=8, head_dim=128, gdpa_impl="reference"),
    **{f"gdpa {name}": lambda name=name: feed_forward(gdpa_impl=name) for name in ("triton", "eager", "reference")},
    "activation and eps": lambda: feed_forward(activation="silu", eps=0.1),
    "strided": strided,
    "spare rows": spare_rows,
    "half precision": half_precision,
    "columns limit": columns_limit,
}


@pytest.fixture(scope="module")
def interpreted():
    return triton_interpreted.results(__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(interpreted, check):
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.parametrize("heads", [1, 4, 8, 64])
def test_feed_forward_compiles_for_hopper_in_three_kernels_each_way(heads):
    """Norm, GDPA, one kernel for the rest; nothing spills, nothing else is launched by us."""
    s = torch.empty(4096, heads, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1024, heads, 128, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(9, dtype=torch.int64, device="meta")
    settings = {"activation": "gelu_tanh", "scale": 0.05, "max_q_len": None, "max_kv_len": 128}
    with compiling() as found:
        out, o, q, inverse = triton_pffn.forward(s, k, k, offsets, offsets, gdpa=TRITON_GDPA, eps=1e-5, **settings)
    # Which of GDPA's forward kernels runs is its own choice.
    names = [kernel.name.replace("_resident", "") for kernel in found]
    assert [name for name in names if "tile_list" not in name] == ["enter_kernel", "forward_kernel", "leave_kernel"]
    assert out.dtype == o.dtype == torch.bfloat16
    with compiling() as found:
        gradients = triton_pffn.backward(
            out, q, k, k, o, offsets, offsets, inverse=inverse, gdpa=TRITON_GDPA, eps=1e-5, **settings
        )
    names = [kernel.name for kernel in found]
    assert [name for name in names if "tile_list" not in name] == [
        "leave_backward_kernel", "dq_kernel", "dkdv_kernel", "enter_backward_kernel",
    ]  # fmt: skip
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 3
    ours = [kernel for kernel in found if kernel.name.startswith(("enter", "leave"))]
    assert all(kernel.local_bytes <= 16 for kernel in ours), ours


def test_row_norms_and_feed_forward_share_a_limit():
    assert triton_norm.unsupported("cuda", torch.bfloat16, triton_pffn.MAX_COLUMNS) is None
    assert triton_norm.unsupported("cuda", torch.bfloat16, triton_pffn.MAX_COLUMNS + 1) is not None


if __name__ == "__main__":
    triton_interpreted.main(CHECKS)
