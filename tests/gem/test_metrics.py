"""Worked values of NE, AUC, calibration and of the throughput functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gem import metrics


def test_normalised_entropy_worked_value():
    p, y = (0.8, 0.3, 0.6, 0.1), (1, 0, 0, 0)
    assert metrics.cross_entropy(p, y).value == pytest.approx(0.400367, abs=1e-6)
    assert metrics.normalised_entropy(p, y).value == pytest.approx(0.711973, abs=1e-6)


@pytest.mark.parametrize("label", [0, 1])
def test_normalised_entropy_without_two_classes_is_undefined_with_a_reason(label):
    score = metrics.normalised_entropy((0.1, 0.2, 0.3), (label,) * 3)
    assert math.isnan(score.value) and f"all labels are {label}" in score.reason and str(score) == "n/a"


def test_normalised_entropy_rejects_other_labels():
    with pytest.raises(ValueError, match="label -1 at position 1; allowed: 0 and 1"):
        metrics.normalised_entropy((0.5, 0.5), (0, -1))


def test_normalised_entropy_of_no_weight_is_undefined():
    score = metrics.normalised_entropy((0.5, 0.5), (0, 1), (0, 0))
    assert math.isnan(score.value) and score.reason == "no weighted rows"


def test_predicting_the_base_rate_gives_one_and_extremes_stay_finite():
    y = np.array([1, 0, 0, 0, 1])
    assert metrics.normalised_entropy(np.full(5, 0.4), y).value == pytest.approx(1.0, abs=1e-12)
    assert math.isfinite(metrics.normalised_entropy((0.0, 1.0), (1, 0)).value)


@pytest.mark.parametrize("bad", [math.nan, -0.1, 1.1])
def test_probabilities_out_of_range(bad):
    with pytest.raises(ValueError, match=r"probability .* at position 1"):
        metrics.normalised_entropy((0.5, bad), (0, 1))


def test_weights_select_rows():
    p, y, w = (0.8, 0.3, 0.6, 0.1), (1, 0, 0, 0), (1, 0, 1, 1)
    assert metrics.normalised_entropy(p, y, w).value == pytest.approx(
        metrics.normalised_entropy((0.8, 0.6, 0.1), (1, 0, 0)).value
    )


def test_auc_equals_the_share_of_ordered_pairs():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 10, 200) / 10, rng.integers(0, 2, 200)
    weights = rng.integers(0, 3, 200)
    up, down = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    pair = np.subtract.outer(scores[up], scores[down])
    pair_weight = np.multiply.outer(weights[up], weights[down])
    expected = (((pair > 0) + 0.5 * (pair == 0)) * pair_weight).sum() / pair_weight.sum()
    assert metrics.auc(scores, labels, weights).value == pytest.approx(expected, abs=1e-12)
    assert math.isnan(metrics.auc((0.1, 0.2), (1, 1)).value)


def test_calibration():
    assert metrics.calibration((0.5, 0.25), (1, 0)).value == pytest.approx(0.75)
    assert math.isnan(metrics.calibration((0.5,), (0,)).value)


def test_throughput_leaves_the_warm_up_out():
    rate = metrics.throughput([2.0, 0.1, 0.1, 0.1], 4096, warmup_steps=1)
    assert rate.samples_per_s == pytest.approx(40_960) and (rate.warmup_steps, rate.steps) == (1, 3)
    assert rate.time_p20 == rate.time_p80 == pytest.approx(0.1)
    assert metrics.throughput([2.0, 0.1, 0.1, 0.1], 4096, 0).samples_per_s == pytest.approx(7123, abs=1)
    with pytest.raises(ValueError, match="at least one must be left"):
        metrics.throughput([2.0], 4096, 1)


def test_mesh_throughput_counts_a_sample_once():
    rate = metrics.mesh_throughput(512, 0.25, data_parallel=4, model_parallel=2)
    assert (rate.samples_per_s, rate.samples_per_s_per_device) == (8192, 1024)
    assert metrics.mesh_throughput(512, 0.25, data_parallel=8).samples_per_s_per_device == 2048


def test_token_throughput_is_the_same_for_padded_and_jagged():
    padded = metrics.token_throughput([3, 0, 5, 100], 0.010, padded=True)
    jagged = metrics.token_throughput([3, 0, 5, 100], 0.010, padded=False)
    assert padded.tokens_per_s == jagged.tokens_per_s == pytest.approx(10_800)
    assert padded.processed_per_s == pytest.approx(40_000) and jagged.processed_per_s == pytest.approx(10_800)
    assert metrics.token_throughput([], 1.0, padded=True).tokens_per_s == 0


def test_mfu_above_one_is_an_error():
    assert metrics.mfu(3.956e12, 0.010, 989e12) == pytest.approx(0.400, abs=5e-4)
    with pytest.raises(ValueError, match=r"mfu: 2\.000 > 1"):
        metrics.mfu(2.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="must be > 0"):
        metrics.mfu(1.0, 0.0, 1.0)


def test_spread_ignores_undefined_seeds():
    spread = metrics.spread([1.0, 3.0, math.nan, 2.0])
    assert (spread["p50"], spread["mean"], spread["std"], spread["n"]) == (2.0, 2.0, 1.0, 3)
    assert metrics.spread([math.nan])["n"] == 0 and math.isnan(metrics.spread([1.0])["std"])
