"""Scores: the fast bootstrap equals the plain one, intervals are reproducible, everything survives JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.metrics import value_of

PLAIN = ["spearman", "pearson", "rmse", "mae", "r2"]
BINDERS = ["recall", "precision", "f1", "average_precision", "enrichment_1pct", "enrichment_5pct"]
NAMES = [*PLAIN, *BINDERS]


def tied_pair(num_rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    measured = np.round(generator.normal(8, 1.5, num_rows), 1)
    return np.round(measured + generator.normal(0, 1, num_rows), 1), measured


def test_scores_hold_the_values_of_the_metric_functions_inside_their_intervals() -> None:
    predicted, measured = tied_pair(400)
    scores = score_predictions(predicted, measured, num_resamples=300)
    assert list(scores) == NAMES
    assert scores["spearman"]["value"] == value_of("spearman", predicted, measured).value
    assert scores["rmse"]["value"] == value_of("rmse", predicted, measured).value
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


def test_same_seed_gives_the_same_scores_and_another_seed_other_intervals() -> None:
    predicted, measured = tied_pair(100)
    first = score_predictions(predicted, measured, num_resamples=100, seed=1)
    assert first == score_predictions(predicted, measured, num_resamples=100, seed=1)
    assert first["rmse"]["low"] != score_predictions(predicted, measured, num_resamples=100, seed=2)["rmse"]["low"]


def test_constant_predictions_have_no_correlation_but_a_full_rmse() -> None:
    scores = score_predictions([6.0] * 4, [5.0, 6.0, 7.0, 8.0], num_resamples=50)
    assert scores["spearman"]["value"] is scores["spearman"]["low"] is scores["spearman"]["high"] is None
    assert scores["spearman"]["undefined"] == "all 4 predictions are equal (6)"
    assert scores["spearman"]["num_resamples"] == 0
    assert scores["rmse"]["value"] == pytest.approx(math.sqrt((1 + 0 + 1 + 4) / 4))


def test_threshold_scores_stand_beside_their_rates() -> None:
    scores = score_predictions([9.0, 9.5, 8.0, 9.1, 7.0], [9.0, 8.0, 10.0, 9.3, 8.9], num_resamples=20)
    for name in BINDERS[:3]:
        assert scores[name]["value"] == pytest.approx(2 / 3)
    for name in BINDERS:
        assert (scores[name]["base_rate"], scores[name]["predicted_rate"], scores[name]["threshold"]) == (0.6, 0.6, 9.0)


def test_without_a_threshold_there_are_no_scores_of_binders_and_the_others_are_the_same() -> None:
    predicted, measured = tied_pair(50)
    without = score_predictions(predicted, measured, threshold=None, num_resamples=50)
    assert list(without) == PLAIN
    whole = score_predictions(predicted, measured, num_resamples=50)
    assert without == {name: whole[name] for name in PLAIN}


def test_resamples_without_a_value_are_counted_and_left_out() -> None:
    # one binder among four rows: it is missing from (3/4)^4 = 32 % of resamples, where recall has no value
    score = score_predictions([9.5, 1, 2, 3], [9.5, 1, 2, 3], num_resamples=1000)["recall"]
    assert 250 < score["num_undefined_resamples"] < 380
    assert (score["low"], score["high"]) == (1.0, 1.0)


def test_group_mean_weighs_groups_equally_and_resamples_groups() -> None:
    # a: -1 over 10 rows, b and c: +1 over 11 rows each, d: one row, no value
    groups = ["a"] * 10 + ["b"] * 11 + ["c"] * 11 + ["d"]
    measured = [*range(10), *range(11), *range(11), 5]
    scores = score_predictions([*range(9, -1, -1), *measured[10:]], measured, groups=groups)
    score = scores["per_group_spearman"]
    assert score["value"] == pytest.approx(1 / 3)
    assert (score["low"], score["high"]) == (pytest.approx(-1.0), pytest.approx(1.0))
    assert (score["n"], score["num_groups"], score["num_defined_groups"]) == (33, 4, 3)
    assert score["groups"]["a"] == {"value": pytest.approx(-1.0), "n": 10, "undefined": None}
    assert score["groups"]["d"] == {"value": None, "n": 1, "undefined": "1 row; at least 10 are needed"}


def test_one_group_has_a_mean_but_no_interval() -> None:
    score = score_predictions(range(10), range(10), groups=["a"] * 10)["per_group_spearman"]
    assert (score["value"], score["low"], score["high"]) == (pytest.approx(1.0), None, None)


@pytest.mark.parametrize(
    ("predicted", "measured", "reason"),
    [
        ([], [], "no rows"),
        ([math.nan, 1.0], [1.0, 2.0], "1 of 2 predictions are NaN or infinite (first: row 0)"),
    ],
)
def test_unusable_rows_give_reasons_and_no_crash(predicted: list[float], measured: list[float], reason: str) -> None:
    scores = score_predictions(predicted, measured, groups=["a"] * len(measured))
    assert {score["value"] for score in scores.values()} == {None}
    assert {scores[name]["undefined"] for name in NAMES} == {reason}
    assert scores["recall"]["base_rate"] is None


def test_scores_are_strict_json() -> None:
    scores = score_predictions([1, 1, math.inf], [1, 2, 3], groups=[1, 1, 2])
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores
    scores = score_predictions(*tied_pair(30), groups=[1, 2, 3] * 10, num_resamples=10)
    assert json.loads(json.dumps(scores, allow_nan=False)) == scores


def test_large_n_lowers_the_resamples() -> None:
    labels = np.arange(100_000.0)
    assert score_predictions(labels, labels, threshold=None, num_resamples=600)["rmse"]["num_resamples"] == 500
    assert score_predictions(labels, labels, threshold=None, num_resamples=5)["rmse"]["num_resamples"] == 5


def test_zero_resamples_give_values_without_intervals() -> None:
    score = score_predictions([1, 2, 3], [1, 2, 4], num_resamples=0)["rmse"]
    assert score["value"] == pytest.approx(math.sqrt(1 / 3))
    assert (score["low"], score["high"], score["num_resamples"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"num_resamples": -1}, "num_resamples=-1"),
        ({"threshold": math.nan}, "threshold=nan"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        score_predictions([1, 2], [1, 2], **arguments)
