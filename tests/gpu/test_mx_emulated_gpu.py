"""Emulated 8 bits on a GPU: the values of a CPU, and training steps that wait for nothing."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels import jagged, mxfp8
from kernels.mxfp8 import RECIPES, formats
from kernels.mxfp8.quantize import rotate, round_to_mx
from kernels.testing import relative_error
from tests.kernels.mx_triton_checks import awkward

pytestmark = pytest.mark.gpu
LENGTHS = (0, 1, 64, 65, 130, 256)


@pytest.mark.parametrize("dims", [(-1,), (-2,), (-2, -1)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_round_trips_are_those_of_a_cpu(dims, dtype):
    for shape, mode in itertools.product(((33, 70), (3, 2, 64, 128), (5, 1, 37, 64)), formats.SCALE_MODES):
        x = awkward(*shape)
        for y in (x, x.mT):
            got = round_to_mx(y.cuda(), dims, dtype=dtype, scale_mode=mode).cpu()
            want = round_to_mx(y, dims, dtype=dtype, scale_mode=mode)
            assert torch.equal(got.nan_to_num(1.5), want.nan_to_num(1.5)), (shape, mode)


def test_rotations_are_those_of_a_cpu():
    x, hadamard = torch.randn(40, 3, 128), formats.Hadamard(2)
    assert torch.equal(rotate(x.cuda(), hadamard).cpu(), hadamard.rotate(x))
    assert torch.equal(rotate(x.cuda(), hadamard, back=True).cpu(), hadamard.rotate_back(x))


def test_stochastic_round_trips_follow_torchs_seed_and_keep_the_mean():
    x = torch.full((512, 32), 0.3, device="cuda")
    x[:, 0] = 1.0
    torch.manual_seed(1)
    first = round_to_mx(x, (1,), stochastic=True)
    torch.manual_seed(1)
    assert torch.equal(first, round_to_mx(x, (1,), stochastic=True))
    assert not torch.equal(first, round_to_mx(x, (1,), stochastic=True))
    assert abs(float(first[:, 1:].mean()) - 0.3) < 5e-4


def attention(kind: str, recipe, device: str) -> tuple[torch.Tensor, ...]:
    """(o, dq, dk, dv) on a device, from the same float32 inputs."""
    draws = torch.Generator().manual_seed(0)
    host = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    offsets = host.to(device)
    jagged.remember(offsets, host)
    q, k, v, do = (torch.randn(int(host[-1]), 2, 64, generator=draws).to(device) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    if kind == "gdpa":
        o = mxfp8.gdpa_mx(q, k, v, offsets, offsets, scale=0.125, recipe=recipe)
    elif kind == "block":
        o = mxfp8.block_attention_mx(q, k, v, offsets, recipe=recipe)
    else:
        o = mxfp8.jagged_attention_mx(q, k, v, offsets, recipe=recipe)
    return tuple(x.detach().cpu() for x in (o, *torch.autograd.grad(o, (q, k, v), do)))


@pytest.mark.parametrize("recipe", ["naive", "rceil", "hadamard"])
@pytest.mark.parametrize("kind", ["self", "gdpa", "block"])
def test_attention_is_that_of_a_cpu(kind, recipe):
    """Products are summed in another order, so that a few elements round to the other neighbour: small, not zero."""
    for got, want in zip(*(attention(kind, RECIPES[recipe], device) for device in ("cuda", "cpu")), strict=True):
        assert relative_error(got, want) < 5e-3


def test_a_linear_layer_is_that_of_a_cpu():
    draws = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(*shape, generator=draws) for shape in ((200, 96), (64, 96), (200, 64)))

    def run(device):
        a, b = (item.to(device).requires_grad_() for item in (x, weight))
        y = mxfp8.linear(a, b, recipe=RECIPES["rceil"])
        return [item.detach().cpu() for item in (y, *torch.autograd.grad(y, (a, b), dy.to(device)))]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(got, want) < 1e-5


def test_attention_waits_for_nothing():
    attention("self", RECIPES["full"], "cuda")  # compiled, and the groups found
    host = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    offsets = host.cuda()
    jagged.remember(offsets, host)
    q, k, v, do = (torch.randn(int(host[-1]), 2, 64, device="cuda", requires_grad=True) for _ in range(4))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o = mxfp8.jagged_attention_mx(q, k, v, offsets, recipe=RECIPES["full"])
        torch.autograd.grad(o, (q, k, v), do)
    finally:
        torch.cuda.set_sync_debug_mode("default")
