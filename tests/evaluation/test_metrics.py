"""Metric functions: values by hand, ties as scipy has them, and a reason instead of a number where there is none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation import metrics


def test_average_ranks_give_tied_values_the_mean_of_their_ranks() -> None:
    # sorted: 1, 2, 2, 5, 5, 5 -> ranks 1, (2+3)/2, (2+3)/2, (4+5+6)/3 three times
    assert metrics.average_ranks(np.array([5.0, 2.0, 5.0, 1.0, 2.0, 5.0])).tolist() == [5, 2.5, 5, 1, 2.5, 5]


def test_spearman_of_one_swap_among_four_is_point_eight() -> None:
    # d = 0, 1, 1, 0: 1 - 6 * 2 / (4 * 15) = 0.8
    assert metrics.spearman([1, 3, 2, 4], [10, 20, 30, 40]).value == pytest.approx(0.8, abs=1e-12)


def test_spearman_with_ties_is_the_pearson_of_average_ranks() -> None:
    # ranks 1.5, 1.5, 3 against 1, 2, 3: deviations (-.5, -.5, 1) and (-1, 0, 1): 1.5 / sqrt(1.5 * 2)
    assert metrics.spearman([7, 7, 8], [1, 2, 3]).value == pytest.approx(1.5 / math.sqrt(3), abs=1e-12)


def agrees_with_scipy(ranks: Callable[[np.ndarray], np.ndarray]) -> bool:
    from scipy.stats import rankdata

    values = np.random.default_rng(0).integers(0, 12, size=200).astype(float)
    return bool(np.allclose(ranks(values), rankdata(values), atol=1e-12))


def test_ranks_agree_with_scipy_and_the_check_notices_ranks_that_ignore_ties() -> None:
    assert agrees_with_scipy(metrics.average_ranks)
    assert not agrees_with_scipy(lambda values: np.argsort(np.argsort(values, kind="stable")) + 1.0)


def test_correlations_agree_with_scipy_on_tied_random_data() -> None:
    from scipy import stats

    generator = np.random.default_rng(1)
    measured = np.round(generator.normal(8, 1.5, 300), 1)
    predicted = np.round(measured + generator.normal(0, 1, 300), 1)
    assert metrics.spearman(predicted, measured).value == pytest.approx(
        stats.spearmanr(predicted, measured)[0], abs=1e-12
    )
    assert metrics.pearson(predicted, measured).value == pytest.approx(
        stats.pearsonr(predicted, measured)[0], abs=1e-12
    )


def test_pearson_by_hand() -> None:
    # deviations (-1, 0, 1) and (-2, -1, 3): 5 / sqrt(2 * 14)
    assert metrics.pearson([1, 2, 3], [0, 1, 5]).value == pytest.approx(5 / math.sqrt(28), abs=1e-12)


def test_pearson_survives_tiny_and_huge_scales() -> None:
    tiny = np.array([1.0, 2.0, 3.0]) * 1e-170
    assert metrics.pearson(tiny, [0, 1, 5]).value == pytest.approx(5 / math.sqrt(28), abs=1e-9)


def test_errors_by_hand() -> None:
    # errors 1, -1, 0, 2: squares sum 6, absolute values sum 4; references 5, 7, 9, 7 deviate -2, 0, 2, 0: sum 8
    predicted, measured = [6, 6, 9, 9], [5, 7, 9, 7]
    assert metrics.rmse(predicted, measured).value == pytest.approx(math.sqrt(1.5))
    assert metrics.mae(predicted, measured).value == pytest.approx(1.0)
    assert metrics.r2(predicted, measured).value == pytest.approx(0.25)


def test_r2_is_zero_for_the_mean_and_negative_below_it() -> None:
    assert metrics.r2([2, 2, 2], [1, 2, 3]).value == 0.0
    assert metrics.r2([3, 2, 1], [1, 2, 3]).value == pytest.approx(-3.0)


def test_threshold_metrics_by_hand_count_the_threshold_itself_as_a_binder() -> None:
    counts = metrics.threshold_counts([9.0, 9.5, 8.0, 9.1, 7.0], [9.0, 8.0, 10.0, 9.3, 8.9], 9.0)
    assert (counts.num_hits, counts.num_predicted, counts.num_measured) == (2, 3, 3)
    assert counts.recall().value == counts.precision().value == counts.f1().value == pytest.approx(2 / 3)
    assert counts.base_rate == counts.predicted_rate == pytest.approx(0.6)


def test_calling_every_row_a_binder_has_recall_one_beside_predicted_rate_one() -> None:
    counts = metrics.threshold_counts([9.5] * 10, [9.5] + [6.0] * 9, 9.0)
    assert (counts.recall().value, counts.predicted_rate) == (1.0, 1.0)
    assert counts.precision().value == counts.base_rate == pytest.approx(0.1)


def test_f1_is_zero_where_binders_exist_and_none_is_predicted() -> None:
    counts = metrics.threshold_counts([1, 1], [9, 1], 9.0)
    assert counts.f1() == (0.0, None)
    assert counts.recall() == (0.0, None)
    assert counts.precision().undefined == "no prediction is >= 9"


def test_without_binders_recall_and_f1_have_no_value() -> None:
    counts = metrics.threshold_counts([9, 1], [1, 1], 9.0)
    assert counts.recall().undefined == counts.f1().undefined == "no reference is >= 9"
    assert counts.precision() == (0.0, None)


@pytest.mark.parametrize(
    ("metric", "predicted", "measured", "reason"),
    [
        (metrics.spearman, [6, 6, 6], [1, 2, 3], "all 3 predictions are equal (6)"),
        (metrics.pearson, [1, 2, 3], [6, 6, 6], "all 3 references are equal (6)"),
        (metrics.r2, [1, 2, 3], [6, 6, 6], "all 3 references are equal (6)"),
        (metrics.spearman, [1], [2], "1 row; at least 2 are needed"),
        (metrics.rmse, [], [], "no rows"),
        (metrics.mae, [1, math.nan, math.inf], [1, 2, 3], "2 of 3 predictions are NaN or infinite (first: row 1)"),
        (metrics.rmse, [1, 2], [None, 2], "1 of 2 references are NaN or infinite (first: row 0)"),
    ],
)
def test_what_has_no_value_is_nan_with_a_reason(
    metric: Callable[..., metrics.MetricValue], predicted: list[float], measured: list[float], reason: str
) -> None:
    result = metric(predicted, measured)
    assert math.isnan(result.value)
    assert result.undefined == reason


def test_per_group_keeps_groups_apart_and_averages_those_with_a_value() -> None:
    # a: reversed (-1); b: in order (1); c: one row. Pooled, the same rows correlate positively.
    predicted, measured = [2, 1, 8, 9, 5], [1, 2, 8, 9, 5]
    grouped = metrics.per_group(predicted, measured, ["a", "a", "b", "b", "c"], min_rows=2)
    assert (grouped.values["a"], grouped.values["b"]) == ((-1.0, None), (1.0, None))
    assert grouped.values["c"].undefined == "1 row; at least 2 are needed"
    assert grouped.sizes == {"a": 2, "b": 2, "c": 1}
    assert grouped.mean == (0.0, None)
    assert metrics.spearman(predicted, measured).value == pytest.approx(0.9)


def test_per_group_finds_the_rows_of_interleaved_groups() -> None:
    grouped = metrics.per_group([1, 9, 2, 8, 3, 7], [1, 1, 2, 2, 3, 3], [0, 1, 0, 1, 0, 1], min_rows=3)
    assert {name: result.value for name, result in grouped.values.items()} == {
        "0": pytest.approx(1),
        "1": pytest.approx(-1),
    }


def test_per_group_without_any_defined_group_says_so() -> None:
    grouped = metrics.per_group([1, 2], [1, 2], ["a", "b"])
    assert grouped.mean.undefined == "none of the 2 groups has a value (first group: 1 row; at least 10 are needed)"


def test_nine_rows_are_too_few_for_a_value_of_their_own_and_ten_are_not() -> None:
    # a, of ten rows, is reversed; b, of nine, in order: only a counts
    columns = [*range(10), *range(9)]
    grouped = metrics.per_group(columns, [*range(9, -1, -1), *range(9)], ["a"] * 10 + ["b"] * 9)
    assert (grouped.mean.value, grouped.defined) == (pytest.approx(-1.0), [pytest.approx(-1.0)])
    assert grouped.values["b"].undefined == "9 rows; at least 10 are needed"


@pytest.mark.parametrize(
    ("predicted", "measured", "message"),
    [
        ([1, 2], [1], "2 predictions for 1 references"),
        ([[1, 2]], [1], r"shape \(1, 2\)"),
        (["high"], [1], "every value must be a number"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(predicted: list[object], measured: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        metrics.rmse(predicted, measured)


def test_a_row_without_a_group_is_refused_by_number() -> None:
    with pytest.raises(DataError, match="row 1: None"):
        metrics.per_group([1, 2], [1, 2], ["a", None])


def test_bfloat16_tensors_and_column_vectors_are_read() -> None:
    import torch

    predicted = torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16, requires_grad=True)
    assert metrics.mae(predicted, torch.tensor([1.0, 2.0])).value == 0.5
