"""The block attention kernels on the GPU they are made for (`pytest -m gpu tests/gpu/test_block_gpu.py`).

Triton's anywhere from sm_80 on; TLX's on a Hopper GPU with fbtriton in place of stock Triton (envs/gpu-tlx.txt).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kernels import Rotary, block_attention
from kernels.block_attention import triton_block
from kernels.block_attention.api import REGISTRY
from kernels.jagged import lengths_to_offsets
from kernels.registry import Case
from kernels.testing import make_inputs

from ..kernels import test_block_triton as checks

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = pytest.mark.parametrize("layout", checks.LAYOUTS)


@pytest.fixture(scope="module")
def tlx():
    reason = REGISTRY.why_not("tlx", Case.of(torch.empty(1, 1, 128, dtype=BF16, device=DEVICE)))
    if reason is not None:
        pytest.skip(f"tlx {reason}")
    from kernels.block_attention import tlx

    return tlx


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


@LAYOUTS
@pytest.mark.parametrize(("dtype", "head_dim"), [(BF16, 128), (BF16, 64), (HALF, 128)])
def test_tlx_at_every_length(tlx, layout, dtype, head_dim):
    batches = [*checks.LENGTHS, (0,), (64,), (128, 1, 191)]
    checks.lengths(checks.LAYOUTS[layout], DEVICE, dtype, head_dim, batches, min_snr=45, module=tlx)


@LAYOUTS
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 128), (1, 128), (3, 64)])
def test_tlx_over_many_blocks(tlx, layout, heads, head_dim):
    """Several rounds of every ring of buffers, odd and even numbers of blocks a program; twice the same bits."""
    lengths = torch.randint(0, 700, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    sizes = {"num_heads": heads, "head_dim": head_dim, "spare_rows": 77}
    inputs = make_inputs("block_attention", lengths, dtype=BF16, device=DEVICE, **sizes)
    settings = checks.settings_of(inputs, checks.LAYOUTS[layout])
    first = checks.run(inputs, module=tlx, **settings)
    checks.expect(first, inputs, min_snr=45, **settings)
    for x, e in zip(checks.run(inputs, module=tlx, **settings), first, strict=True):
        assert torch.equal(x, e)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("on", [("q",), ("k", "v")])
def test_tlx_turns_what_it_is_told_to(tlx, interleaved, on):
    inputs = make_inputs("block_attention", (3, 70), num_heads=3, head_dim=128, dtype=BF16, device=DEVICE)
    settings = checks.settings_of(inputs, interleaved, 64, on)
    checks.expect(checks.run(inputs, module=tlx, **settings), inputs, min_snr=45, **settings)


def test_tlx_neighbours_and_company(tlx):
    checks.neighbours(DEVICE, BF16, 128, module=tlx)
    checks.company(DEVICE, BF16, 128, module=tlx)


@LAYOUTS
def test_tlx_writes_between_its_guards(tlx, layout, monkeypatch):
    """Rows before and behind the outputs stay as they are."""
    inputs = make_inputs("block_attention", (70, 3, 129), num_heads=3, head_dim=128, dtype=BF16, device=DEVICE)
    settings = checks.settings_of(inputs, checks.LAYOUTS[layout])
    empty, buffers = torch.empty, []

    def guarded(shape, **keywords):
        if len(shape) != 3:
            return empty(shape, **keywords)
        buffers.append(empty((shape[0] + 128, *shape[1:]), **keywords).fill_(7.0))
        return buffers[-1][64:-64]

    monkeypatch.setattr(torch, "empty", guarded)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    tlx.forward_with(None, *arguments, **settings)
    tlx.backward_with(None, inputs.do, *arguments, **settings)
    assert len(buffers) == 4
    for buffer in buffers:
        assert (buffer[:64] == 7).all() and (buffer[-64:] == 7).all() and not (buffer[64:-64] == 7).all()


@LAYOUTS
def test_tlx_takes_views_of_a_fused_buffer(tlx, layout):
    q, k, v = torch.randn(200, 3, 4, 128, device=DEVICE, dtype=BF16).unbind(1)
    offsets = lengths_to_offsets(torch.tensor([100, 0, 70])).to(DEVICE)
    angles = torch.rand(200, 64, device=DEVICE)
    interleaved = checks.LAYOUTS[layout]
    rotary = None if interleaved is None else Rotary(angles.cos(), angles.sin(), interleaved)

    def call(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        o = block_attention(*leaves, offsets, rotary=rotary, impl="tlx")
        return o, *torch.autograd.grad(o, leaves, torch.ones_like(o))

    for x, e in zip(call(q, k, v), call(*(x.contiguous() for x in (q, k, v))), strict=True):
        assert torch.equal(x, e)


@LAYOUTS
def test_every_tlx_configuration(tlx, layout):
    inputs = make_inputs("block_attention", (130, 0, 61), num_heads=4, head_dim=128, dtype=BF16, device=DEVICE)
    settings = checks.settings_of(inputs, checks.LAYOUTS[layout])
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    for phase in tlx.PHASES:
        for config in tlx.candidates(phase, 128):
            if phase == "fwd":
                gradients = tlx.backward_with(None, inputs.do, *arguments, **settings)
                actual = (tlx.forward_with(config, *arguments, **settings), *gradients)
            else:
                actual = (
                    tlx.forward_with(None, *arguments, **settings),
                    *tlx.backward_with(config, inputs.do, *arguments, **settings),
                )
            checks.expect(actual, inputs, min_snr=45, **settings)


def test_tlx_in_a_thread_that_has_launched_nothing(tlx):
    """A new thread has no CUDA context, and descriptors are encoded before anything is launched there."""
    inputs = make_inputs("block_attention", (70, 3), num_heads=4, head_dim=128, dtype=BF16, device=DEVICE)
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    settings = checks.settings_of(inputs, None)
    expected = tlx.forward_with(None, *arguments, **settings)  # the list of blocks is kept from here on
    with ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(tlx.forward_with, None, *arguments, **settings).result(), expected)


def test_tlx_refuses_other_blocks(tlx):
    inputs = make_inputs("block_attention", (70,), head_dim=64, dtype=BF16, device=DEVICE)
    with pytest.raises(ValueError, match="impl 'tlx' needs block_size 64"):
        block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets, block_size=32, impl="tlx")
    o = block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets, block_size=32)
    by_triton = block_attention(inputs.q, inputs.k, inputs.v, inputs.q_offsets, block_size=32, impl="triton")
    assert torch.equal(o, by_triton)
