"""No kernel is compiled anew for another number of rows: a compilation inside a training step costs it seconds."""

from __future__ import annotations

import sys

import pytest
import torch
import triton

import kernels
from kernels import mxfp8
from kernels.block_attention import Rotary
from kernels.fused_norm import norm_quantize, norm_rotary, pffn
from kernels.jagged import lengths_to_offsets

pytestmark = pytest.mark.gpu
HEADS, DIM = 4, 128
ROWS = range(200, 233)  # every remainder of a division by 16, twice
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def tlx_missing() -> bool:
    try:
        import triton.language.extra.tlx  # noqa: F401
    except ImportError:
        return True
    return not hopper


on_tlx = pytest.mark.skipif(tlx_missing(), reason="needs fbtriton and a Hopper GPU")


def compiled() -> dict[str, int]:
    """Kernel -> how many times it has been compiled in this process."""
    found = {}
    for module in [item for name, item in sys.modules.items() if name.startswith("kernels.")]:
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                caches = kernel.device_caches.values()
                found[f"{kernel.module}.{kernel.__name__}"] = sum(len(cache[0]) for cache in caches)
    return found


def tensors(rows: int, count: int):
    g = torch.Generator("cuda").manual_seed(rows)
    make = lambda: torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_()  # noqa: E731
    return [make() for _ in range(count)], lengths_to_offsets(torch.tensor([65, rows - 130, 60])).cuda()


def attention(impl, **settings):
    def call(rows):
        (q, k, v), offsets = tensors(rows, 3)
        return kernels.jagged_attention(q, k, v, offsets, impl=impl, **settings), (q, k, v)

    return call


def gdpa(impl):
    def call(rows):
        (q, k, v), offsets = tensors(rows, 3)
        return kernels.gdpa(q, k, v, offsets, impl=impl, scale=0.1), (q, k, v)

    return call


def feed_forward(rows):
    (s, k, v), offsets = tensors(rows, 3)
    return pffn(s, k, v, offsets, scale=0.1, impl="triton"), (s, k, v)


def table(rows):
    return torch.rand(rows, DIM // 2, device="cuda")


def block(impl):
    def call(rows):
        (q, k, v), offsets = tensors(rows, 3)
        return kernels.block_attention(q, k, v, offsets, rotary=Rotary(table(rows), table(rows)), impl=impl), (q, k, v)

    return call


def turned_norm(rows):
    (x,), _ = tensors(rows, 1)
    return norm_rotary(x, table(rows), table(rows), impl="triton"), (x,)


def attention_in_8_bits(rows):
    (q, k, v), offsets = tensors(rows, 3)
    recipe = mxfp8.get_recipe("full").on_hopper()
    return kernels.jagged_attention(q, k, v, offsets, precision=recipe), (q, k, v)


def rows_in_8_bits(rows):
    (x,), _ = tensors(rows, 1)
    return [norm_quantize(x.detach().flatten(1)), mxfp8.hopper.by_row(x.detach().flatten(1))], ()


CALLS = {
    "v2": attention("v2"),
    "v3": attention("v3"),
    "v4": pytest.param(attention("v4"), marks=on_tlx),
    "v4_window": pytest.param(attention("v4", window=64), marks=on_tlx),
    "gdpa_triton": gdpa("triton"),
    "gdpa_tlx": pytest.param(gdpa("tlx"), marks=on_tlx),
    "pffn": feed_forward,
    "block_triton": block("triton"),
    "block_tlx": pytest.param(block("tlx"), marks=on_tlx),
    "norm_rotary": turned_norm,
    "attention_8_bits": pytest.param(attention_in_8_bits, marks=on_tlx),
    "rows_8_bits": pytest.param(rows_in_8_bits, marks=pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_any_number_of_rows_runs_what_the_first_one_compiled(call):
    def run(rows):
        out, leaves = call(rows)
        if leaves:
            torch.autograd.grad(out, leaves, torch.ones_like(out))

    run(ROWS[3])
    before = compiled()
    assert sum(before.values()), "no compiled kernel was found, so none could be counted"
    for rows in ROWS:
        run(rows)
    torch.cuda.synchronize()
    again = {name: count - before.get(name, 0) for name, count in compiled().items() if count != before.get(name, 0)}
    assert not again, f"compiled again: {again}"
