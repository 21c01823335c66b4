"""Triton kernels of jagged attention without a GPU.

In the interpreter for their values, by the compiler for sm_90 for their cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from kernels.jfa import configs, triton_schemes, v1_masked, v2_tuned, v3_subtraction

from .jfa_triton_checks import INTERPRETED
from .triton_offline import compiling

# The interpreter checks run in one process, inside the first test that asks; a busy machine may need minutes.
pytestmark = pytest.mark.timeout(1300)

# Local memory a thread may use (bytes), spills and stack, up to head_dim 128. The fastest configurations of the sweep
# put 128 rows (fwd) or two accumulators (dkdv, atomic) on few warps and spill a little; the owner walk's read, add and
# write of dQ needs more addresses than registers are left. Versions of Triton differ by up to a factor of two.
# With descriptors there are fewer addresses, and one loop.
MAX_LOCAL = {
    "fwd": 160, "fwd_tma": 0, "fwd_window": 0, "fwd_few": 0, "v3": 96, "dq": 32, "dkdv": 192, "atomic": 256,
    "dq_tma": 0, "dkdv_tma": 32, "atomic_tma": 256, "fused": 0, "owner": 640,
}  # fmt: skip
MAX_LOCAL_256 = MAX_LOCAL | {"fwd": 32, "dq": 384, "atomic": 320, "fused": 768, "owner": 896, "dq_tma": 384,
                             "dkdv_tma": 192, "atomic_tma": 320}  # fmt: skip
MAX_LOCAL_WINDOW = 320  # the bounds of a window take what registers are left
PHASE_OF = {
    "split": ("dq", "dkdv"),
    "split_tma": ("dq_tma", "dkdv_tma"),
    "atomic": ("atomic",),
    "atomic_tma": ("atomic_tma",),
    "recompute": ("fused",),
    "owner": ("owner",),
    "serial": ("owner",),
}


@pytest.fixture(scope="module")
def interpreted():
    """Results of all checks, from one process that runs Triton's interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.kernels.jfa_triton_checks"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-2000:]
    return {line["check"]: line["failure"] for line in map(json.loads, run.stdout.splitlines())}


@pytest.mark.parametrize("check", INTERPRETED)
def test_in_the_interpreter(check, interpreted):
    assert check in interpreted, "the process did not reach this check"
    assert interpreted[check] is None, interpreted[check]


def _arguments(head_dim: int, dtype=torch.bfloat16):
    def meta(*shape, dtype=dtype):
        return torch.empty(*shape, dtype=dtype, device="meta")

    offsets = meta(10, dtype=torch.int64)
    rows = [meta(1000, 4, head_dim) for _ in range(3)]
    return rows, offsets, meta(4, 1000, dtype=torch.float32)


def compile_forward(phase: str, head_dim: int, config=None, **keywords):
    """A forward kernel, compiled for sm_90: v2's, or with phase "v3" v3's (by descriptors)."""
    (q, k, v), offsets, _ = _arguments(head_dim)
    if phase == "fwd_window":
        keywords = {"window": 128} | keywords
    q, q_offsets = (q[:32], None) if phase == "fwd_few" else (q, offsets)
    with configs.forced(**({phase: config} if config else {})), compiling() as found:
        if phase == "v3":
            v3_subtraction.masked_forward(q, k, v, offsets, offsets, scale=0.1, tma=True, **keywords)
        else:
            settings = {"scale": 0.1, "window": None, "bias": None, "tma": phase != "fwd"} | keywords
            v2_tuned.forward(q, k, v, q_offsets, offsets, **settings)
    return found[-1]


def compile_backward(scheme: str, head_dim: int, config=None, window=None):
    """The kernels of a backward scheme, compiled for sm_90."""
    (q, k, v), offsets, lse = _arguments(head_dim)
    forced = dict.fromkeys(PHASE_OF[scheme], config) if config else {}
    with configs.forced(**forced), compiling() as found:
        triton_schemes.backward(
            q, q, k, v, q, lse, offsets, offsets, scale=0.1, window=window, bias=None,
            scheme=scheme.removesuffix("_tma"),
            tma=scheme.endswith("_tma"),
        )  # fmt: skip
    return [kernel for kernel in found if kernel.name not in ("tile_list_kernel", "delta_kernel")]


def _fits(kernel, limit: int) -> None:
    assert kernel.shared_bytes <= 227 * 1024, kernel
    assert kernel.local_bytes <= limit, (
        f"{kernel.name}: {kernel.local_bytes} bytes of local memory a thread, allowed {limit}"
    )


@pytest.mark.parametrize(
    "head_dim", [64, 128, pytest.param(256, marks=pytest.mark.slow), pytest.param(96, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("phase", ["fwd", "fwd_tma", "fwd_window", "fwd_few", "v3"])
def test_forward_compiles_within_its_registers(phase, head_dim):
    limits = MAX_LOCAL if head_dim <= 128 else MAX_LOCAL_256
    _fits(compile_forward(phase, head_dim), limits[phase])


@pytest.mark.parametrize(
    "head_dim", [128, pytest.param(64, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("scheme", PHASE_OF)
def test_backward_compiles_within_its_registers(scheme, head_dim):
    limits = MAX_LOCAL if head_dim <= 128 else MAX_LOCAL_256
    found = compile_backward(scheme, head_dim)
    assert len(found) == len(PHASE_OF[scheme])
    for kernel, phase in zip(found, PHASE_OF[scheme], strict=True):
        _fits(kernel, limits[phase])


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("phase", configs.PHASES)
def test_every_candidate_compiles(phase, head_dim):
    for config in configs.candidates(phase, head_dim):
        if phase.startswith("fwd"):
            kernels = [compile_forward(phase, head_dim, config)]
        else:
            scheme = next(name for name, phases in PHASE_OF.items() if phase in phases)
            kernels = compile_backward(scheme, head_dim, config)
        assert all(kernel.shared_bytes <= 227 * 1024 for kernel in kernels), config


def test_the_naive_start_compiles():
    (q, k, v), offsets, lse = _arguments(128)
    settings = {"scale": 0.1, "window": None, "bias": None}
    with compiling() as found:
        v1_masked.forward(q, k, v, offsets, offsets, **settings)
        v1_masked.backward(q, q, k, v, q, lse, offsets, offsets, **settings)
    assert {"forward_kernel", "backward_kernel"} <= {kernel.name for kernel in found}


def test_window_and_masking_variants_compile():
    _fits(compile_forward("fwd", 128, window=256), MAX_LOCAL_WINDOW)
    _fits(compile_forward("v3", 128, masking="mask2d"), 0)


def test_forced_configs_are_checked():
    with pytest.raises(ValueError, match="unknown phase 'forward'"), configs.forced(forward=configs.FLOAT32):
        pass
    with pytest.raises(ValueError, match="unknown phase"):
        configs.candidates("bwd", 128)
    first = configs.candidates("fwd", 128)[0]
    assert first == configs.select("fwd", 128, torch.bfloat16)
    with configs.forced(fwd=configs.FLOAT32):
        assert configs.select("fwd", 128, torch.bfloat16) == configs.FLOAT32
    assert configs.select("fwd", 128, torch.bfloat16) == first
