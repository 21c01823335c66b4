"""GDPA's activations: values and slopes against float64 mathematics, far tails, masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.gdpa import activations

NAMES = activations.ACTIVATIONS


def phi(s: float) -> float:
    return 0.5 * math.erfc(-s / math.sqrt(2))


def exact_value(name: str, s: float) -> float:
    """The definitions once more, in scalar double arithmetic that shares no code with the module."""
    c2 = 0.3989422804014327
    return {
        "gelu": lambda: s * phi(s),
        "gelu_tanh": lambda: 0.5 * s * (1 + math.tanh(0.7978845608028654 * (s + 0.044715 * s**3))),
        "gelu_taylor6": lambda: 0.5 * s + c2 * s**2 - c2 / 6 * s**4 + c2 / 40 * s**6,
        "silu": lambda: s / (1 + math.exp(-s)) if s > -700 else 0.0,
        "relu": lambda: max(s, 0.0),
        "relu2": lambda: max(s, 0.0) ** 2,
        "identity": lambda: s,
    }[name]()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(s=st.floats(-30, 30))
def test_value_is_the_definition(name, s):
    expected = exact_value(name, s)
    actual = activations.value(name, torch.tensor([s], dtype=torch.float64)).item()
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_derivative_is_the_slope_of_the_value(name):
    s = torch.arange(-120, 121, dtype=torch.float64) / 20
    if name.startswith("relu"):  # the kink has no difference quotient; the convention there is 0
        assert activations.derivative(name, s[s == 0]).eq(0).all()
        s = s[s != 0]
    h = 1e-6
    slope = (activations.value(name, s + h) - activations.value(name, s - h)) / (2 * h)
    torch.testing.assert_close(activations.derivative(name, s), slope, rtol=1e-7, atol=1e-7)
    leaf = s.clone().requires_grad_()
    activations.value(name, leaf).sum().backward()
    torch.testing.assert_close(activations.derivative(name, s), leaf.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pullback_is_gradient_times_derivative(name, dtype):
    s = torch.linspace(-8, 8, 1001).to(dtype)
    grad = torch.cos(3 * s)
    expected = grad.double() * activations.derivative(name, s.double())
    # torch's fused tanh backward multiplies 1 - tanh^2 by s and a cubic's slope, which magnifies its rounding.
    bound = 64 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())
    actual = activations.pullback(name, grad, s)
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("name", NAMES)
def test_value_is_zero_at_zero(name):
    """What lets zero-filled queries and keys stand for rows that do not exist."""
    assert activations.value(name, torch.zeros(3)).eq(0).all()


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
def test_o21_tails_stay_finite(name):
    scores = torch.tensor([9, 10, 11, 13.24, 20, 50, 1e4])
    scores = torch.cat([scores, -scores])
    value, slope = activations.value(name, scores), activations.derivative(name, scores)
    pulled = activations.pullback(name, torch.ones_like(scores), scores)
    expected = torch.tensor([exact_value(name, s) for s in scores.tolist()])
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-5)
    assert slope.isfinite().all() and pulled.isfinite().all()
    exact = activations.derivative(name, scores.double()).float()
    torch.testing.assert_close(slope, exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pulled, exact, rtol=1e-5, atol=1e-5)
    if name == "gelu_tanh":
        torch.testing.assert_close(value[:7], scores[:7], rtol=1e-6, atol=0)
        assert value[10] == 0 and torch.signbit(value[10])  # -13.24 gives -0
        torch.testing.assert_close(slope, torch.tensor([1.0] * 7 + [0.0] * 7), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "relu", "relu2", "identity", "gelu_taylor6"])
def test_finite_over_the_whole_range(name):
    scores = torch.cat([torch.linspace(-1e4, 1e4, 4001), torch.logspace(-8, 4, 200), -torch.logspace(-8, 4, 200)])
    ones = torch.ones_like(scores)
    for result in (
        activations.value(name, scores),
        activations.derivative(name, scores),
        activations.pullback(name, ones, scores),
    ):
        assert result.isfinite().all()


def test_o22_erf_and_tanh_forms_are_told_apart():
    one, low, high = torch.tensor(1.0), torch.tensor(-2.69895), torch.tensor(2.01865)
    assert activations.value("gelu", one).item() == pytest.approx(0.841344746, abs=1e-6)
    assert activations.value("gelu_tanh", one).item() == pytest.approx(0.841191991, abs=1e-6)
    gap = activations.value("gelu", low) - activations.value("gelu_tanh", low)
    assert abs(gap.item()) == pytest.approx(4.73e-4, abs=2e-6)
    gap = activations.derivative("gelu", high) - activations.derivative("gelu_tanh", high)
    assert abs(gap.item()) == pytest.approx(8.68e-4, abs=2e-6)


@pytest.mark.parametrize(
    ("s", "error"), [(0.5, 4.5e-6), (0.75, 1.1e-4), (1.0, 1.1e-3), (1.5, 2.5e-2), (2, 0.22), (3, 4)]
)
def test_taylor_error_is_the_documented_one(s, error):
    both = torch.tensor([s, -s], dtype=torch.float64)
    gap = (activations.value("gelu_taylor6", both) - activations.value("gelu", both)).abs().max().item()
    assert gap == pytest.approx(error, rel=0.1)


def test_taylor_says_where_it_is_valid():
    assert activations.get("gelu_taylor6").valid_to == 1.0
    assert all(math.isinf(activations.get(name).valid_to) for name in NAMES if name != "gelu_taylor6")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden", [float("-inf"), float("nan"), 1e30, 0.0])
def test_o19_masked_scores_contribute_nothing(name, hidden):
    """61 padded keys of a 64-wide tile: value and derivative exactly 0 under the mask, whatever the score there."""
    scores = torch.full((3, 64), hidden)
    scores[:, :3] = torch.tensor([0.5, -0.5, 0.25])
    valid = torch.arange(64) < 3
    grad = torch.full_like(scores, 2.0)
    value = activations.masked_value(name, scores, valid)
    slope = activations.masked_pullback(name, grad, scores, valid)
    assert value[:, 3:].eq(0).all() and slope[:, 3:].eq(0).all()
    assert torch.equal(value[:, :3], activations.value(name, scores[:, :3].contiguous()))
    assert slope[:, :3].isfinite().all()
    nothing = torch.zeros(64, dtype=torch.bool)
    assert activations.masked_value(name, scores, nothing).eq(0).all()
    assert activations.masked_pullback(name, grad, scores, nothing).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_halves_are_computed_wide_and_rounded_once(name, dtype):
    s = torch.linspace(-4, 4, 513).to(dtype)
    assert torch.equal(activations.value(name, s), activations.value(name, s.float()).to(dtype))
    assert torch.equal(activations.derivative(name, s), activations.derivative(name, s.float()).to(dtype))


def test_unknown_name_lists_the_names():
    with pytest.raises(ValueError, match="'swish'; allowed: gelu, gelu_tanh, gelu_taylor6, silu, relu, relu2"):
        activations.value("swish", torch.zeros(1))
