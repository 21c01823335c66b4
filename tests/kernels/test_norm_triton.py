"""The Triton norm kernels without a GPU: values in the interpreter, resources by compiling for sm_90."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.fused_norm import triton_norm
from kernels.rotary import reference as rotary_reference
from kernels.testing import poisoned

from . import triton_interpreted
from .triton_offline import compiling

EPS = 1e-5
SHAPES = [(37, 3, 24), (5, 1, 128), (70, 4, 32), (1, 2, 64)]


def exact(x, dy, cos, sin, kind, over, interleaved):
    """(y, dx) in float64 by autograd of torch's own norms."""
    x = x.double().requires_grad_()
    z = x if over == "head" else x.flatten(1)
    z = F.layer_norm(z, z.shape[-1:], eps=EPS) if kind == "layer" else F.rms_norm(z, z.shape[-1:], eps=EPS)
    z = z.reshape(x.shape)
    if cos is not None:
        z = rotary_reference.rotate(z, cos, sin, interleaved)
    return z.detach(), torch.autograd.grad(z, x, dy.double())[0]


def agree(kind, over, rotary, device="cpu", dtype=torch.float32, shapes=SHAPES):
    """Forward and backward against float64, on views of wider rows; one rounding of the result, float32 inside."""
    for rows, heads, head_dim in shapes:
        generator = torch.Generator().manual_seed(rows)
        wide = torch.randn(rows, heads, 2 * head_dim, generator=generator).to(device, dtype)
        x = wide[..., :head_dim] if over == "head" else wide[..., :head_dim].contiguous()
        dy = torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype)
        angles = (torch.rand(rows, head_dim // 2, generator=generator) * 6).to(device)
        tables = (angles.cos(), angles.sin()) if rotary else (None, None)
        for interleaved in (True, False) if rotary else (True,):
            settings = {"kind": kind, "over": over, "interleaved": interleaved}
            with poisoned():
                y = triton_norm.norm_forward(x, *tables, eps=EPS, **settings)
                dx = triton_norm.norm_backward(dy, x, *tables, eps=EPS, **settings)
            for actual, expected in zip((y, dx), exact(x, dy, *tables, **settings), strict=True):
                assert actual.dtype == dtype and actual.shape == x.shape
                # Half a unit of the result's last place, and float32 sums over a row.
                bound = torch.finfo(dtype).eps * expected.abs() * 0.51 + 4e-6 * expected.abs().max()
                assert bool(((actual.double() - expected).abs() <= bound).all())


def empty(device="cpu"):
    x = torch.empty(0, 2, 32, device=device)
    assert triton_norm.norm_forward(x, kind="rms").shape == x.shape
    assert triton_norm.norm_backward(x, x, kind="rms").shape == x.shape


CASES = [
    (kind, over, rotary)
    for kind in triton_norm.KINDS
    for over, rotary in (("head", False), ("head", True), ("token", False))
]
CHECKS = {
    **{f"{kind} over {over} rotary {rotary}": (lambda c=(kind, over, rotary): agree(*c)) for kind, over, rotary in
    CASES}, "half precision": lambda: agree("layer", "head", True, dtype=torch.float16),
    "empty": empty,
}  # fmt: skip


@pytest.fixture(scope="module")
def interpreted():
    return triton_interpreted.results(__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(interpreted, check):
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.parametrize("config", [None, *triton_norm.candidates("fwd", 128)])
def test_configurations_compile_for_hopper(config):
    x = torch.empty(4096, 4, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(4096, 64, device="meta")
    with compiling() as found:
        triton_norm.norm_forward(x, table, table, kind="layer", config=config)
        triton_norm.norm_backward(x, x, table, table, kind="layer", config=config)
    assert all(kernel.local_bytes <= 16 for kernel in found), found


def test_bad_arguments_are_refused():
    x = torch.zeros(2, 2, 3)
    with pytest.raises(ValueError, match="kind 'batch'"):
        triton_norm.norm_forward(x, kind="batch")
    with pytest.raises(ValueError, match="head_dim 3"):
        triton_norm.norm_forward(x, kind="rms")
    with pytest.raises(ValueError, match="over 'token' with rotary"):
        triton_norm.norm_forward(torch.zeros(2, 2, 4), x, x, kind="rms", over="token")


if __name__ == "__main__":
    triton_interpreted.main(CHECKS)
