"""The Triton rotary kernel on the GPU it is made for (`pytest -m gpu tests/gpu/test_rotary_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary import triton_rotary

from ..kernels import test_rotary_triton as checks

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(interleaved, dtype):
    shapes = [*checks.SHAPES, (1000, 4, 128), (300, 3, 96), (77, 16, 256)]
    checks.agree(interleaved, "cuda", DTYPES[dtype], shapes)


def test_rows_beyond_2_to_the_31_elements():
    x = torch.full((262145, 64, 128), 0.5, dtype=torch.bfloat16, device="cuda")
    table = torch.full((262145, 64), 0.5, device="cuda")
    y = triton_rotary.forward(x, table, table, interleaved=True)
    assert torch.equal(y[-1:], triton_rotary.forward(x[-1:], table[-1:], table[-1:], interleaved=True))
    assert (y[-1, :, 1::2] == 0.5).all() and (y[-1, :, ::2] == 0).all()
