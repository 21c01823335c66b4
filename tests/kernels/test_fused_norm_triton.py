"""The Triton norms behind the public ops, in Triton's interpreter: its own process, as the switch is read at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import torch
from kernels.fused_norm import norm, norm_rotary, pffn
from kernels.testing import make_inputs

x = make_inputs("gdpa", (7, 0, 20), (4, 1, 9), spare_rows=2)
rows, cos, sin = x.q[:27], x.cos[:27], x.sin[:27]


def run(function, impl, *tensors):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves, impl=impl)
    return out.detach(), *torch.autograd.grad(out, leaves, torch.arange(out.numel()).float().cos().view(out.shape))


for name, function, tensors in (
    ("layer", lambda q, impl: norm(q.flatten(1), kind="layer", impl=impl), (rows,)),
    ("rms", lambda q, impl: norm(q.flatten(1), kind="rms", impl=impl), (rows,)),
    ("norm_rotary", lambda q, impl: norm_rotary(q, cos, sin, False, kind="layer", impl=impl), (rows,)),
    ("pffn", lambda s, k, v, impl: pffn(s, k, v, *x.args[3:], scale=0.2, impl=impl), (x.q, x.k, x.v)),
):
    for got, want in zip(run(function, "triton", *tensors), run(function, "reference", *tensors), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=5e-6, msg=lambda text: f"{name}: {text}")
print("equal")
"""


def test_triton_norms_equal_the_reference():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CHECK], cwd=root, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
