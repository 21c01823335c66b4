"""Length laws: the mean fill that was asked for, bounds, and errors that name what is attainable."""

import math

import numpy as np
import pytest

from data.lengths import LengthLaw, clipped_lognormal_mean


@pytest.mark.parametrize("max_length", [3, 64, 4096])
@pytest.mark.parametrize("law,fill", [("uniform", 0.1), ("uniform", 0.5), ("uniform", 0.83), ("uniform", 1.0)])
def test_uniform_mean_and_bounds(law, fill, max_length):
    lengths = LengthLaw(law, max_length, fill).sample(200_000, np.random.default_rng(0))
    assert abs(lengths.mean() / (fill * max_length) - 1) < 0.02
    assert lengths.min() >= math.floor(max(0.0, 2 * fill - 1) * max_length)
    assert lengths.max() <= math.ceil(min(1.0, 2 * fill) * max_length)


@pytest.mark.parametrize("fill", [0.02, 0.29, 0.35, 0.6, 0.95])
@pytest.mark.parametrize("cv", [0.5, 1.3, 2.0])
@pytest.mark.parametrize("max_length", [16, 1024])
def test_lognormal_mean(fill, cv, max_length):
    lengths = LengthLaw("lognormal", max_length, fill, cv).sample(200_000, np.random.default_rng(1))
    assert abs(lengths.mean() / (fill * max_length) - 1) < 0.03
    assert lengths.min() >= 0 and lengths.max() <= max_length


def test_lognormal_cv_is_that_before_clipping():
    lengths = LengthLaw("lognormal", 100_000, 0.01, 1.3).sample(400_000, np.random.default_rng(2))
    assert abs(lengths.std() / lengths.mean() - 1.3) < 0.05


def test_clipped_mean_against_sampling():
    x = np.minimum(np.exp(-1.0 + 0.8 * np.random.default_rng(3).standard_normal(1_000_000)), 1.0)
    assert abs(clipped_lognormal_mean(-1.0, 0.8) - x.mean()) < 1e-3


def test_full():
    assert (LengthLaw("full", 7, 1.0).sample(5, np.random.default_rng(0)) == 7).all()


@pytest.mark.parametrize(
    "arguments,text",
    [
        (("gauss", 8, 0.5), "full, uniform, lognormal"),
        (("uniform", 0, 0.5), "at least 1"),
        (("uniform", 8, 0.0), r"\(0, 1\]"),
        (("uniform", 8, 1.5), r"\(0, 1\]"),
        (("full", 8, 0.5), "fill 1 only"),
        (("lognormal", 8, 0.99), r"attainable: \(0, 0.95\]"),
        (("lognormal", 8, 0.5, -1.0), "positive"),
    ],
)
def test_errors(arguments, text):
    with pytest.raises(ValueError, match=text):
        LengthLaw(*arguments)
