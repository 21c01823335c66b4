"""The quantiser's Triton kernel: byte for byte plain torch under the interpreter, and without spills on sm_90."""

import os
import subprocess
import sys

import pytest

from tests.kernels import mx_triton_checks, triton_interpreted


@pytest.fixture(scope="module")
def found():
    return triton_interpreted.results("tests.kernels.mx_triton_checks", timeout=900)


@pytest.mark.parametrize("check", mx_triton_checks.CHECKS)
def test_interpreted(found, check):
    assert found[check] is None, found[check]


COMPILE = """
import torch
from kernels.fused_norm import triton_quantize as fused
from kernels.mxfp8 import hopper, hopper_attention
from tests.kernels.triton_offline import compiling

hopper.runs_in_kernel = lambda x: True
x, q = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 2048), (512, 4, 128)))
with compiling() as compiled:
    hopper.by_row(x)
    hopper.by_column(x)
    hopper.by_tile(x, turned=True)
    hopper_attention.quantize(q, q, q, torch.empty(5, dtype=torch.int32, device="meta"))
    fused.norm_quantize(x, kind="layer", eps=1e-5, dtype=torch.float8_e4m3fn, scale_mode="rceil")
for c in compiled:
    print(c.name, c.local_bytes, c.shared_bytes)
"""


@pytest.mark.slow
def test_compiles_for_hopper_without_spilling():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(name == "quantize_kernel" for name, *_ in rows) == 6 and rows[-1][0] == "norm_quantize_kernel"
    for name, spilled, shared in rows:
        assert int(spilled) == 0 and int(shared) <= 64 * 1024, f"{name}: {spilled} bytes spilled, {shared} shared"
