"""Metric functions: values by hand, ties as scipy has them, and a reason instead of a number where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation.metrics import Regression, mean_of_groups, per_group_spearman, score_names, value_of


def test_correlations_agree_with_scipy_on_tied_random_data() -> None:
    from scipy import stats

    generator = np.random.default_rng(1)
    measured = np.round(generator.normal(8, 1.5, 300), 1)
    predicted = np.round(measured + generator.normal(0, 1, 300), 1)
    assert value_of("spearman", predicted, measured).value == pytest.approx(
        stats.spearmanr(predicted, measured)[0], abs=1e-12
    )
    assert value_of("pearson", predicted, measured).value == pytest.approx(
        stats.pearsonr(predicted, measured)[0], abs=1e-12
    )


def test_pearson_by_hand_also_of_small_and_large_scales_far_from_0() -> None:
    # deviations (-1, 0, 1) and (-2, -1, 3): 5 / sqrt(2 * 14)
    for scale in (1.0, 1e-30, 1e30):
        predicted = scale * np.array([1001.0, 1002.0, 1003.0])
        assert value_of("pearson", predicted, [0, 1, 5]).value == pytest.approx(5 / math.sqrt(28), abs=1e-9)


def test_errors_by_hand() -> None:
    # errors 1, -1, 0, 2: squares sum 6, absolute values sum 4; references 5, 7, 9, 7 deviate -2, 0, 2, 0: sum 8
    predicted, measured = [6, 6, 9, 9], [5, 7, 9, 7]
    assert value_of("rmse", predicted, measured).value == pytest.approx(math.sqrt(1.5))
    assert value_of("mae", predicted, measured).value == pytest.approx(1.0)
    assert value_of("r2", predicted, measured).value == pytest.approx(0.25)
    # r2 is zero for the mean and negative below it
    assert value_of("r2", [2, 2, 2], [1, 2, 3]).value == 0.0
    assert value_of("r2", [3, 2, 1], [1, 2, 3]).value == pytest.approx(-3.0)


def test_threshold_metrics_by_hand_count_the_threshold_itself_as_a_binder() -> None:
    columns = [9.0, 9.5, 8.0, 9.1, 7.0], [9.0, 8.0, 10.0, 9.3, 8.9]
    for metric in ("recall", "precision", "f1"):
        assert value_of(metric, *columns, 9.0).value == pytest.approx(2 / 3)
    assert value_of("f1", [1, 1], [9, 1]) == value_of("recall", [1, 1], [9, 1]) == (0.0, None)
    assert value_of("precision", [1, 1], [9, 1]).undefined == "no prediction is >= 9"
    for metric in ("recall", "f1", "average_precision", "enrichment_1pct"):
        assert value_of(metric, [9, 1], [1, 1]).undefined == "no reference is >= 9"
    assert value_of("precision", [9, 1], [1, 1]) == (0.0, None)


def test_what_has_no_value_is_nan_with_a_reason() -> None:
    for metric, predicted, measured, reason in (
        ("spearman", [6, 6, 6], [1, 2, 3], "all 3 predictions are equal (6)"),
        ("r2", [1, 2, 3], [6, 6, 6], "all 3 references are equal (6)"),
        ("pearson", [1], [2], "1 row; at least 2 are needed"),
        ("rmse", [], [], "no rows"),
        ("mae", [1, math.nan, math.inf], [1, 2, 3], "2 of 3 predictions are NaN or infinite (first: row 1)"),
        ("rmse", [1, 2], [None, 2], "1 of 2 references are NaN or infinite (first: row 0)"),
    ):
        result = value_of(metric, predicted, measured)
        assert math.isnan(result.value)
        assert (result.undefined, result.known) == (reason, None)


def test_per_group_keeps_interleaved_groups_apart_and_averages_those_of_ten_rows_and_more() -> None:
    # a: reversed (-1); b: in order (1); c: nine rows in order. Pooled, the rows of a and b correlate positively.
    groups, down = [*"ab" * 10, *"c" * 9], np.arange(10)[::-1]
    predicted = np.append(np.stack([down, 20 + np.arange(10)], 1).ravel(), np.arange(9))
    measured = np.append(np.stack([np.arange(10), 20 + np.arange(10)], 1).ravel(), np.arange(9))
    found = per_group_spearman(predicted, measured, groups)
    assert found["a"] == {"value": -1.0, "n": 10, "undefined": None}
    assert found["b"] == {"value": 1.0, "n": 10, "undefined": None}
    assert found["c"] == {"value": None, "n": 9, "undefined": "9 rows; at least 10 are needed"}
    assert mean_of_groups(found) == (0.0, None)
    assert value_of("spearman", predicted[:20], measured[:20]).value > 0.7
    nothing = mean_of_groups(per_group_spearman([1, 2], [1, 2], ["a", "b"]))
    assert nothing.undefined == "none of the 2 groups has a value (first group: 1 row; at least 10 are needed)"
    with pytest.raises(DataError, match="row 1: None"):
        per_group_spearman([1, 2], [1, 2], ["a", None])


def test_shapes_that_do_not_fit_are_refused() -> None:
    for predicted, measured, message in (
        ([1, 2], [1], "2 predictions for 1 references"),
        ([[1, 2]], [1], r"shape \(1, 2\)"),
        (["high"], [1], "every value must be a number"),
    ):
        with pytest.raises(DataError, match=message):
            value_of("rmse", predicted, measured)


def test_bfloat16_tensors_and_column_vectors_are_read() -> None:
    import torch

    predicted = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16, requires_grad=True)
    assert value_of("mae", predicted, torch.tensor([1.0, 2.0])).value == 0.5


# --- how binders stand in a ranking -----------------------------------------------------------------------------------

# Ten rows, binders at 9 and above: the 2nd, 3rd and 6th by prediction.
PREDICTED = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
MEASURED = [8.9, 9.0, 11, 7, 7, 9.5, 5, 5, 5, 5]


def test_average_precision_is_the_mean_of_the_precision_at_each_binder() -> None:
    # precision 1/2 at the 2nd row, 2/3 at the 3rd, 3/6 at the 6th; each is a third of the recall
    assert value_of("average_precision", PREDICTED, MEASURED).value == pytest.approx((1 / 2 + 2 / 3 + 3 / 6) / 3)


def test_rows_with_one_prediction_come_in_together_whatever_their_order() -> None:
    # cuts: {9} with 1 row, no binder; {8} with 4 rows, 2 binders; {1} with 7 rows, all 3 binders
    for measured in ([0, 9, 9, 0, 0, 0, 9], [0, 0, 9, 9, 9, 0, 0]):
        expected = 2 / 3 * 2 / 4 + 1 / 3 * 3 / 7
        assert value_of("average_precision", [9, 8, 8, 8, 1, 1, 1], measured).value == pytest.approx(expected)


def test_the_top_is_rounded_up_to_whole_rows_and_not_by_float_error() -> None:
    # only the very first row is a binder: 1 of `size` rows over 1 of n. (0.01 * 700 is 7.000000000000001 in floats.)
    for num_rows, percent, size in ((60, 1, 1), (101, 1, 2), (700, 1, 7), (30, 5, 2), (40, 5, 2)):
        predicted = np.arange(num_rows, 0, -1)
        measured = np.where(predicted == num_rows, 9.0, 0.0)
        assert value_of(f"enrichment_{percent}pct", predicted, measured).value == pytest.approx(num_rows / size)


def test_a_tie_that_the_top_ends_in_counts_by_its_share() -> None:
    # the top 3 of 60 are the row at 9 and 2 of the 4 at 8, of which 2 are binders: 0 + 2 * 2/4 of 3, over 2/60
    predicted, measured = [9, 8, 8, 8, 8, *[1] * 55], [0, 9, 9, 0, 0, *[0] * 55]
    assert value_of("enrichment_5pct", predicted, measured).value == pytest.approx((1 / 3) / (2 / 60))


def test_a_constant_scores_what_chance_does_and_a_perfect_order_the_most() -> None:
    assert value_of("average_precision", np.zeros(10), MEASURED).value == pytest.approx(0.3)
    assert value_of("enrichment_5pct", np.zeros(10), MEASURED).value == pytest.approx(1.0)
    assert value_of("average_precision", MEASURED, MEASURED).value == 1.0
    assert value_of("enrichment_5pct", MEASURED, MEASURED).value == pytest.approx(10 / 3)


# --- counts are copies of rows ----------------------------------------------------------------------------------------

NAMES = score_names(9.0)


def copies_differ(num_rows: int, broken: bool = False) -> list[str]:
    """Metrics that differ between rows that count as often as drawn, and copies of those rows."""
    generator = np.random.default_rng(0)
    measured = np.round(generator.normal(8, 1.5, num_rows), 1)
    predicted = np.round(measured + generator.normal(0, 1, num_rows), 1)
    counts = np.stack([np.bincount(row, minlength=num_rows) for row in generator.integers(0, num_rows, (60, num_rows))])
    rows = Regression(predicted, measured)
    found = {name: rows.metric(name)(np.ones(counts.shape) if broken else counts.astype(float)) for name in NAMES}
    copied = [Regression(predicted.repeat(row), measured.repeat(row)) for row in counts]
    plain = {name: [one.value(name).value for one in copied] for name in NAMES}
    return [name for name in NAMES if not np.allclose(found[name], plain[name], atol=1e-10, equal_nan=True)]


@pytest.mark.parametrize("num_rows", [40, 3])  # of three rows some resamples are constant
def test_metrics_of_counts_are_those_of_copied_rows(num_rows: int) -> None:
    assert copies_differ(num_rows) == []


def test_the_check_notices_counts_that_are_not_used() -> None:
    assert copies_differ(40, broken=True) == [*NAMES]
