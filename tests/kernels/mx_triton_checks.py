"""Checks of the quantiser's Triton kernel under the interpreter: same bytes as plain torch and as the oracle.

python -m tests.kernels.mx_triton_checks runs them; test_mx_triton.py reports them.
"""

from __future__ import annotations

import importlib
import itertools

import numpy as np
import torch

from kernels import mxfp8
from kernels.mxfp8 import formats, hopper, hopper_attention, triton_quantize, triton_round
from tests.kernels import mx_oracle
from tests.kernels.triton_interpreted import main

quantize = importlib.import_module("kernels.mxfp8.quantize")  # the package has a function of that name
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def awkward(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32 of many magnitudes: zero blocks, subnormals, values at and beside 448 and powers of two, outliers."""
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draws) * torch.exp2(torch.randint(-40, 40, shape, generator=draws).float())
    flat = x.view(-1)
    flat[:64] = 0.0
    count = flat.numel()
    specials = torch.tensor(
        [448.0, 449.0, -448.0, 464.0, 1.75, 1.7500001, 256.0, 255.99998, 1e-45, -1e-40, 3e38, 57344.0]
    )
    places = torch.randperm(count, generator=draws)[: 4 * len(specials)]
    flat[places[places >= 64]] = specials.repeat(4)[: int((places >= 64).sum())]
    return x


def by_kernel(x, **keywords) -> mxfp8.MXTensor:
    """`quantize` with the kernel in place of plain torch."""
    plain, asked = quantize.runs_in_kernel, []

    def fits(*arguments) -> bool:
        asked.append(triton_quantize.fits(*arguments))
        return asked[-1]

    quantize.runs_in_kernel = fits
    try:
        return mxfp8.quantize(x, **keywords)
    finally:
        quantize.runs_in_kernel = plain
        assert asked == [True], f"the kernel does not take {keywords}"


def same(x, **keywords) -> None:
    """Kernel and plain torch agree in every byte, NaN elements by being NaN."""
    if keywords.get("stochastic"):
        got = by_kernel(x, **keywords, generator=torch.Generator().manual_seed(3))
        want = mxfp8.quantize(x, **keywords, generator=torch.Generator().manual_seed(3))
    else:
        got, want = by_kernel(x, **keywords), mxfp8.quantize(x, **keywords)
    assert torch.equal(got.scale, want.scale), f"scales differ: {keywords}"
    a, b = got.data.float(), want.data.float()
    differ = (got.data.view(torch.uint8) != want.data.view(torch.uint8)) & ~(a.isnan() & b.isnan())
    assert not bool(differ.any()), f"{int(differ.sum())} elements differ: {keywords}, {a[differ][:4]}, {b[differ][:4]}"


def check_rows():
    for dtype, mode in itertools.product(DTYPES, formats.SCALE_MODES):
        same(awkward(7, 200), dtype=dtype, scale_mode=mode)


def check_other_axis_and_squares():
    x = awkward(40, 70, seed=1)
    for mode in formats.SCALE_MODES:
        same(x, axis=0, scale_mode=mode)
        same(x, block=(32, 32), scale_mode=mode)
    same(awkward(40, 3, 64, seed=2), block=(32, 32))
    same(awkward(40, 3, 64, seed=2), axis=0)
    same(awkward(33, seed=3))
    same(x.T, axis=1)
    same(x.bfloat16())


def check_jagged():
    offsets = torch.tensor([0, 5, 5, 40, 104, 130])
    x = awkward(140, 2, 33, seed=4)
    for keywords in ({"axis": 0}, {"axis": 0, "block": (32, 32)}, {"axis": -1, "block": (32, 32)}):
        same(x, offsets=offsets, **keywords)
    same(x.flatten(1), offsets=offsets.int(), axis=-1)
    same(x[:0], offsets=torch.tensor([0]), axis=0)


def check_not_finite():
    x = awkward(4, 96, seed=5)
    x[0, 3], x[1, 40], x[2, 70], x[3, 1] = float("inf"), float("nan"), -float("inf"), -float("nan")
    for dtype in DTYPES:
        same(x, dtype=dtype)
        got = by_kernel(x, dtype=dtype)
        assert got.scale[0, 0] == got.scale[1, 1] == got.scale[2, 2] == got.scale[3, 0] == formats.SCALE_NAN
        assert got.dequantize().isnan().sum() == 4 * 32


def check_stochastic():
    for dtype in DTYPES:
        same(awkward(9, 70, seed=6), stochastic=True, dtype=dtype)
    same(awkward(70, 2, 33, seed=7), stochastic=True, block=(32, 32))
    same(awkward(70, 40, seed=8), stochastic=True, axis=0, offsets=torch.tensor([0, 3, 60]))


def check_hadamard():
    for dtype in DTYPES:
        same(torch.randn(5, 96, generator=torch.Generator().manual_seed(9)), hadamard=5, dtype=dtype)
    same(awkward(64, 40, seed=10), hadamard=5, axis=0)
    same(awkward(96, 40, seed=10), hadamard=5, axis=0, offsets=torch.tensor([0, 32, 96]))
    same(awkward(64, 64, seed=11).bfloat16(), hadamard=5, block=(32, 32), stochastic=True)


def check_oracle():
    x = awkward(6, 64, seed=12)
    x[x.abs() > 2.0**100] = 1.0
    blocks = [(row, slice(start, start + 32)) for row in range(6) for start in (0, 32)]
    for dtype, mode in itertools.product(DTYPES, formats.SCALE_MODES):
        data, codes = mx_oracle.quantize_blocks(x.numpy(), blocks, dtype, mode)
        got = by_kernel(x, dtype=dtype, scale_mode=mode)
        assert got.scale.flatten().tolist() == codes
        assert np.array_equal(got.data.view(torch.uint8).numpy(), data), f"{dtype} {mode}"


def by_hopper_kernel(function, *arguments, **keywords):
    """A function of kernels.mxfp8.hopper with the kernel in place of plain torch."""
    plain = hopper.runs_in_kernel
    hopper.runs_in_kernel = triton_quantize.runs_on
    try:
        return function(*arguments, **keywords)
    finally:
        hopper.runs_in_kernel = plain


def same_operand(got, want) -> None:
    """Equal bytes and equal scales; the layout of the scales included."""
    assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
    assert torch.equal(got.scale, want.scale) and got.scale.stride() == want.scale.stride()


def check_hopper_blocks():
    x = awkward(20, 144, seed=13)
    for dtype in DTYPES:
        same_operand(by_hopper_kernel(hopper.by_row, x, dtype=dtype), hopper.by_row(x, dtype=dtype))
    for function in (hopper.by_column, hopper.by_tile):
        same_operand(by_hopper_kernel(function, x), function(x))
    same_operand(by_hopper_kernel(hopper.by_tile, x, turned=True), hopper.by_tile(x, turned=True))
    y = torch.randn(32, 64, generator=torch.Generator().manual_seed(14)).bfloat16()
    options = {"hadamard": formats.Hadamard(3), "seed": torch.tensor([7])}
    for function in (hopper.by_row, hopper.by_column):
        same_operand(by_hopper_kernel(function, y, **options), function(y, **options))


def check_attention_operands():
    draws = torch.Generator().manual_seed(16)
    q, k, v = (torch.randn(150, 2, 32, generator=draws) for _ in range(3))
    k[100:, 1] = 0
    for offsets, scales in (([0, 5, 5, 140], "fine"), ([0, 5, 5, 140], "tile"), ([0, 0, 128], "fine")):
        offsets = torch.tensor(offsets)
        got = by_hopper_kernel(hopper_attention.quantize, q, k, v, offsets, scales=scales)
        want = hopper_attention.quantize(q, k, v, offsets, scales=scales)
        used = int(hopper_attention.padded_starts(offsets)[-1])
        for name in ("q", "k"):
            assert torch.equal(getattr(got, name).view(torch.uint8), getattr(want, name).view(torch.uint8)), name
        keys = (slice(None), slice(used)) if got.fine else slice(used // 128)
        assert torch.equal(got.q_scale, want.q_scale) and torch.equal(got.k_scale[keys], want.k_scale[keys])
        assert torch.equal(got.v.view(torch.uint8)[:, :used], want.v.view(torch.uint8)[:, :used])
        assert torch.equal(got.v_scale[: used // 128], want.v_scale[: used // 128])


def check_norm_quantize():
    from kernels.fused_norm import norm_quantize

    for kind, shape in itertools.product(("rms", "layer"), ((5, 160), (37, 128), (3, 512))):
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(15)) * 3 + 1
        x[0] = 0
        got, want = norm_quantize(x, kind=kind, impl="fused"), norm_quantize(x, kind=kind, impl="separate")
        assert torch.equal(got.scale, want.scale) and got.scale.stride() == want.scale.stride()
        # Sums in another order: an element next to a tie may round the other way.
        steps = (got.data.view(torch.uint8).int() - want.data.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 1e-3


def check_round_trips_of_emulation():
    """Values of `round_to_mx`, of matrices, stacks and transposes, along either axis and in squares; partial blocks."""
    dims = ((-1,), (-2,), (-2, -1))
    cases = zip(((34, 40), (2, 33, 9), (2, 1, 9, 34)), dims, formats.SCALE_MODES, strict=True)
    for (shape, dims, mode), dtype in zip(cases, itertools.cycle(DTYPES), strict=False):
        x = awkward(*shape)
        x.view(-1)[-1] = float("inf")
        for y in (x, x.transpose(0, -1)):
            where = tuple(sorted(dim % y.dim() for dim in dims))
            assert triton_round.fits(y, where)
            got = triton_round.round_values(y, where, dtype=dtype, scale_mode=mode, stochastic=False)
            want = quantize.round_to_mx(y, dims, dtype=dtype, scale_mode=mode)
            assert torch.equal(got.nan_to_num(1.5), want.nan_to_num(1.5)), (shape, dims, mode)
            assert torch.equal(got.isnan(), want.isnan()) and bool(want.isnan().any())


def check_stochastic_round_trip():
    """Neighbours of the format alone, the mean is the number, and one torch seed gives one result."""
    x = torch.full((64, 32), 0.3)
    x[:, 0] = 1.0
    options = {"dtype": torch.float8_e4m3fn, "scale_mode": "rceil", "stochastic": True}
    torch.manual_seed(5)
    got = triton_round.round_values(x, (1,), **options)
    assert set(got[:, 1:].unique().tolist()) == {0.28125, 0.3125}
    assert abs(float(got[:, 1:].mean()) - 0.3) < 0.002
    torch.manual_seed(5)
    assert torch.equal(triton_round.round_values(x, (1,), **options), got)


def check_rotations_of_emulation():
    """Those of `formats.Hadamard` to the last bit, there and back."""
    x, hadamard = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)), formats.Hadamard(3)
    assert torch.equal(triton_round.rotated(x, hadamard), hadamard.rotate(x))
    assert torch.equal(triton_round.rotated(x, hadamard, back=True), hadamard.rotate_back(x))


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}

if __name__ == "__main__":
    main(CHECKS)
