"""The Triton block attention kernels on the GPU they are made for (`pytest -m gpu tests/gpu/test_block_gpu.py`)."""

from __future__ import annotations

import pytest
import torch

from kernels import Rotary, block_attention
from kernels.block_attention import triton_block
from kernels.testing import make_inputs

from ..kernels import test_block_triton as checks

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = pytest.mark.parametrize("layout", checks.LAYOUTS)


@LAYOUTS
@pytest.mark.parametrize("dtype", [BF16, HALF], ids=["bf16", "fp16"])
def test_every_length(layout, dtype):
    checks.lengths(checks.LAYOUTS[layout], DEVICE, dtype, 128, min_snr=45)


@LAYOUTS
@pytest.mark.parametrize(("head_dim", "block_size"), [(32, 16), (32, 64), (64, 64)])
def test_every_length_in_float32(layout, head_dim, block_size):
    """Exact products are unrolled into FMAs: seconds of compilation up to head_dim 64, minutes at 128."""
    checks.lengths(checks.LAYOUTS[layout], DEVICE, FULL, head_dim, min_snr=45, block_size=block_size)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@LAYOUTS
def test_float32_at_head_dim_128(layout):
    checks.lengths(checks.LAYOUTS[layout], DEVICE, FULL, 128, [(1, 63, 64, 65), (0, 130)], min_snr=45)


@LAYOUTS
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_every_head_dim(layout, head_dim):
    batches = [(1, 63, 200), (64, 65)]
    checks.lengths(checks.LAYOUTS[layout], DEVICE, BF16, head_dim, batches, min_snr=45)


def test_block_sizes_and_head_groups():
    checks.block_sizes(DEVICE, BF16, 128)
    checks.head_groups(DEVICE, BF16, 96)


def test_neighbours_and_company():
    checks.neighbours(DEVICE, BF16, 128)
    checks.company(DEVICE, BF16, 128)


@LAYOUTS
@pytest.mark.parametrize("phase", triton_block.PHASES)
def test_every_configuration(layout, phase):
    inputs = make_inputs("block_attention", (130, 0, 61), num_heads=4, head_dim=128, dtype=BF16, device=DEVICE)
    settings = checks.settings_of(inputs, checks.LAYOUTS[layout])
    for config in triton_block.candidates(phase, 128, layout != "plain"):
        checks.expect(checks.run(inputs, config, **settings), inputs, min_snr=45, **settings)


def test_the_op_compiles_without_graph_breaks():
    inputs = make_inputs("block_attention", (70, 3, 0, 130), head_dim=64, dtype=BF16, device=DEVICE).leaves()
    rotary = Rotary(inputs.cos, inputs.sin)

    def call(q, k, v):
        return block_attention(q, k, v, inputs.q_offsets, rotary=rotary, impl="triton")

    o = call(inputs.q, inputs.k, inputs.v)
    compiled = torch.compile(call, fullgraph=True)(inputs.q, inputs.k, inputs.v)
    assert torch.equal(o, compiled)
    expected = torch.autograd.grad(o, (inputs.q, inputs.k, inputs.v), inputs.do)
    for x, e in zip(torch.autograd.grad(compiled, (inputs.q, inputs.k, inputs.v), inputs.do), expected, strict=True):
        assert torch.equal(x, e)
