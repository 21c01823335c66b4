"""The MX linear layer: worked cases of reduction axes, agreement with an independent product, recipes, op contracts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import mxfp8
from kernels.mxfp8 import RECIPES, Recipe
from kernels.testing import relative_error

RCEIL = RECIPES["rceil"]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def run(x, weight, dy, recipe, bias=None):
    """(y, dx, dw) of the layer."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = mxfp8.linear(x, weight, bias, recipe=recipe)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def exact(x, weight, dy):
    x, weight, dy = x.double(), weight.double(), dy.double()
    return x @ weight.T, dy @ weight, dy.flatten(0, -2).T @ x.flatten(0, -2)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 77])
def test_any_token_count_and_width(tokens, recipe):
    x, weight, dy = normal(tokens, 48, seed=1), normal(40, 48, seed=2), normal(tokens, 40, seed=3)
    for ours, right in zip(run(x, weight, dy, recipe), exact(x, weight, dy), strict=True):
        assert relative_error(ours, right) < 0.06


def test_padding_a_ragged_reduction_changes_no_value():
    x, weight, dy = normal(77, 48, seed=1), normal(40, 48, seed=2), normal(77, 40, seed=3)
    wide = [torch.zeros(96, n) for n in (48, 40)]
    wide[0][:77], wide[1][:77] = x, dy
    plain, padded = run(x, weight, dy, RCEIL), run(wide[0], weight, wide[1], RCEIL)
    assert torch.allclose(plain[0], padded[0][:77], rtol=1e-6, atol=1e-6)
    assert torch.allclose(plain[2], padded[2], rtol=1e-6, atol=1e-5)


def test_narrow_gradient():
    x, weight, dy = normal(4096, 24, seed=4), normal(16, 24, seed=5), normal(4096, 16, seed=6)
    for ours, right in zip(run(x, weight, dy, RCEIL), exact(x, weight, dy), strict=True):
        assert relative_error(ours, right) < 0.06


def powers() -> torch.Tensor:
    """A[i, j] = 2^(i mod 8): scales of rows are useless for a product that sums over i."""
    return (2.0 ** (torch.arange(32) % 8))[:, None].expand(32, 32).contiguous()


def test_scales_follow_the_reduction_axis():
    ones = torch.ones(1, 32)
    _, dx, _ = run(ones, powers(), ones, RCEIL)  # dgrad sums over the rows of A
    assert torch.equal(dx, torch.full((1, 32), 1020.0))
    _, _, dw = run(powers(), ones, torch.ones(32, 1), RCEIL)  # so does wgrad, over tokens
    assert torch.equal(dw, torch.full((1, 32), 1020.0))
    rows = mxfp8.quantize(powers())  # what reusing the scales of the rows would give: one scale along each column
    wrong = torch.ldexp(rows.data.float().T, rows.scale[:, 0].int()[:, None] - 127).sum(1)
    assert wrong[:4].tolist() == [32.0, 64.0, 128.0, 256.0]


def test_log_uniform_gradients_stay_close():
    generator = torch.Generator().manual_seed(8)
    x, weight, dy = (torch.exp2(torch.rand(64, 64, generator=generator) * 16 - 8) for _ in range(3))
    for ours, right in zip(run(x, weight, dy, RCEIL), exact(x, weight, dy), strict=True):
        assert relative_error(ours, right) < 0.06


@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
@pytest.mark.parametrize("scale_mode", ["floor", "ceil", "rceil"])
def test_each_gemm_multiplies_the_quantised_values(block, scale_mode):
    recipe = Recipe(block=block, scale_mode=scale_mode, gradient="e5m2")
    # Wide enough for small values to vanish under a block's scale: in a narrow range the axis of a block is invisible.
    x, weight, dy = (torch.exp2(8 * normal(*shape, seed=i)) for i, shape in enumerate(((77, 48), (40, 48), (77, 40))))

    def value(tensor, axis, dtype=torch.float8_e4m3fn):
        q = mxfp8.quantize(tensor, axis=axis, block=block, scale_mode=scale_mode, dtype=dtype)
        return q.dequantize(torch.float64)

    e5m2 = torch.float8_e5m2
    expected = (
        value(x, 1) @ value(weight, 1).T,
        value(dy, 1, e5m2) @ value(weight, 0),
        value(dy, 0, e5m2).T @ value(x, 0),
    )
    for ours, right in zip(run(x, weight, dy, recipe), expected, strict=True):
        assert relative_error(ours, right) < 1e-6


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_left_high_is_exact(gemm):
    x, weight, dy = normal(33, 48, seed=1), normal(40, 48, seed=2), normal(33, 40, seed=3)
    results = run(x, weight, dy, replace(RCEIL, **{gemm: False}))
    for name, ours, right in zip(("fprop", "dgrad", "wgrad"), results, exact(x, weight, dy), strict=True):
        error = relative_error(ours, right)
        assert error < 1e-6 if name == gemm else error > 0.01, name


def test_bias_leading_axes_and_dtypes():
    bias = normal(40, seed=4)
    x, weight = normal(2, 5, 48, seed=1), normal(40, 48, seed=2)
    y = mxfp8.linear(x, weight, bias, recipe=RCEIL)
    assert y.shape == (2, 5, 40) and torch.equal(y - bias, (mxfp8.linear(x, weight, recipe=RCEIL) + bias) - bias)
    assert mxfp8.linear(x[0, 0], weight, recipe=RCEIL).shape == (40,)
    half = run(x.bfloat16(), weight, normal(2, 5, 40, seed=3).bfloat16(), RCEIL)
    assert [t.dtype for t in half] == [torch.bfloat16, torch.bfloat16, torch.float32]
    with torch.autocast("cpu", torch.bfloat16):
        assert mxfp8.linear(x, weight, bias, recipe=RCEIL).dtype == torch.bfloat16


def test_no_tokens():
    for recipe in RECIPES.values():
        y, dx, dw = run(torch.zeros(0, 48), normal(40, 48, seed=1), torch.zeros(0, 40), recipe)
        assert y.shape == (0, 40) and dx.shape == (0, 48) and torch.equal(dw, torch.zeros(40, 48))


def test_bad_values_reach_the_output():
    x = torch.ones(2, 64)
    x[1, 3] = float("inf")
    y = mxfp8.linear(x, torch.ones(8, 64), recipe=RCEIL)
    assert y[0].isfinite().all() and y[1].isnan().all()


def test_rotation_along_the_reduction_axis_cancels():
    x, weight, dy = normal(33, 48, seed=1), normal(40, 48, seed=2), normal(33, 40, seed=3)
    turned, plain = run(x, weight, dy, RECIPES["hadamard"]), run(x, weight, dy, RCEIL)
    for a, b, right in zip(turned, plain, exact(x, weight, dy), strict=True):
        assert not torch.equal(a, b)  # other roundings
        assert relative_error(a, right) < 1.3 * relative_error(b, right)


def test_stochastic_gradients_are_unbiased_and_seeded():
    x, weight, dy = normal(8, 32, seed=1), normal(32, 32, seed=2), normal(8, 32, seed=3)
    recipe = RECIPES["stochastic"]
    torch.manual_seed(5)
    first = run(x, weight, dy, recipe)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, run(x, weight, dy, recipe), strict=True))
    draws = torch.stack([run(x, weight, dy, recipe)[1] for _ in range(150)])
    value = mxfp8.quantize(weight, axis=0).dequantize()
    centre = dy @ value  # the weight is rounded to nearest, dy on average not at all
    error, nearest = (draws.mean(0) - centre).norm(), (run(x, weight, dy, RCEIL)[1] - centre).norm()
    assert error < 3 * (draws - centre).norm(dim=(1, 2)).mean() / 150**0.5
    assert error < 0.4 * nearest


def test_recipes_are_strings_and_back():
    for recipe in RECIPES.values():
        assert Recipe.decode(recipe.encode()) == recipe
    assert set(RECIPES) == {"naive", "rceil", "hadamard", "stochastic", "wgrad_high", "late_bf16", "full"}
    full = RECIPES["full"]
    assert (full.wgrad, full.stochastic, full.skip_last, full.attention_block) == (False, True, 1, (32, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "fp4"}, "Recipe.input: 'fp4'"),
        ({"block": (8, 8)}, "Recipe.block"),
        ({"scale_mode": "up"}, "Recipe.scale_mode"),
        ({"attention": ("x",)}, "Recipe.attention"),
        ({"skip_last": -1}, "Recipe.skip_last"),
    ],
)
def test_bad_recipes_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**change)
    with pytest.raises(ValueError, match="unknown name 'fast'"):
        mxfp8.get_recipe("fast")


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="recipe: str"):
        mxfp8.linear(torch.ones(2, 32), torch.ones(4, 32), recipe="rceil")
    with pytest.raises(ValueError, match=r"\(2, 31\), \(4, 32\)"):
        mxfp8.linear(torch.ones(2, 31), torch.ones(4, 32), recipe=RCEIL)


@pytest.mark.parametrize("name", ["naive", "full"])
def test_op_contract(name):
    recipe = replace(RECIPES[name], stochastic=False)  # opcheck wants equal results of two runs
    x, weight = normal(33, 48, seed=1).requires_grad_(), normal(16, 48, seed=2).requires_grad_()
    torch.library.opcheck(torch.ops.gem_kernels.mx_linear, (x, weight, recipe.encode()))


def test_flops_are_counted():
    x, weight = normal(33, 48, seed=1).requires_grad_(), normal(16, 48, seed=2).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        y = mxfp8.linear(x, weight, recipe=RCEIL)
    assert counter.get_total_flops() == 2 * 33 * 48 * 16
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == 4 * 33 * 48 * 16


def test_compiles_without_a_graph_break():
    recipe = RECIPES["hadamard"]
    weight = normal(16, 48, seed=2)

    def layer(x):
        return mxfp8.linear(x.relu(), weight, recipe=recipe).tanh()

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 77):
        x = normal(tokens, 48, seed=tokens)
        assert torch.equal(compiled(x), layer(x))
