"""Format hopper on a CPU: blocks against the oracle, linear layer and attention against float64, awkward inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import kernels
from kernels import mxfp8
from kernels.mxfp8 import hopper, hopper_attention
from tests.kernels import mx_oracle

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPE = mxfp8.Recipe(format="hopper", attention=("q", "k", "v", "p"))


def awkward(*shape: int, seed: int = 0) -> torch.Tensor:
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=draws) * torch.exp2(torch.randint(-8, 8, shape, generator=draws).float())
    flat = x.view(-1)
    flat[: shape[-1]] = 0.0
    flat[-8:] = torch.tensor([448.0, 449.0, -448.0, 464.0, 1.75, 256.0, 1e-42, 1.7500001])
    return x


def oracle(x: torch.Tensor, tall: int, wide: int, dtype=E4M3, mode="rceil") -> tuple[np.ndarray, np.ndarray]:
    """Bytes and float32 scales of x in blocks of tall x wide, from the table-driven quantiser."""
    rows, columns = x.shape
    grid = [(i, j) for i in range(0, rows, tall) for j in range(0, columns, wide)]
    blocks = [(slice(i, i + tall), slice(j, j + wide)) for i, j in grid]
    data, codes = mx_oracle.quantize_blocks(x.numpy(), blocks, dtype, mode)
    scales = np.exp2(np.array(codes, dtype=np.float64) - 127).reshape(-(-rows // tall), -(-columns // wide))
    return data, scales.astype(np.float32)


@pytest.mark.parametrize("dtype", (E4M3, E5M2))
@pytest.mark.parametrize("mode", ("floor", "ceil", "rceil"))
def test_blocks_are_those_of_the_oracle(dtype, mode):
    x = awkward(21, 144)
    options = {"dtype": dtype, "scale_mode": mode}
    padded = torch.nn.functional.pad(x, (0, 0, 0, 11))
    for found, (data, scale) in (
        (hopper.by_row(x, **options), oracle(padded, 1, 128, dtype, mode)),
        (hopper.by_column(x, **options), oracle(padded.T.contiguous(), 1, 128, dtype, mode)),
        (hopper.by_tile(x, **options), oracle(x, 128, 128, dtype, mode)),
        (hopper.by_tile(x, turned=True, **options), oracle(x.T.contiguous(), 128, 128, dtype, mode)),
    ):
        assert np.array_equal(found.data.view(torch.uint8).numpy(), data)
        assert np.array_equal(found.scale.numpy(), scale)


def test_layouts_are_what_the_product_reads():
    x = torch.randn(40, 272)
    row, column, tile = hopper.by_row(x), hopper.by_column(x), hopper.by_tile(x)
    assert row.data.shape == (48, 272) and row.scale.shape == (48, 3) and row.scale.stride() == (1, 48)
    assert column.data.shape == (272, 48) and column.scale.shape == (272, 1) and column.data.is_contiguous()
    assert tile.scale.shape == (1, 3) and tile.scale.stride(0) == 4
    assert not bool(row.data[40:].float().any()) and not bool(column.data[:, 40:].float().any())
    turned = hopper.by_tile(x, turned=True)
    assert torch.equal(turned.data.view(torch.uint8), tile.data.view(torch.uint8).T)
    assert torch.equal(turned.scale, tile.scale.T)


def test_zero_blocks_and_what_is_not_finite():
    x = torch.randn(16, 256)
    x[0, :128], x[1, 130], x[2, 5] = 0, float("nan"), float("inf")
    values = hopper.values(hopper.by_row(x))
    assert not bool(values[0, :128].any())
    assert bool(values[1, 128:].isnan().all() and values[2, :128].isnan().all())
    assert bool(values[1, :128].isfinite().all() and values[2, 128:].isfinite().all() and values[3:].isfinite().all())


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("tokens", (1, 127, 160))
@pytest.mark.parametrize("low", ("all", "wgrad_high", "fprop_only"))
def test_linear_against_float64(tokens, low):
    recipe = replace(RECIPE, wgrad=low == "all", dgrad=low != "fprop_only")
    draws = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(*s, generator=draws) for s in ((tokens, 160), (48, 160), (tokens, 48)))
    x.requires_grad_(), w.requires_grad_()
    y = mxfp8.linear(x, w, recipe=recipe)
    y.backward(dy)
    want = x.double() @ w.double().T, dy.double() @ w.double(), dy.double().T @ x.double()
    for got, right, is_low in zip((y, x.grad, w.grad), want, (True, recipe.dgrad, recipe.wgrad), strict=True):
        assert (1e-3 if is_low else 0) <= relative(got.detach(), right.detach()) <= (0.05 if is_low else 1e-6)


def test_linear_of_no_tokens_and_of_rotated_axes():
    w = torch.randn(32, 64, requires_grad=True)
    empty = mxfp8.linear(torch.randn(0, 64), w, recipe=RECIPE)
    empty.sum().backward()
    assert empty.shape == (0, 32) and not bool(w.grad.any())
    x = torch.randn(64, 64)
    x[:, 3] = 0
    x[0, 3] = 3e4  # one outlier in its slab flattens its neighbours; turned, it spreads
    turned = replace(RECIPE, hadamard=3)
    assert relative(mxfp8.linear(x, w.detach(), recipe=turned), x @ w.detach().T) < 0.06
    with pytest.raises(ValueError, match="multiples of 32"):
        mxfp8.linear(torch.randn(4, 48), torch.randn(32, 48), recipe=turned)


def test_stochastic_gradients_are_unbiased_and_follow_the_seed():
    recipe = replace(RECIPE, stochastic=True, wgrad=False)
    w, dy = torch.eye(128), torch.full((16, 128), 1.0)
    dy[:, 0], dy[:, 1] = 448.0, 17.0  # 17 lies between 16 and 18 at this scale
    x = torch.zeros(16, 128, requires_grad=True)
    seen = []
    for seed in range(12):
        torch.manual_seed(seed)
        seen.append(torch.autograd.grad(mxfp8.linear(x, w, recipe=recipe), x, dy)[0][:, 1])
    values = torch.stack(seen)
    assert set(values.flatten().tolist()) == {16.0, 18.0} and abs(float(values.mean()) - 17) < 0.25
    torch.manual_seed(3)
    assert torch.equal(torch.autograd.grad(mxfp8.linear(x, w, recipe=recipe), x, dy)[0][:, 1], seen[3])


OFFSETS = torch.tensor([0, 5, 5, 133, 390])


def inputs(seed: int = 2, rows: int = 396):
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 2, 64, generator=draws) for _ in range(3)]


def test_operands_follow_sequences():
    q, k, v = inputs()
    found = hopper_attention.quantize(q, k, v, OFFSETS)
    starts = hopper_attention.padded_starts(OFFSETS).tolist()
    assert starts == [0, 128, 128, 256, 640]
    order = hopper_attention.key_order()
    assert sorted(order.tolist()) == list(range(128)) and order[:8].tolist() == [0, 1, 8, 9, 2, 3, 10, 11]
    for b, head in ((0, 1), (2, 0), (3, 1)):
        first, end = OFFSETS[b], OFFSETS[b + 1]
        data, scale = oracle(torch.nn.functional.pad(v[first:end, head], (0, 0, 0, int(-(end - first) % 128))), 128, 1)
        stored = found.v[head * 64 : head * 64 + 64, starts[b] : starts[b + 1]].view(torch.uint8)
        assert np.array_equal(stored.view(64, -1, 128).numpy(), data.T.reshape(64, -1, 128)[:, :, order.numpy()])
        assert np.array_equal(found.v_scale[starts[b] // 128 : starts[b + 1] // 128, head].numpy(), scale)
        coarse = hopper_attention.quantize(q, k, v, OFFSETS, scales="tile")
        for x, scales in ((k, coarse.k_scale), (v, coarse.v_scale)):
            _, scale = oracle(x[first:end, head], 128, 64)
            assert np.array_equal(scales[starts[b] // 128 : starts[b + 1] // 128, head].numpy(), scale[:, 0])
        _, scale = oracle(k[first:end, head], 1, 64)
        assert np.array_equal(found.k_scale[head, starts[b] : starts[b] + end - first].numpy(), scale[:, 0])


@pytest.mark.parametrize("activation", ("softmax", "gelu_tanh", "gelu_taylor6", "silu", "relu"))
def test_attention_against_float64(activation):
    q, k, v = inputs()
    if activation == "softmax":
        got = kernels.jagged_attention(q, k, v, OFFSETS, precision=RECIPE)
        want = kernels.jagged_attention(q.double(), k.double(), v.double(), OFFSETS, impl="reference")
    else:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        got = kernels.gdpa(q, k, v, OFFSETS, activation=activation, precision=RECIPE)
        want = kernels.gdpa(q.double(), k.double(), v.double(), OFFSETS, activation=activation, impl="reference")
    assert 1e-3 < relative(got, want) < 0.08
    assert not bool(got[390:].any())


@pytest.mark.parametrize("activation", ("softmax", "gelu_tanh"))
def test_scales_of_a_tile_lose_nothing_where_tiles_differ(activation):
    """Values that grow or vanish from tile to tile, zero tiles, zero queries: as exact as finer scales."""
    offsets, tile = torch.tensor([0, 640]), (torch.arange(640) // 128).float()[:, None, None]
    q, k, v = inputs(5, 640)
    q[3], k[128:256], v[256:384] = 0, 0, 0
    scale = 0.125 if activation == "softmax" else 0.02
    for step in (-6.0, -1.0, 1.0, 6.0):
        values = v * torch.exp2(step * (tile - 2))
        if activation == "softmax":
            want = kernels.jagged_attention(q, k, values, offsets, impl="reference")
        else:
            want = kernels.gdpa(q, k, values, offsets, scale=scale, impl="reference")
        for scales in hopper_attention.SCALES:
            found = hopper_attention.quantize(q, k, values, offsets, scales=scales)
            options = {"activation": activation, "scale": scale, "dtype": torch.float32}
            got, _ = hopper_attention.forward_plainly(found, offsets, offsets, **options)
            assert relative(got, want) < 0.08


def test_a_sequence_depends_on_itself_alone():
    q, k, v = inputs()
    whole = kernels.jagged_attention(q, k, v, OFFSETS, precision=RECIPE)
    part = slice(5, 133)
    alone = kernels.jagged_attention(q[part], k[part], v[part], torch.tensor([0, 128]), precision=RECIPE)
    assert torch.equal(whole[part], alone)
    k[2], v[3] = float("inf"), float("nan")  # both in the first sequence
    broken = kernels.jagged_attention(q, k, v, OFFSETS, precision=RECIPE)
    assert torch.equal(broken[5:], whole[5:]) and bool(broken[:5].isnan().all())


def test_far_scores_and_scales():
    """Rows whose scores all lie far below zero, and operands of extreme size, lose no more than others."""
    offsets = torch.tensor([0, 1, 66, 195])
    q, k, v = inputs(3, 195)
    want = kernels.jagged_attention(q, k, v, offsets, impl="reference")
    for factor in (1e-20, 1e20):
        got = kernels.jagged_attention(q * factor, k / factor, v * factor, offsets, precision=RECIPE)
        assert relative(got / factor, want) < 0.08
    ones = torch.ones(195, 2, 64)
    got = kernels.jagged_attention(-80 / 8 * ones, ones, v, offsets, precision=RECIPE)
    assert relative(got, kernels.jagged_attention(0 * ones, ones, v, offsets, impl="reference")) < 0.05


def test_gradients_are_those_of_the_high_precision_backward():
    leaves = [x.requires_grad_() for x in inputs(4)]
    do = torch.randn(396, 2, 64)
    got = torch.autograd.grad(kernels.jagged_attention(*leaves, OFFSETS, precision=RECIPE), leaves, do)
    want = torch.autograd.grad(kernels.jagged_attention(*leaves, OFFSETS), leaves, do)
    for a, b in zip(got, want, strict=True):
        assert relative(a, b) < 0.06
    shared = torch.randn(4, 2, 64, requires_grad=True)
    o = kernels.jagged_attention(shared, *leaves[1:], None, OFFSETS, precision=RECIPE)
    assert o.shape == (4, 4, 2, 64) and not bool(o[1].any())
    o.sum().backward()
    assert bool(shared.grad.isfinite().all())


def test_what_has_no_kernel_is_an_error():
    q, k, v = inputs()
    for message, call in (
        (
            "Recipe.attention",
            lambda: kernels.jagged_attention(q, k, v, OFFSETS, precision=mxfp8.Recipe(format="hopper")),
        ),
        ("window", lambda: kernels.jagged_attention(q, k, v, OFFSETS, window=3, precision=RECIPE)),
        ("block_size", lambda: mxfp8.block_attention_mx(q, k, v, OFFSETS, recipe=RECIPE)),
        ("activation", lambda: kernels.gdpa(q, k, v, OFFSETS, activation="relu2", precision=RECIPE)),
        ("Recipe.format", lambda: mxfp8.Recipe(format="blackwell")),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_ops_know_their_flops_and_their_fakes():
    q, k, v = inputs()
    arguments = (q, k, v, OFFSETS, OFFSETS, "softmax", 0.125)
    torch.library.opcheck(torch.ops.gem_kernels.hopper_attention.default, arguments)
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        kernels.jagged_attention(q, k, v, OFFSETS, precision=RECIPE)
    assert counter.get_total_flops() == 4 * 2 * 64 * (25 + 128**2 + 257**2)
    assert mxfp8.get_recipe("full").on_hopper().format == "hopper"
