"""Fixtures of the whole suite: seeds, poisoned buffers, and how far Triton's interpreter can be trusted here."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import hypothesis
import pytest
import torch

from kernels.testing import poisoned

# Examples are drawn from a fixed seed, so that a run can be repeated; no deadline, since an op's first call is slow.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("suite")

_PROBE = """
import json, torch, triton
import triton.language as tl

@triton.jit
def product(a, b, c):
    i = tl.arange(0, 16)
    index = i[:, None] * 16 + i[None, :]
    tl.store(c + index, tl.dot(tl.load(a + index), tl.load(b + index), input_precision="ieee"))

right = {}
for name in ("float32", "float16", "bfloat16"):
    a = (torch.arange(256).view(16, 16) % 5 - 2).to(getattr(torch, name))
    c = torch.empty(16, 16)
    product[(1,)](a, a.t().contiguous(), c)
    right[name] = torch.equal(c, a.float() @ a.float().t())
print(json.dumps(right))
"""
_probe_result: dict[str, bool] = {}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def poison():
    """Every uninitialised tensor that Python code asks for in the test is full of NaN."""
    with poisoned():
        yield


@pytest.fixture(scope="session")
def interpreter_dtypes() -> dict[str, bool]:
    """Which dtypes Triton's interpreter multiplies correctly: 16 x 16 integers in [-2, 2], exact in all of them.

    A test that needs a dtype that is wrong here skips and says so; it does not loosen its tolerance.
    """
    if not _probe_result:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        run = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=120
        )
        if run.returncode != 0:
            reason = run.stderr.strip().splitlines()[-1]
            pytest.skip(f"Triton's interpreter does not run here: {reason}")
        _probe_result.update(json.loads(run.stdout))
    return _probe_result


def pytest_terminal_summary(terminalreporter):
    if _probe_result:
        verdict = ", ".join(f"{name} {'right' if right else 'wrong'}" for name, right in _probe_result.items())
        terminalreporter.write_line(f"Triton interpreter, 16 x 16 product: {verdict}")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
