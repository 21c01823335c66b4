"""Quality and throughput as pure functions: NE, AUC, calibration; samples per second, tokens per second, MFU.

Undefined values are NaN with a reason, never 0: a table writer prints them as n/a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EPSILON = 1e-7  # probabilities are kept this far from 0 and 1, as float32 logits beyond it carry no information


@dataclass(frozen=True)
class Score:
    """A number, or NaN and why it is undefined."""

    value: float
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.value:.6f}" if math.isfinite(self.value) else "n/a"


def _labels(labels, weights) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels, np.float64)
    weights = np.ones_like(labels) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != labels.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and weights {weights.shape} must be vectors of one length")
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        position = int(bad.argmax())
        raise ValueError(f"label {labels[position]:g} at position {position}; allowed: 0 and 1")
    if (weights < 0).any():
        raise ValueError(f"weight {weights.min():g} at position {int(weights.argmin())}; must be >= 0")
    return labels, weights


def cross_entropy(probabilities, labels, weights=None) -> Score:
    """Weighted mean of -log p(label), natural log."""
    labels, weights = _labels(labels, weights)
    p = np.asarray(probabilities, np.float64)
    if p.shape != labels.shape:
        raise ValueError(f"probabilities {p.shape} and labels {labels.shape} must have one shape")
    if not np.isfinite(p).all() or (p < 0).any() or (p > 1).any():
        position = int((~(np.isfinite(p) & (p >= 0) & (p <= 1))).argmax())
        raise ValueError(f"probability {p[position]} at position {position}; allowed: 0 to 1")
    if weights.sum() == 0:
        return Score(math.nan, "no weighted rows")
    p = np.clip(p, EPSILON, 1 - EPSILON)
    losses = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    return Score(float((losses * weights).sum() / weights.sum()))


def normalised_entropy(probabilities, labels, weights=None) -> Score:
    """NE: cross-entropy over the entropy of the base rate of the same rows; 1 is what predicting the base rate gives.

    Undefined (NaN and a reason) without rows or where all labels are equal; labels outside {0, 1} are a ValueError.
    """
    loss = cross_entropy(probabilities, labels, weights)
    if not math.isfinite(loss.value):
        return loss
    labels, weights = _labels(labels, weights)
    rate = float((labels * weights).sum() / weights.sum())
    if rate in (0.0, 1.0):
        return Score(math.nan, f"all labels are {rate:g}, so the base rate has no entropy")
    return Score(loss.value / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


def auc(scores, labels, weights=None) -> Score:
    """Area under the ROC curve, ties counted half. Rows of weight 0 are left out; other weights count."""
    labels, weights = _labels(labels, weights)
    scores = np.asarray(scores, np.float64)
    positive, negative = (labels * weights).sum(), ((1 - labels) * weights).sum()
    if positive == 0 or negative == 0:
        return Score(math.nan, "all labels are equal" if weights.sum() else "no weighted rows")
    _, group = np.unique(scores, return_inverse=True)
    up = np.bincount(group, labels * weights)
    down = np.bincount(group, (1 - labels) * weights)
    below = np.concatenate(([0.0], np.cumsum(down)[:-1]))
    return Score(float((up * (below + down / 2)).sum() / (positive * negative)))


def calibration(probabilities, labels, weights=None) -> Score:
    """Sum of predictions over sum of labels; 1 is calibrated in the mean."""
    labels, weights = _labels(labels, weights)
    total = float((labels * weights).sum())
    if total == 0:
        return Score(math.nan, "no positive label")
    return Score(float((np.asarray(probabilities, np.float64) * weights).sum() / total))


@dataclass(frozen=True)
class Throughput:
    """Steady samples per second and what it rests on: warm-up steps left out, steps counted, spread of the step
    time."""

    samples_per_s: float
    warmup_steps: int
    steps: int
    time_p50: float
    time_p20: float
    time_p80: float


def throughput(step_seconds: Sequence[float], global_batch: int, warmup_steps: int) -> Throughput:
    """Samples per second over the steps after warm-up: samples / time of those steps. Step times in seconds,
    synchronised."""
    times = np.asarray(step_seconds, np.float64)
    if warmup_steps < 0 or len(times) <= warmup_steps:
        raise ValueError(f"throughput: {len(times)} steps and {warmup_steps} of warm-up; at least one must be left")
    steady = times[warmup_steps:]
    p20, p50, p80 = np.percentile(steady, (20, 50, 80))
    rate = global_batch * len(steady) / steady.sum()
    return Throughput(float(rate), warmup_steps, len(steady), float(p50), float(p20), float(p80))


@dataclass(frozen=True)
class MeshThroughput:
    samples_per_s: float
    samples_per_s_per_device: float


def mesh_throughput(
    samples_per_replica: int, step_seconds: float, *, data_parallel: int, model_parallel: int = 1
) -> MeshThroughput:
    """Global rate of a mesh: devices that share a sample (tensor, context, expert parallel) count it once."""
    rate = samples_per_replica * data_parallel / step_seconds
    return MeshThroughput(rate, rate / (data_parallel * model_parallel))


@dataclass(frozen=True)
class TokenThroughput:
    """Real tokens per second, the same for padded and jagged; processed_per_s counts padding slots too."""

    tokens_per_s: float
    processed_per_s: float


def token_throughput(lengths: Sequence[int], step_seconds: float, padded: bool) -> TokenThroughput:
    real = int(sum(lengths))
    processed = len(lengths) * max(lengths, default=0) if padded else real
    return TokenThroughput(real / step_seconds, processed / step_seconds)


def mfu(model_flops: float, seconds: float, peak_flops: float) -> float:
    """Model FLOPs / time / peak. More than 1 means that FLOPs, time or peak are wrong, so it is a ValueError."""
    if seconds <= 0 or peak_flops <= 0:
        raise ValueError(f"mfu: time {seconds} s and peak {peak_flops} FLOP/s must be > 0")
    value = model_flops / seconds / peak_flops
    if value > 1:
        raise ValueError(
            f"mfu: {value:.3f} > 1; model FLOPs {model_flops:.4g}, time {seconds:.4g} s, peak {peak_flops:.4g}"
        )
    return value


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50, p20, p80, mean and standard deviation (n - 1) of the finite values; NaN where there are too few."""
    finite = np.asarray([value for value in values if math.isfinite(value)], np.float64)
    if not len(finite):
        return {"p50": math.nan, "p20": math.nan, "p80": math.nan, "mean": math.nan, "std": math.nan, "n": 0}
    p20, p50, p80 = np.percentile(finite, (20, 50, 80))
    std = float(finite.std(ddof=1)) if len(finite) > 1 else math.nan
    return {"p50": p50, "p20": p20, "p80": p80, "mean": float(finite.mean()), "std": std, "n": len(finite)}
