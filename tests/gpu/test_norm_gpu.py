"""The Triton norm kernels on the GPU they are made for (`pytest -m gpu tests/gpu/test_norm_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from ..kernels import test_norm_triton as checks

pytestmark = pytest.mark.gpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("case", checks.CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_float64(case, dtype):
    checks.agree(*case, device="cuda", dtype=DTYPES[dtype], shapes=[*checks.SHAPES, (1000, 4, 128), (300, 8, 64)])


def test_no_rows():
    checks.empty("cuda")
