"""Length laws of event histories, parametrised by the mean fill.

fill = mean length / max length. Each law hits the requested mean in expectation, whatever max_length is:

full       every history has max_length events (fill 1).
uniform    continuous uniform on [(2f-1)max, max] for f >= 0.5 and on [0, 2f max] below, rounded up or down at random
           so that the mean is exact. kernels.jagged.sample_lengths draws integers from [1, 2f max] below 0.5 (the
           public benchmark's law); here empty histories happen, as they do in traffic.
lognormal  log-normal with coefficient of variation `cv` BEFORE clipping to max_length, its median solved so that the
           mean AFTER clipping is fill * max, rounded as above. kernels.jagged.sample_lengths fixes median 0.2 max and
           sigma 1 (cv 1.31, mean fill about 0.29) instead. Clipping lowers the realised cv; a dataset's manifest
           records what was realised.
"""

import math
from dataclasses import dataclass

import numpy as np

LAWS = ("full", "uniform", "lognormal")
MAX_LOGNORMAL_FILL = 0.95


@dataclass(frozen=True)
class LengthLaw:
    """A law for lengths in [0, max_length] with mean fill * max_length.

    law: one of LAWS; max_length >= 1; fill in (0, 1]; cv > 0 (lognormal only). Raises ValueError for
    anything else, and names the attainable range when a law cannot have that fill.
    """

    law: str
    max_length: int
    fill: float
    cv: float = 1.3

    def __post_init__(self):
        if self.law not in LAWS:
            raise ValueError(f"length law {self.law!r} is unknown; allowed: {', '.join(LAWS)}")
        if not isinstance(self.max_length, int) or self.max_length < 1:
            raise ValueError(f"max length is {self.max_length!r}; it must be an integer of at least 1")
        if not 0.0 < self.fill <= 1.0:
            raise ValueError(f"fill is {self.fill!r}; it must lie in (0, 1]")
        if not (self.cv > 0 and math.isfinite(self.cv)):
            raise ValueError(f"length cv is {self.cv!r}; it must be a positive number")
        if self.law == "full" and self.fill != 1.0:
            raise ValueError(f"fill is {self.fill!r} with length law 'full', which has fill 1 only")
        if self.law == "lognormal" and self.fill > MAX_LOGNORMAL_FILL:
            raise ValueError(
                f"fill is {self.fill!r} with length law 'lognormal'; attainable: (0, {MAX_LOGNORMAL_FILL}], "
                "above that take uniform or full"
            )

    @property
    def mean(self) -> float:
        return self.fill * self.max_length

    def sample(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [rows], each in [0, max_length]."""
        if self.law == "full":
            return np.full(rows, self.max_length, np.int64)
        if self.law == "uniform":
            low, high = uniform_bounds(self.fill)
            lengths = (low + (high - low) * rng.random(rows)) * self.max_length
        else:
            sigma = math.sqrt(math.log1p(self.cv**2))
            mu = math.log(self.max_length) + clipped_lognormal_mu(self.fill, sigma)
            lengths = np.minimum(np.exp(mu + sigma * rng.standard_normal(rows)), self.max_length)
        # Rounding down after adding a uniform number keeps the mean of a continuous law.
        return np.minimum(np.floor(lengths + rng.random(rows)), self.max_length).astype(np.int64)


def uniform_bounds(fill: float) -> tuple[float, float]:
    """Bounds of the uniform law as shares of the maximum; their mean is `fill`."""
    return (2 * fill - 1, 1.0) if fill >= 0.5 else (0.0, 2 * fill)


def clipped_lognormal_mean(mu: float, sigma: float) -> float:
    """E[min(X, 1)] for ln X ~ N(mu, sigma^2)."""

    def normal_cdf(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return math.exp(mu + sigma**2 / 2) * normal_cdf(-mu / sigma - sigma) + normal_cdf(mu / sigma)


def clipped_lognormal_mu(mean: float, sigma: float) -> float:
    """mu with E[min(X, 1)] = mean, by bisection (the mean grows with mu)."""
    low, high = math.log(mean) - sigma**2, 10.0 * sigma
    for _ in range(80):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if clipped_lognormal_mean(middle, sigma) < mean else (low, middle)
    return 0.5 * (low + high)


def describe(lengths_sum: float, lengths_square_sum: float, longest: int, rows: int, max_length: int) -> dict:
    """Mean, maximum, cv (standard deviation / mean) and fill of `rows` lengths from their sums."""
    mean = lengths_sum / rows if rows else 0.0
    variance = max(lengths_square_sum / rows - mean**2, 0.0) if rows else 0.0
    return {
        "mean": mean,
        "max": int(longest),
        "cv": math.sqrt(variance) / mean if mean else 0.0,
        "fill": mean / max_length,
    }
