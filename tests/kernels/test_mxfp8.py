"""MX formats and quantiser against a table-driven oracle, byte by byte, and the worked cases of block scaling."""

from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import mxfp8
from tests.kernels import mx_oracle as oracle

formats = sys.modules["kernels.mxfp8.formats"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (E4M3, E5M2)
MODES = ("floor", "ceil", "rceil")


def codes_of(data: torch.Tensor) -> list[int]:
    return data.view(torch.uint8).flatten().tolist()


def offsets_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)


def log_uniform(shape, seed: int, low: float = -30, high: float = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(shape, generator=generator) * (high - low) + low
    return torch.randn(shape, generator=generator).sign() * torch.exp2(exponent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_codes_mean_what_the_format_says(dtype):
    values = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype).float().tolist()
    for code, (ours, defined) in enumerate(zip(values, oracle.table(dtype), strict=True)):
        assert ours == defined or (math.isnan(ours) and math.isnan(defined)), code


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_is_nearest_even_everywhere(dtype):
    values = np.array([v for v in oracle.table(dtype)[:128] if math.isfinite(v)])
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(side)) for side in (0, 1e9)]
    past = np.array([values[-1] * f for f in (1.01, 1.1, 2, 1e9)], np.float32)
    x = np.concatenate([values.astype(np.float32), middles, *beside, past, log_uniform(4000, 1, -25, 20).numpy()])
    x = np.concatenate([x, -x]).astype(np.float32)
    ours = mxfp8.saturating_cast(torch.from_numpy(x), dtype)
    assert codes_of(ours) == oracle.nearest(x.astype(np.float64), dtype).tolist()


def test_cast_saturates_finite_values_and_shows_the_rest():
    x = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0])
    assert mxfp8.saturating_cast(x, E4M3).float().tolist() == [448.0, 448.0, 448.0, 448.0, -448.0]
    rest = torch.tensor([math.inf, -math.inf, math.nan])
    assert mxfp8.saturating_cast(rest, E4M3).float().isnan().all()
    wide = mxfp8.saturating_cast(rest, E5M2).float()
    assert wide[:2].tolist() == [math.inf, -math.inf] and wide[2].isnan()
    assert mxfp8.saturating_cast(torch.tensor([61440.0, 1e9]), E5M2).float().tolist() == [57344.0, 57344.0]


def test_zero_blocks_are_exact_zeros():
    x = torch.zeros(1, 96)
    assert set(codes_of(mxfp8.quantize(x).data)) == {0}
    x[0, :32], x[0, 64:] = 3.0, -7.0
    for mode in MODES:
        for dtype in DTYPES:
            q = mxfp8.quantize(x, scale_mode=mode, dtype=dtype)
            assert (q.scale != 255).all()
            assert set(codes_of(q.data[:, 32:64])) <= {0x00, 0x80}
            assert q.dequantize().isfinite().all() and torch.equal(q.dequantize()[:, 32:64], torch.zeros(1, 32))
            assert torch.equal(q.dequantize()[:, 32:64] @ torch.ones(32, 4), torch.zeros(1, 4))
    assert torch.equal(mxfp8.quantize(x * -0.0).dequantize(), torch.zeros(1, 96))


SCALE_TABLE = {  # block maximum: codes of floor, ceil, rceil
    150.0: (126, 127, 126),
    448.0: (127, 128, 127),
    449.0: (127, 128, 128),
    500.0: (127, 128, 128),
    512.0: (128, 128, 128),
}


@pytest.mark.parametrize("amax", SCALE_TABLE)
@pytest.mark.parametrize("mode", MODES)
def test_scale_codes_of_the_three_modes(amax, mode):
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    q = mxfp8.quantize(x, scale_mode=mode)
    assert q.scale.tolist() == [[SCALE_TABLE[amax][MODES.index(mode)]]]


def test_floor_clips_500_and_rceil_does_not():
    x = torch.full((1, 32), 500.0)
    assert mxfp8.quantize(x, scale_mode="floor").dequantize().unique().tolist() == [448.0]
    assert mxfp8.quantize(x, scale_mode="rceil").dequantize().unique().tolist() == [512.0]


@pytest.mark.parametrize(("mode", "worst"), [("floor", 0.125), ("rceil", 0.0625)])
def test_worst_error_of_the_block_maximum(mode, worst):
    amax = torch.linspace(256, 512, 4097)[:-1, None]
    error = (mxfp8.quantize(amax.expand(-1, 32), scale_mode=mode).dequantize() / amax - 1).abs().max().item()
    assert worst * 0.94 < error <= worst  # rceil: half a step at 1 + 1/16, 5.9 %


def test_scale_codes_next_to_the_steps():
    up = torch.nextafter(torch.tensor(448.0), torch.tensor(1e9))
    assert formats.scale_codes(torch.tensor([448.0, up]), E4M3, "rceil").tolist() == [127, 128]
    edge = torch.tensor([57344.0, torch.nextafter(torch.tensor(57344.0), torch.tensor(1e9))])
    assert formats.scale_codes(edge, E5M2, "rceil").tolist() == [127, 128]
    for power in (-126, -30, 0, 1, 100, 127):  # log2 of the float below 2^127 rounds to 127; its bits do not
        below = torch.nextafter(torch.tensor(2.0**power), torch.tensor(0.0))
        expected = [oracle.code(float(v), E4M3, "floor") for v in (below, 2.0**power)]
        assert formats.scale_codes(torch.tensor([below, 2.0**power]), E4M3, "floor").tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    axis=st.sampled_from([0, 1, -1, -2]),
    mode=st.sampled_from(MODES),
    dtype=st.sampled_from(DTYPES),
    spread=st.sampled_from([2, 20, 120]),
)
def test_row_blocks_equal_the_oracle(seed, rows, columns, axis, mode, dtype, spread):
    x = log_uniform((rows, columns), seed, -spread, min(spread, 120))
    q = mxfp8.quantize(x, axis=axis, dtype=dtype, scale_mode=mode)
    if axis % 2 == 1:
        blocks = [np.s_[r, c : c + 32] for r in range(rows) for c in range(0, columns, 32)]
    else:
        blocks = [np.s_[r : r + 32, c] for r in range(0, rows, 32) for c in range(columns)]
    data, codes = oracle.quantize_blocks(x.numpy(), blocks, dtype, mode)
    assert q.scale.flatten().tolist() == codes
    assert np.array_equal(q.data.view(torch.uint8).numpy(), data)
    expected = np.array(oracle.table(dtype))[data]
    for index, code in zip(blocks, codes, strict=True):
        expected[index] *= 2.0 ** (code - 127)
    assert np.array_equal(q.dequantize().numpy(), expected.astype(np.float32))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    tail=st.integers(0, 3),
    square=st.booleans(),
    mode=st.sampled_from(MODES),
)
def test_jagged_blocks_equal_the_oracle(seed, lengths, tail, square, mode):
    offsets, total = offsets_of(*lengths), sum(lengths) + tail
    x = log_uniform((total, 2, 40), seed, -9, 9)
    x[total - tail :] = math.nan
    q = mxfp8.quantize(x, axis=0, block=(32, 32) if square else (1, 32), offsets=offsets, scale_mode=mode)
    step = 32 if square else 1
    blocks = [
        np.s_[row : min(row + 32, end), h, d : d + step]
        for start, end in itertools.pairwise(offsets.tolist())
        for row in range(start, end, 32)
        for h in range(2)
        for d in range(0, 40, step)
    ]
    data, codes = oracle.quantize_blocks(x.numpy(), blocks, E4M3, mode)
    assert q.scale.flatten().tolist() == codes
    assert np.array_equal(q.data.view(torch.uint8).numpy(), data)
    assert torch.equal(q.dequantize()[total - tail :], torch.zeros(tail, 2, 40))


def test_blocks_stop_at_sequence_ends():
    x = torch.cat([torch.full((20, 2), 0.0005), torch.full((12, 2), 300.0)])
    alone = mxfp8.quantize(x, axis=0, offsets=offsets_of(20, 12)).dequantize()
    assert alone[:20].unique().tolist() == [0.00048828125]
    shared = mxfp8.quantize(x, axis=0)
    assert shared.scale.unique().tolist() == [127] and shared.dequantize()[:20].abs().max() == 0


@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
@pytest.mark.parametrize("axis", [0, 1])
def test_empty_groups_change_no_byte(block, axis):
    x = log_uniform((96, 64), 3, -5, 5)
    groups = [mxfp8.quantize(x, axis=axis, block=block, offsets=offsets_of(*n)) for n in ([64, 0, 32], [64, 32])]
    assert torch.equal(groups[0].data.view(torch.uint8), groups[1].data.view(torch.uint8))
    assert torch.equal(groups[0].scale, groups[1].scale)
    assert torch.equal(groups[0].dequantize(), groups[1].dequantize())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_quantise(lengths):
    for axis in (0, 1):
        q = mxfp8.quantize(torch.zeros(0, 48), axis=axis, offsets=offsets_of(*lengths))
        assert q.data.shape == (0, 48) and q.dequantize().shape == (0, 48)


def test_scale_tiles_round_trip_and_ignore_padding():
    scale = torch.randint(
        0, 255, (200, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )  # [200, 96] data
    tiles = mxfp8.scales_to_tiles(scale)
    assert tiles.shape == (2, 1, 512)
    assert tiles[0, 0, 16 * 5 + 4 * 2 + 1] == scale[2 * 32 + 5, 1]  # byte 16 (r mod 32) + 4 (r div 32) + c
    assert torch.equal(mxfp8.scales_from_tiles(tiles, 200, 3), scale)
    padding = torch.ones_like(tiles, dtype=torch.bool)
    for r in range(200):
        for c in range(3):
            padding[r // 128, 0, 16 * (r % 32) + 4 * (r % 128 // 32) + c] = False
    assert (tiles[padding] == 0).all() and padding.sum() == 1024 - 600
    tiles[padding] = 255
    assert torch.equal(mxfp8.scales_from_tiles(tiles, 200, 3), scale)
    wide = torch.randint(0, 255, (129, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mxfp8.scales_from_tiles(mxfp8.scales_to_tiles(wide), 129, 9), wide)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bad_values_stay_visible_in_their_block_alone(bad, dtype):
    x = torch.ones(2, 64)
    x[1, 40] = bad
    q = mxfp8.quantize(x, dtype=dtype)
    assert q.scale[1, 1] == 255 and (q.scale.flatten()[:3] != 255).all()
    assert q.dequantize()[1, 32:].isnan().all()
    assert torch.equal(q.dequantize()[0], torch.ones(64)) and torch.equal(q.dequantize()[1, :32], torch.ones(32))


def test_extreme_magnitudes():
    tiny = torch.full((1, 32), 2.0**-140)  # a denormal float32: 2^-13 under the smallest scale, below half a step
    assert mxfp8.quantize(tiny).scale.item() == 0 and torch.equal(mxfp8.quantize(tiny).dequantize(), torch.zeros(1, 32))
    small = torch.full((1, 32), 2.0**-130)
    assert torch.equal(mxfp8.quantize(small).dequantize(), small)
    huge = torch.full((1, 32), torch.finfo(torch.float32).max)
    assert mxfp8.quantize(huge, scale_mode="floor").dequantize().unique().tolist() == [448.0 * 2.0**119]
    assert mxfp8.quantize(huge.bfloat16()).dequantize().isnan().all()  # bfloat16 rounds it to Inf


def test_input_dtypes_and_strides():
    x = log_uniform((64, 64), 5, -4, 4)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(mxfp8.quantize(x.to(dtype)).dequantize(), mxfp8.quantize(x.to(dtype).float()).dequantize())
    strided = torch.empty(64, 128)[:, ::2].copy_(x)
    assert torch.equal(mxfp8.quantize(strided).data.view(torch.uint8), mxfp8.quantize(x).data.view(torch.uint8))
    assert torch.equal(mxfp8.quantize(x.T, axis=0).scale, mxfp8.quantize(x).scale.T)


def test_square_blocks_serve_both_orientations():
    x = log_uniform((70, 40), 7, -6, 6)
    q, turned = mxfp8.quantize(x, block=(32, 32)), mxfp8.quantize(x.T, block=(32, 32))
    assert torch.equal(q.transpose().data.view(torch.uint8), turned.data.view(torch.uint8))
    assert torch.equal(q.transpose().scale, turned.scale) and q.scale.shape == (3, 2)
    assert torch.equal(q.transpose().dequantize(), q.dequantize().T)
    x = log_uniform((70, 40), 7, -15, 15)  # wide enough that a block's scale decides which elements vanish
    assert not torch.equal(mxfp8.quantize(x).dequantize(), mxfp8.quantize(x, axis=0).dequantize())
    with pytest.raises(ValueError, match="belong to one axis"):
        mxfp8.quantize(x).transpose()


def test_hadamard_is_orthogonal_and_undone():
    x, y = log_uniform((8, 64), 11, -3, 3), log_uniform((8, 64), 12, -3, 3)
    turn = mxfp8.Hadamard(5)
    assert torch.allclose(turn.matrix() @ turn.matrix().T, torch.eye(32), atol=1e-6)
    assert torch.allclose((turn.rotate(x) * turn.rotate(y)).sum(-1), (x * y).sum(-1), rtol=1e-5, atol=1e-3)
    assert torch.allclose(turn.rotate_back(turn.rotate(x)), x, atol=1e-5)
    assert not torch.equal(turn.matrix(), mxfp8.Hadamard(6).matrix())
    for axis in (0, 1):
        values = log_uniform((64, 64), 13, -3, 3)
        q = mxfp8.quantize(values, axis=axis, hadamard=5)
        assert (q.dequantize() - values).norm() < 0.04 * values.norm()
        assert (q.dequantize(rotated=True) - values).norm() > 0.5 * values.norm()


def test_hadamard_folds_into_the_other_operand():
    a, b = log_uniform((16, 64), 21, -2, 2), log_uniform((24, 64), 22, -2, 2)
    folded = (
        mxfp8.quantize(a, hadamard=3).dequantize(rotated=True)
        @ mxfp8.quantize(b, hadamard=3).dequantize(rotated=True).T
    )
    unfolded = mxfp8.quantize(a, hadamard=3).dequantize() @ mxfp8.quantize(b, hadamard=3).dequantize().T
    assert torch.allclose(folded, unfolded, rtol=1e-4, atol=1e-4)


def test_hadamard_saves_small_values_beside_an_outlier():
    x = torch.full((1, 32), 5e-4)
    x[0, 4] = 300.0  # scale 1: without rotation everything else is below half the smallest element
    plain, turned = mxfp8.quantize(x).dequantize(), mxfp8.quantize(x, hadamard=0).dequantize(rotated=True)
    assert plain.count_nonzero() == 1 and turned.count_nonzero() == 32


def test_hadamard_refuses_partial_blocks():
    with pytest.raises(ValueError, match="partial blocks"):
        mxfp8.quantize(torch.ones(4, 40), hadamard=1)
    with pytest.raises(ValueError, match="partial blocks"):
        mxfp8.quantize(torch.ones(64, 32), axis=0, hadamard=1, offsets=offsets_of(20, 44))
    whole = mxfp8.quantize(torch.ones(64, 32), axis=0, hadamard=1, offsets=offsets_of(32, 0, 32)).dequantize()
    assert torch.allclose(whole, torch.ones(64, 32), atol=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_unbiased_between_neighbours(dtype):
    count = 40_000
    values = torch.tensor([0.3, -1.7, 300.0, 0.001, -0.0029, 1.0, 417.0])
    seed = torch.tensor([17])
    uniform = formats.counter_uniform(count * len(values), seed).view(count, -1)
    drawn = formats.stochastic_cast(values.expand(count, -1), dtype, uniform).float()
    grid = np.unique([v for v in oracle.table(dtype) if math.isfinite(v)])
    for i, value in enumerate(values.tolist()):
        below, above = grid[grid <= value].max(), grid[grid >= value].min()
        assert set(drawn[:, i].tolist()) <= {below, above}
        sigma = (above - below) / 2 / math.sqrt(count)
        assert abs(drawn[:, i].double().mean().item() - value) <= 5 * sigma, value
    assert (
        formats.stochastic_cast(torch.tensor([1e9, math.nan]), dtype, torch.zeros(2)).float()[0] == oracle.TOP[dtype][0]
    )


def test_a_seed_goes_to_a_device_without_a_copy_that_waits():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(str(op))
            return op(*args, **(kwargs or {}))

    ops = []
    with Seen():
        assert formats.draw_seed(None, torch.device("meta")).device.type == "meta"
    assert not any("copy" in op for op in ops) and any("full" in op for op in ops)


def test_stochastic_rounding_reproduces_through_a_generator():
    x = log_uniform((64, 40), 31, -3, 3)

    def draw(seed):
        return mxfp8.quantize(x, stochastic=True, generator=torch.Generator().manual_seed(seed)).data.view(torch.uint8)

    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    generator = torch.Generator().manual_seed(1)
    twice = [mxfp8.quantize(x, stochastic=True, generator=generator).data.view(torch.uint8) for _ in range(2)]
    assert torch.equal(twice[0], draw(1)) and not torch.equal(*twice)


def test_counter_numbers_are_splitmix64():
    assert formats.counter_uniform(1, torch.tensor([0])).item() == (0xE220A8397B1DCDAF >> 40) / 2**24
    long = formats.counter_uniform(1000, torch.tensor([-5]))
    assert torch.equal(formats.counter_uniform(10, torch.tensor([-5])), long[:10])
    assert long.min() >= 0 and long.max() < 1 and abs(long.mean() - 0.5) < 0.05


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (16, 16)}, r"block: \(16, 16\)"),
        ({"scale_mode": "nearest"}, "scale_mode: 'nearest'; allowed: floor, ceil, rceil"),
        ({"dtype": torch.int8}, "dtype: torch.int8; allowed"),
        ({"axis": 2}, "axis: 2; allowed: -2..1"),
        ({"offsets": torch.tensor([0, 3, 2])}, r"offsets\[2\] = 2"),
        ({"offsets": torch.tensor([0, 99])}, r"offsets\[1\] = 99"),
    ],
)
def test_bad_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        mxfp8.quantize(torch.ones(4, 32), **change)


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"x: torch.int64"):
        mxfp8.quantize(torch.ones(4, 32, dtype=torch.int64))


def test_bytes_equal_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = log_uniform(20_000, 41, -20, 8.7)
    for dtype, other in ((E4M3, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
        assert codes_of(mxfp8.saturating_cast(x, dtype)) == x.numpy().astype(other).view(np.uint8).tolist()
