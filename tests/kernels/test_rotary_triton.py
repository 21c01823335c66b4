"""The Triton rotary kernel without a GPU: values in the interpreter, resources by compiling for sm_90."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary import reference, triton_rotary
from kernels.testing import poisoned

from . import triton_interpreted
from .triton_offline import compiling

SHAPES = [(37, 3, 24), (5, 1, 128), (0, 2, 32), (70, 4, 32), (1, 5, 2)]


def agree(interleaved, device="cpu", dtype=torch.float32, shapes=SHAPES):
    """Both directions against float64: one rounding of the result, float32 inside; in place too."""
    for rows, heads, head_dim in shapes:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, heads, 2 * head_dim, generator=generator).to(device, dtype)[..., :head_dim]
        angles = torch.rand(head_dim // 2, rows, generator=generator).to(device).T * 6
        cos, sin = angles.cos(), angles.sin()
        for run, turn in ((triton_rotary.forward, reference.rotate), (triton_rotary.backward, reference.rotate_back)):
            with poisoned():
                actual = run(x, cos, sin, interleaved=interleaved)
            expected = turn(x.double(), cos, sin, interleaved)
            assert actual.dtype == dtype and actual.shape == x.shape
            bound = torch.finfo(dtype).eps * 0.51 * expected.abs() + 4e-7 * x.double().abs().amax(-1, keepdim=True)
            assert bool(((actual.double() - expected).abs() <= bound).all())
            # In place, the same bits as beside it; of equally strided rows, since the compiler may contract products
            # of differently strided ones into other FMAs.
            place = x.clone()
            beside = run(place, cos, sin, interleaved=interleaved)
            back = run is triton_rotary.backward
            triton_rotary.rotate_with(None, place, cos, sin, interleaved=interleaved, back=back, out=place)
            assert torch.equal(place, beside)


CHECKS = {
    "interleaved": lambda: agree(True),
    "half": lambda: agree(False),
    "half precision": lambda: agree(True, dtype=torch.float16),
}


@pytest.fixture(scope="module")
def interpreted():
    return triton_interpreted.results(__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(interpreted, check):
    assert interpreted[check] is None, interpreted[check]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("config", [None, *triton_rotary.candidates()])
def test_configurations_compile_for_hopper_without_spills(config, interleaved):
    x = torch.empty(4096, 4, 128, dtype=torch.bfloat16, device="meta")
    table = torch.empty(4096, 64, device="meta")
    with compiling() as found:
        triton_rotary.rotate_with(config, x, table, table, interleaved=interleaved)
    assert found[0].local_bytes == 0, found


if __name__ == "__main__":
    triton_interpreted.main(CHECKS)
