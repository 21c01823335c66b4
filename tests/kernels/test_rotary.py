"""apply_rotary against complex arithmetic, its inverse, its dtypes and its errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rotary import REGISTRY, Rotary, apply_rotary, apply_rotary_qkv
from kernels.rotary.reference import rotate, rotate_back
from kernels.testing import assert_within_eager

both_layouts = pytest.mark.parametrize("interleaved", [True, False])


def draw(rows=5, heads=2, head_dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    angle = torch.randn(rows, head_dim // 2, generator=generator) * 9
    return x, angle.cos(), angle.sin()


def by_complex_numbers(x, cos, sin, interleaved):
    """The same turn written as a product of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else torch.stack(x.chunk(2, -1), -1)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())[:, None]
    out = torch.view_as_real(turned)
    return out.flatten(-2) if interleaved else torch.cat([out[..., 0], out[..., 1]], -1)


@both_layouts
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), heads=st.integers(1, 3), half=st.integers(1, 20), seed=st.integers(0, 99))
def test_is_the_complex_product(interleaved, rows, heads, half, seed):
    x, cos, sin = draw(rows, heads, 2 * half, seed=seed)
    y = apply_rotary(x, cos, sin, interleaved)
    assert y.shape == x.shape and y.is_contiguous()
    torch.testing.assert_close(y, by_complex_numbers(x, cos, sin, interleaved), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("interleaved", "want"), [(True, [-2.0, 1, -4, 3]), (False, [-3.0, -4, 1, 2])])
def test_a_quarter_turn(interleaved, want):
    """(x0, x1) -> (x0 cos - x1 sin, x1 cos + x0 sin): by 90 degrees (x0, x1) -> (-x1, x0)."""
    x = torch.tensor([[[1.0, 2, 3, 4]]])
    y = apply_rotary(x, torch.zeros(1, 2), torch.ones(1, 2), interleaved)
    assert y.flatten().tolist() == want


@both_layouts
def test_turning_back_undoes_the_turn(interleaved):
    x, cos, sin = draw()
    back = rotate_back(rotate(x, cos, sin, interleaved), cos, sin, interleaved)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)  # cos and sin are float32, so R R^-1 = 1 to float32


@both_layouts
def test_gradcheck_once_and_twice(interleaved):
    x, cos, sin = draw(3, 2, 4)
    x.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, cos, sin, interleaved), (x,))
    assert torch.autograd.gradgradcheck(lambda x: apply_rotary(x, cos, sin, interleaved).sin(), (x,))


@both_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_turned_in_float32_and_rounded_once(interleaved, dtype):
    x, cos, sin = draw(50, 2, 32, dtype)
    x.requires_grad_()
    y = apply_rotary(x, cos, sin, interleaved)
    assert y.dtype == dtype
    assert torch.equal(y, apply_rotary(x.float(), cos, sin, interleaved).to(dtype))
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    exact = rotate_back(dy.double(), cos, sin, interleaved)
    assert_within_eager(x.grad, exact.to(dtype), exact)
    assert torch.equal(x.grad, rotate_back(dy, cos, sin, interleaved).to(dtype))


@both_layouts
def test_strided_input_and_gradient(interleaved):
    x, cos, sin = draw(6, 2, 8)
    wide = torch.cat([x, x + 1], dim=-1)
    assert torch.equal(apply_rotary(wide[..., :8], cos, sin, interleaved), apply_rotary(x, cos, sin, interleaved))
    leaf = x.clone().requires_grad_()
    apply_rotary(leaf, cos, sin, interleaved).sum().backward()
    ones = rotate_back(torch.ones_like(x), cos, sin, interleaved)
    torch.testing.assert_close(leaf.grad, ones)


@both_layouts
def test_more_leading_dimensions(interleaved):
    x, cos, sin = draw(12, 2, 8)
    y = apply_rotary(x.view(3, 4, 2, 8), cos.view(3, 4, 4), sin.view(3, 4, 4), interleaved)
    assert torch.equal(y.view(x.shape), apply_rotary(x, cos, sin, interleaved))
    with pytest.raises(ValueError, match=r"cos has shape \(12, 4\); allowed: \(3, 4, 4\)"):
        apply_rotary(x.view(3, 4, 2, 8), cos, sin, interleaved)


def test_a_row_depends_on_that_row_alone():
    x, cos, sin = draw(40, 3, 10, torch.float32)
    all_rows = apply_rotary(x, cos, sin)
    for rows in (slice(0, 1), slice(7, 20), slice(39, 40)):
        assert torch.equal(apply_rotary(x[rows], cos[rows], sin[rows]), all_rows[rows])


def test_opcheck():
    x, cos, sin = draw(dtype=torch.float32)
    torch.library.opcheck(torch.ops.gem_kernels.rotary, (x.requires_grad_(), cos, sin, True, "reference"))
    torch.library.opcheck(torch.ops.gem_kernels.rotary_backward, (x.detach(), cos, sin, False, "reference"))


def test_compiles_without_a_graph_break():
    x, cos, sin = draw(dtype=torch.float32)
    x.requires_grad_()
    compiled = torch.compile(lambda x: apply_rotary(x, cos, sin).tanh(), fullgraph=True, backend="aot_eager")
    (want,) = torch.autograd.grad(apply_rotary(x, cos, sin).tanh().sum(), x)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(got, want)


def test_bad_arguments_say_what_is_allowed():
    x, cos, sin = draw(5, 2, 8, torch.float32)
    for arguments, message in (
        ((x[..., :7], cos, sin), "head_dim 7.*even"),
        ((x[0], cos, sin), r"\[..., heads, head_dim\]"),
        ((x.long(), cos, sin), "floating"),
        ((x, cos[:4], sin), r"cos has shape \(4, 4\); allowed: \(5, 4\)"),
        ((x, cos, sin.bfloat16()), "sin is torch.bfloat16"),
        ((x, cos.clone().requires_grad_(), sin), "cos requires a gradient"),
        ((x, cos.to("meta"), sin), "cos is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            apply_rotary(*arguments)
    with pytest.raises(ValueError, match="allowed: auto, triton, reference"):
        apply_rotary(x, cos, sin, impl="cuda")
    assert REGISTRY.names == ["triton", "reference"]


def test_rotary_keeps_its_names_and_refuses_others():
    _, cos, sin = draw()
    assert Rotary(cos, sin, on=["q", "v"]).on == ("q", "v")
    assert Rotary(cos, sin).on == ("q", "k", "v") and Rotary(cos, sin).interleaved
    with pytest.raises(ValueError, match="distinct names"):
        Rotary(cos, sin, on=("q", "q"))


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_packed_buffer_is_turned_part_by_part_and_gets_one_gradient(interleaved):
    x = torch.randn(7, 4, 2, 8, dtype=torch.float64)[:, :3].requires_grad_()  # strided rows
    angle = torch.randn(7, 4)
    cos, sin = angle.cos(), angle.sin()
    got = apply_rotary_qkv(x, cos, sin, interleaved)
    wanted = [apply_rotary(part, cos, sin, interleaved) for part in x.unbind(1)]
    weights = [torch.randn(7, 2, 8, dtype=torch.float64) for _ in range(3)]
    for one, two in zip(got, wanted, strict=True):
        assert torch.equal(one, two) and one.is_contiguous()
    sums = [sum((w * o).sum() for w, o in zip(weights, outputs, strict=True)) for outputs in (got, wanted)]
    torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in sums), rtol=1e-12, atol=0)
    own = x.detach().clone().requires_grad_()
    arguments = (cos, sin, interleaved, "reference")
    torch.library.opcheck(torch.ops.gem_kernels.rotary_qkv, (own, *arguments))
    torch.library.opcheck(torch.ops.gem_kernels.rotary_qkv_backward, (*own.detach().unbind(1), *arguments))
    with pytest.raises(ValueError, match=r"rotary: qkv is .*\(7, 2, 2, 8\); allowed: a floating tensor"):
        apply_rotary_qkv(x[:, :2], cos, sin)
