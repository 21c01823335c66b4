"""The Triton block attention kernels without a GPU: values in the interpreter, resources by compiling for sm_90."""

from __future__ import annotations

import pytest
import torch

from kernels.block_attention import eager, reference, triton_block
from kernels.block_attention.triton_block import Config, backward_with, candidates, forward_with
from kernels.rotary import Rotary
from kernels.testing import assert_within_eager, make_inputs, poisoned, snr_db

from . import triton_interpreted
from .triton_offline import compiling

# Local memory a thread may use (bytes): the rotary backward holds a gradient in two layouts and the tables.
MAX_LOCAL = {("fwd", False): 0, ("bwd", False): 32, ("fwd", True): 64, ("bwd", True): 576}
LAYOUTS = {"plain": None, "interleaved": True, "half": False}
LENGTHS = [(2, 0, 1), (0, 0), (), (1, 63, 64, 65), (70, 70), (3, 0, 130)]


def settings_of(inputs, interleaved, block_size=64, on=("q", "k", "v")):
    rotary = None if interleaved is None else Rotary(inputs.cos, inputs.sin, interleaved, on)
    return {"block_size": block_size, "scale": inputs.q.shape[-1] ** -0.5, "rotary": rotary}


def run(inputs, config=None, module=triton_block, **settings):
    """(o, dq, dk, dv) of a module's kernels, uninitialised memory full of NaN."""
    arguments = (inputs.q, inputs.k, inputs.v, inputs.q_offsets)
    with poisoned():
        return (
            module.forward_with(config, *arguments, **settings),
            *module.backward_with(config, inputs.do, *arguments, **settings),
        )


def expect(actual, inputs, roundings=8.0, min_snr=None, **settings):
    def of(module, dtype):
        q, k, v, do = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.do))
        o = module.forward(q, k, v, inputs.q_offsets, **settings)
        return o, *module.backward(do, q, k, v, o, inputs.q_offsets, **settings)

    plain, exact = of(eager, inputs.q.dtype), of(reference, torch.float64)
    for name, x, e, r in zip(("o", "dq", "dk", "dv"), actual, plain, exact, strict=True):
        assert_within_eager(x, e, r, name=name, roundings=roundings)
        if min_snr is not None and x.numel() and bool((r != 0).any()):
            assert snr_db(x, r) > min_snr, (name, snr_db(x, r))


def lengths(
    interleaved, device="cpu", dtype=torch.float32, head_dim=32, batches=LENGTHS, min_snr=None, block_size=64,
    module=triton_block,
):  # fmt: skip
    for batch in batches:
        inputs = make_inputs("block_attention", batch, head_dim=head_dim, dtype=dtype, device=device, spare_rows=2)
        settings = settings_of(inputs, interleaved, block_size)
        expect(run(inputs, module=module, **settings), inputs, min_snr=min_snr, **settings)


def block_sizes(device="cpu", dtype=torch.float32, head_dim=32):
    inputs = make_inputs("block_attention", (70, 0, 33), head_dim=head_dim, dtype=dtype, device=device)
    for block_size in triton_block.BLOCK_SIZES:
        settings = settings_of(inputs, True, block_size)
        expect(run(inputs, **settings), inputs, **settings)
    with pytest.raises(ValueError, match="block_size 48"):
        run(inputs, **settings_of(inputs, None, 48))


def head_groups(device="cpu", dtype=torch.float32, head_dim=24):
    """Three heads in groups of two, a padded head size, rotary on some tensors only."""
    inputs = make_inputs("block_attention", (3, 70), num_heads=3, head_dim=head_dim, dtype=dtype, device=device)
    for interleaved in (True, False):
        for on in (("q",), ("k", "v"), ("q", "k", "v")):
            settings = settings_of(inputs, interleaved, 32, on)
            expect(run(inputs, Config(2, 4, 1), **settings), inputs, **settings)


def neighbours(device="cpu", dtype=torch.float32, head_dim=32, module=triton_block):
    """NaN in the middle sequence, and in another block of the same sequence, reaches nobody."""
    batch = (64 + 5, 1, 64)
    clean = make_inputs("block_attention", batch, head_dim=head_dim, dtype=dtype, device=device)
    for interleaved in LAYOUTS.values():
        expected = run(clean, module=module, **settings_of(clean, interleaved))
        dirty = make_inputs("block_attention", batch, head_dim=head_dim, dtype=dtype, device=device)
        for t in (dirty.q, dirty.k, dirty.v, dirty.do, dirty.cos, dirty.sin):
            t[64:70] = float("nan")
        for x, e in zip(run(dirty, module=module, **settings_of(dirty, interleaved)), expected, strict=True):
            assert torch.equal(x[:64], e[:64]) and torch.equal(x[70:], e[70:])


def company(device="cpu", dtype=torch.float32, head_dim=32, module=triton_block):
    """A sequence alone and among others; int32 and strided offsets; views of one buffer: the same bits."""
    inputs = make_inputs("block_attention", (3, 0, 70), head_dim=head_dim, dtype=dtype, device=device, fused=True)
    expected = run(inputs, module=module, **settings_of(inputs, True))
    alone = make_inputs("block_attention", (70,), head_dim=head_dim, dtype=dtype, device=device)
    for name in ("q", "k", "v", "do", "cos", "sin"):
        setattr(alone, name, getattr(inputs, name)[3:].contiguous())
    for x, e in zip(run(alone, module=module, **settings_of(alone, True)), expected, strict=True):
        assert torch.equal(x, e[3:])
    inputs.q_offsets = torch.stack((inputs.q_offsets.int(),) * 2, 1)[:, 0]
    for x, e in zip(run(inputs, module=module, **settings_of(inputs, True)), expected, strict=True):
        assert torch.equal(x, e)


CHECKS = {
    **{f"lengths {name}": (lambda i=i: lengths(i)) for name, i in LAYOUTS.items()},
    "half precision": lambda: lengths(True, dtype=torch.float16, batches=[(70, 3)], min_snr=45),
    "block sizes": block_sizes,
    "head groups": head_groups,
    "neighbours": neighbours,
    "company": company,
}


@pytest.fixture(scope="module")
def interpreted():
    return triton_interpreted.results(__name__)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(interpreted, check):
    assert interpreted[check] is None, interpreted[check]


def compiled(phase, config, interleaved, head_dim=128, block_size=64):
    rows = torch.empty(4096, 4, head_dim, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(9, dtype=torch.int64, device="meta")
    table = torch.empty(4096, head_dim // 2, device="meta")
    rotary = None if interleaved is None else Rotary(table, table, interleaved)
    settings = {"block_size": block_size, "scale": 0.1, "rotary": rotary}
    with compiling() as found:
        if phase == "fwd":
            forward_with(config, rows, rows, rows, offsets, **settings)
        else:
            backward_with(config, rows, rows, rows, rows, offsets, **settings)
    return found[-1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", triton_block.PHASES)
def test_defaults_compile_for_hopper(phase, layout):
    kernel = compiled(phase, None, LAYOUTS[layout])
    assert kernel.local_bytes <= MAX_LOCAL[phase, layout != "plain"] and kernel.shared_bytes <= 232448, kernel


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", triton_block.PHASES)
def test_candidates_compile_for_hopper(phase, layout):
    for config in candidates(phase, 128, LAYOUTS[layout] is not None):
        kernel = compiled(phase, config, LAYOUTS[layout])
        assert kernel.local_bytes <= MAX_LOCAL[phase, layout != "plain"], (config, kernel)
        assert kernel.shared_bytes <= 232448, (config, kernel)


if __name__ == "__main__":
    triton_interpreted.main(CHECKS)
