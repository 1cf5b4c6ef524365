"""The difference of two models on the same rows: by hand, with the draws of the plain bootstrap, and calibrated."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.metrics import Regression
from hf_ext.evaluation.paired import PAIRED_METRICS, compare_paired
from hf_ext.evaluation.resampling import percentile_interval, resample
from hf_ext.reporting.units import less_is_better


def rows(num_rows: int = 80, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels with ties, and two models that share part of their error."""
    generator = np.random.default_rng(seed)
    labels = np.maximum(np.round(generator.normal(8.5, 1.5, num_rows), 1), 7.0)
    shared = labels + generator.normal(0, 1, num_rows)
    return labels, shared + generator.normal(0, 0.5, num_rows), shared + generator.normal(0, 0.5, num_rows)


def test_spearman_gains_point_two_where_one_swap_of_four_is_put_right() -> None:
    # d = 0, 1, 1, 0: 1 - 6 * 2 / (4 * 15) = 0.8 before, 1 after
    compared = compare_paired([10, 20, 30, 40], [1, 3, 2, 4], [1, 2, 3, 4])
    assert compared.before == pytest.approx(0.8)
    assert compared.after == pytest.approx(1.0)
    assert compared.improvement == pytest.approx(0.2)


def test_a_smaller_error_is_an_improvement() -> None:
    compared = compare_paired([0, 0, 0, 0], [2, -2, 2, -2], [1, -1, 1, -1], "rmse")
    assert (compared.before, compared.after, compared.improvement) == (2.0, 1.0, 1.0)
    assert (compared.low, compared.high) == (1.0, 1.0)
    assert compared.is_better
    assert not compared.is_worse


def test_the_same_predictions_differ_by_exactly_nothing() -> None:
    labels, before, _ = rows()
    for metric in ("spearman", "pearson", "rmse", "r2"):
        compared = compare_paired(labels, before, before, metric)
        assert (compared.improvement, compared.low, compared.high) == (0.0, 0.0, 0.0)
        assert not compared.is_better
        assert not compared.is_worse
        assert compared.excludes_improvement(0.0)


def test_the_other_way_round_the_improvement_changes_its_sign() -> None:
    labels, before, after = rows()
    there, back = compare_paired(labels, before, after), compare_paired(labels, after, before)
    assert there.improvement == -back.improvement
    assert there.low == pytest.approx(-back.high)


@pytest.mark.parametrize(
    ("metric", "before", "after", "improvement"),
    [
        # (6 + 0) / 4 masked residues before, (2 + 1) / 4 after
        ("token_loss", 1.5, 0.75, 0.75),
        ("perplexity", np.exp(1.5), np.exp(0.75), np.exp(1.5) - np.exp(0.75)),
        ("accuracy", 1.5, 0.75, -0.75),
    ],
)
def test_a_ratio_is_of_the_sums_over_all_rows_and_not_a_mean_of_rows(metric, before, after, improvement) -> None:
    compared = compare_paired([1, 3], [6, 0], [2, 1], metric)
    assert (compared.before, compared.after) == pytest.approx((before, after))
    assert compared.improvement == pytest.approx(improvement)


@pytest.mark.parametrize("metric", ["nrmse", "darcy2d_nrmse", "loss"])
def test_errors_that_rows_have_of_their_own_are_averaged_and_less_is_better(metric) -> None:
    compared = compare_paired([1, 1], [0.4, 0.2], [0.1, 0.3], metric)
    assert (compared.before, compared.after, compared.improvement) == pytest.approx((0.3, 0.2, 0.1))


def test_ratios_are_resampled_by_rows_with_all_their_predictions() -> None:
    # Two rows: both drawn once (half of the draws), or one of them twice, which are the ends.
    compared = compare_paired([1, 3], [6, 0], [2, 1], "token_loss")
    assert (compared.low, compared.high) == (pytest.approx(-1 / 3), pytest.approx(4.0))
    assert compare_paired([1, 3], [6, 0], [2, 1], "token_loss", confidence=0.4).high == pytest.approx(0.75)


def test_ratios_over_rows_without_a_prediction_are_undefined() -> None:
    compared = compare_paired([0, 0], [0, 0], [0, 0], "accuracy")
    assert compared.undefined == "before: the 2 rows hold no predictions; after: the 2 rows hold no predictions"
    assert compare_paired([1, 1], [float("nan"), 0], [1, 1], "token_loss").undefined.startswith("before: 1 of 2")


def in_groups(*order: int, num_groups: int) -> np.ndarray:
    """The same ten numbers, in this order, for each group."""
    return np.tile(np.array(order, float), num_groups)


def test_within_groups_the_mean_difference_is_compared_and_groups_are_drawn() -> None:
    # Ten rows a group: in order 1; with the first two swapped 1 - 6 * 2 / (10 * 99) = 0.98788
    right, swapped = [*range(10)], [1, 0, *range(2, 10)]
    labels, before = in_groups(*right, num_groups=12), in_groups(*swapped, num_groups=12)
    after = np.concatenate([in_groups(*right, num_groups=6), in_groups(*swapped, num_groups=6)])
    groups = [f"antigen {i // 10}" for i in range(120)]
    compared = compare_paired(labels, before, after, "per_group_spearman", groups=groups)
    step = 12 / 990
    assert (compared.before, compared.after) == (pytest.approx(1 - step), pytest.approx(1 - step / 2))
    assert compared.improvement == pytest.approx(step / 2)
    # 6 of 12 groups are better by `step`: the mean of 12 drawn ones lies between 0 and `step`
    assert 0 < compared.low < step / 2 < compared.high < step
    assert (compared.interval_by, compared.num_units, compared.is_better) == ("group", 12, True)
    assert compared.excludes_improvement(step)
    assert json.loads(json.dumps(compared.as_dict(), allow_nan=False)) == compared.as_dict()


def test_fewer_than_ten_groups_show_an_interval_and_claim_nothing() -> None:
    labels, groups = in_groups(*range(10), num_groups=9), np.repeat(np.arange(9), 10)
    compared = compare_paired(labels, -labels, labels, "per_group_spearman", groups=groups)
    assert (compared.improvement, compared.low) == (pytest.approx(2.0), pytest.approx(2.0))
    assert not compared.is_better


def test_groups_without_a_value_of_both_models_are_left_out_of_both() -> None:
    labels, groups = in_groups(*range(10), num_groups=3), np.repeat(["a", "b", "c"], 10)
    before, after = labels.copy(), -labels
    before[:10] = 5.0  # constant within a
    compared = compare_paired(labels, before, after, "per_group_spearman", groups=groups)
    assert (compared.before, compared.after, compared.num_units) == (pytest.approx(1), pytest.approx(-1), 2)
    nothing = compare_paired(labels, np.ones(30), after, "per_group_spearman", groups=groups)
    assert nothing.undefined.startswith("before: none of the 3 groups has a value (first group: all 10 predictions")
    assert (nothing.improvement, nothing.low, nothing.is_better, nothing.is_worse) == (None, None, False, False)
    assert nothing.after == pytest.approx(-1)


def test_groups_are_needed_and_only_where_they_are() -> None:
    with pytest.raises(ArgumentError, match="groups=None; one group name per row"):
        compare_paired([1, 2], [1, 2], [1, 2], "per_group_spearman")
    assert compare_paired([1, 2], [1, 2], [1, 2], "rmse", groups=None).improvement == 0


def both_intervals(metric: str, second_seed: int) -> tuple[tuple, tuple]:
    labels, before, after = rows()
    earlier, later = (
        resample(Regression(predicted, labels).metric(metric), len(labels), 300, seed)
        for predicted, seed in ((before, 5), (after, second_seed))
    )
    sign = -1 if less_is_better(metric) else 1
    compared = compare_paired(labels, before, after, metric, num_resamples=300, seed=5)
    return percentile_interval(sign * (later - earlier), 0.95), (compared.low, compared.high)


@pytest.mark.parametrize("metric", PAIRED_METRICS)
def test_both_models_are_scored_on_the_same_draws_and_the_check_notices_other_draws(metric: str) -> None:
    np.testing.assert_allclose(*both_intervals(metric, second_seed=5), atol=1e-12)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(*both_intervals(metric, second_seed=6), atol=1e-12)


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
    """How often two equally good models are told apart, over 200 draws of 100 rows."""
    alarms = 0
    for seed in range(200):
        compared = compare(*rows(100, seed), num_resamples=200, seed=seed)
        alarms += compared.is_better or compared.is_worse
    return alarms / 200


def test_equal_models_are_told_apart_in_about_one_of_twenty_and_the_check_notices_narrow_intervals() -> None:
    assert 0.01 <= share_of_alarms(compare_paired) <= 0.10
    assert share_of_alarms(lambda *columns, **settings: compare_paired(*columns, confidence=0.5, **settings)) > 0.3


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ([1, 1, 1], [1, 2, 3], "before: all 3 predictions are equal"),
        ([1, 2, 3], [5, 5, 5], "after: all 3 predictions are equal"),
        ([1, 2, 3], [1, float("nan"), 3], "after: 1 of 3 predictions are NaN or infinite"),
    ],
)
def test_a_score_without_value_leaves_the_comparison_undefined(before: list, after: list, reason: str) -> None:
    compared = compare_paired([1, 2, 3], before, after)
    assert compared.undefined is not None
    assert compared.undefined.startswith(reason)
    assert (compared.improvement, compared.low, compared.high) == (None, None, None)
    assert not compared.is_better
    assert not compared.is_worse
    assert not compared.excludes_improvement(1.0)
    assert json.loads(json.dumps(compared.as_dict(), allow_nan=False))["is_better"] is False


@pytest.mark.parametrize(
    "wrong",
    [
        {"metric": "spearmen"},
        {"confidence": 1.0},
        {"num_resamples": 1},
        {"seed": -1},
        {"threshold": float("nan")},
    ],
)
def test_arguments_out_of_range_are_refused_by_name(wrong: dict) -> None:
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}="):
        compare_paired([1, 2, 3], [1, 2, 3], [1, 2, 3], **wrong)


def test_columns_of_other_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="2 predictions for 3 references"):
        compare_paired([1, 2, 3], [1, 2, 3], [1, 2])
    with pytest.raises(DataError, match="4 predictions for 3 references"):
        compare_paired([1, 2, 3], [1, 2, 3, 4], [1, 2, 3])
