"""Scores and differences: values inside their intervals, reproducible, calibrated, and everything survives JSON."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import ResamplingGroups, compare_paired, rows_for, score_mean, score_predictions
from hf_ext.labels import ONE_NUMBER

PLAIN = ["spearman", "pearson", "rmse", "mae", "r2"]
BINDERS = ["recall", "precision", "f1", "average_precision"]
NAMES = [*PLAIN, *BINDERS]


def tied_pair(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    measured = np.round(generator.normal(8, 1.5, num_rows), 1)
    return np.round(measured + generator.normal(0, 1, num_rows), 1), measured


def test_scores_hold_the_values_of_the_metric_functions_inside_their_intervals() -> None:
    predicted, measured = tied_pair(400)
    scores = score_predictions(predicted, measured, num_resamples=300)
    assert list(scores) == NAMES
    rows = rows_for(ONE_NUMBER, predicted, measured)
    assert scores["spearman"]["value"] == rows.value("spearman").value
    assert scores["rmse"]["value"] == rows.value("rmse").value
    for score in scores.values():
        assert score["low"] < score["value"] < score["high"]
        assert (score["n"], score["num_resamples"], score["undefined"]) == (400, 300, None)


def test_interval_of_a_mean_has_the_textbook_width() -> None:
    # MAE of errors 0 and 1, half each, n = 400: standard error 0.5 / 20 = 0.025, so 95 % is about +- 0.049
    measured = np.zeros(400)
    score = score_predictions(np.tile([0.0, 1.0], 200), measured, num_resamples=2000)["mae"]
    assert score["value"] == 0.5
    assert score["low"] == pytest.approx(0.451, abs=0.006)
    assert score["high"] == pytest.approx(0.549, abs=0.006)


def test_threshold_scores_stand_beside_their_rate() -> None:
    scores = score_predictions([9.0, 9.5, 8.0, 9.1, 7.0], [9.0, 8.0, 10.0, 9.3, 8.9], num_resamples=20)
    for name in BINDERS[:3]:
        assert scores[name]["value"] == pytest.approx(2 / 3)
    for name in BINDERS:
        assert (scores[name]["base_rate"], scores[name]["threshold"]) == (0.6, 9.0)


def test_resamples_without_a_value_are_left_out() -> None:
    # one binder among four rows: it is missing from (3/4)^4 = 32 % of resamples, where recall has no value
    score = score_predictions([9.5, 1, 2, 3], [9.5, 1, 2, 3], num_resamples=1000)["recall"]
    assert (score["low"], score["high"]) == (1.0, 1.0)


def test_group_mean_weighs_groups_equally_and_resamples_groups() -> None:
    # a: -1 over 10 rows, b and c: +1 over 11 rows each, d: one row, no value
    groups = ["a"] * 10 + ["b"] * 11 + ["c"] * 11 + ["d"]
    measured = [*range(10), *range(11), *range(11), 5]
    scores = score_predictions([*range(9, -1, -1), *measured[10:]], measured, group_names=groups)
    score = scores["per_group_spearman"]
    assert score["value"] == pytest.approx(1 / 3)
    assert (score["low"], score["high"]) == (pytest.approx(-1.0), pytest.approx(1.0))
    assert (score["n"], len(score["groups"])) == (33, 4)
    assert score["groups"]["a"] == {"value": pytest.approx(-1.0), "n": 10, "undefined": None}
    assert score["groups"]["d"] == {"value": None, "n": 1, "undefined": "1 row; at least 10 are needed"}


def test_unusable_rows_give_reasons_and_no_crash() -> None:
    broken = "1 of 2 predictions are NaN or infinite (first: row 0)"
    for predicted, measured, reason in (([], [], "no rows"), ([math.nan, 1.0], [1.0, 2.0], broken)):
        scores = score_predictions(predicted, measured, group_names=["a"] * len(measured))
        assert {score["value"] for score in scores.values()} == {None}
        assert {scores[name]["undefined"] for name in NAMES} == {reason}
        assert scores["recall"]["base_rate"] is None


def test_a_share_of_all_rows_has_the_exact_binomial_interval_of_rows_or_groups() -> None:
    # all 10 of 10: 0.025 ** (1 / 10); of 5 groups of two rows each 0.025 ** (1 / 5); none: the mirror image
    assert score_mean(np.ones(10, bool), seed=0)["low"] == pytest.approx(0.6915, abs=1e-4)
    groups = ResamplingGroups.of("heavy", np.arange(10) // 2)
    score = score_mean(np.zeros(10, bool), seed=0, groups=groups)
    assert (score["low"], score["high"]) == (0.0, pytest.approx(1 - 0.4782, abs=1e-4))
    score = score_mean(np.arange(10) < 8, seed=0)
    assert score["low"] < score["value"] == 0.8 < score["high"] <= 1


def rows(num_rows: int = 80, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels with ties, and two models that share part of their error."""
    generator = np.random.default_rng(seed)
    labels = np.maximum(np.round(generator.normal(8.5, 1.5, num_rows), 1), 7.0)
    shared = labels + generator.normal(0, 1, num_rows)
    return labels, shared + generator.normal(0, 0.5, num_rows), shared + generator.normal(0, 0.5, num_rows)


def test_a_ratio_is_of_the_sums_over_all_rows_and_not_a_mean_of_rows() -> None:
    # (6 + 0) / 4 masked residues before, (2 + 1) / 4 after
    for metric, before, after, sign in (
        ("token_loss", 1.5, 0.75, -1),
        ("perplexity", np.exp(1.5), np.exp(0.75), -1),
        ("accuracy", 1.5, 0.75, 1),
    ):
        compared = compare_paired([1, 3], [6, 0], [2, 1], metric)
        assert (compared.before, compared.after) == pytest.approx((before, after))
        assert compared.improvement == pytest.approx(sign * (after - before))


def test_ratios_are_resampled_by_rows_with_all_their_predictions() -> None:
    # Two rows: both drawn once (half of the draws), or one of them twice, which are the ends.
    compared = compare_paired([1, 3], [6, 0], [2, 1], "token_loss")
    assert (compared.low, compared.high) == (pytest.approx(-1 / 3), pytest.approx(4.0))
    assert compare_paired([1, 3], [6, 0], [2, 1], "token_loss", confidence=0.4).high == pytest.approx(0.75)
    # rows without a prediction have no value
    compared = compare_paired([0, 0], [0, 0], [0, 0], "accuracy")
    assert compared.undefined == "before: the 2 rows hold no predictions; after: the 2 rows hold no predictions"
    assert compare_paired([1, 1], [float("nan"), 0], [1, 1], "token_loss").undefined.startswith("before: 1 of 2")


def test_a_difference_is_seen_where_the_intervals_of_both_scores_overlap() -> None:
    generator = np.random.default_rng(0)
    labels = generator.normal(size=300)
    before = labels + generator.normal(size=300)
    after = before - 0.1 * (before - labels)  # a tenth of every error less
    scores = [score_predictions(predicted, labels)["spearman"] for predicted in (before, after)]
    assert max(score["low"] for score in scores) < min(score["high"] for score in scores)
    assert compare_paired(labels, before, after).is_better
    assert compare_paired(labels, after, before).is_worse


def share_of_alarms(compare: Callable[..., object]) -> float:
    """How often two equally good models are told apart, over 100 draws of 100 rows."""
    alarms = 0
    for seed in range(100):
        compared = compare(*rows(100, seed), num_resamples=100, seed=seed)
        alarms += compared.is_better or compared.is_worse
    return alarms / 100


def test_equal_models_are_told_apart_in_about_one_of_twenty_and_the_check_notices_narrow_intervals() -> None:
    assert 0.01 <= share_of_alarms(compare_paired) <= 0.10
    assert share_of_alarms(lambda *columns, **settings: compare_paired(*columns, confidence=0.5, **settings)) > 0.3


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="metric='spearmen': use one of spearman, "):
        compare_paired([1, 2, 3], [1, 2, 3], [1, 2, 3], metric="spearmen")
    with pytest.raises(DataError, match="2 predictions for 3 references"):
        compare_paired([1, 2, 3], [1, 2, 3], [1, 2])
