"""Average precision and enrichment: by hand, against brute force, and where they are undefined."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, permutations

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation.top_ranked import average_precision, enrichment

# Ten rows, binders at 9 and above: the 2nd, 3rd and 6th by prediction.
PREDICTED = [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
MEASURED = [8.9, 9.0, 11, 7, 7, 9.5, 5, 5, 5, 5]


def test_average_precision_is_the_mean_of_the_precision_at_each_binder() -> None:
    # precision 1/2 at the 2nd row, 2/3 at the 3rd, 3/6 at the 6th; each is a third of the recall
    assert average_precision(PREDICTED, MEASURED).value == pytest.approx((1 / 2 + 2 / 3 + 3 / 6) / 3)


def test_rows_with_one_prediction_come_in_together() -> None:
    # cuts: {9} with 1 row, no binder; {8} with 3 rows, 2 binders; {1} with 4 rows, all 3 binders: 2/3 * 2/3 + 1/3 * 3/4
    for measured in ([0, 9, 9, 0, 0, 0, 9], [0, 0, 9, 9, 9, 0, 0]):
        predicted = [9, 8, 8, 8, 1, 1, 1]
        expected = 2 / 3 * 2 / 4 + 1 / 3 * 3 / 7
        assert average_precision(predicted, measured).value == pytest.approx(expected)


@pytest.mark.parametrize(("percent", "expected"), [(20, 5 / 3), (30, 20 / 9), (60, 5 / 3), (100, 1.0)])
def test_enrichment_is_the_share_of_binders_in_the_top_over_their_share_in_all(percent: int, expected: float) -> None:
    # 3 of 10 rows are binders; of the top 2 rows 1 is: 1/2 over 3/10; of the top 3, 2; of the top 6, 3
    assert enrichment(PREDICTED, MEASURED, percent=percent).value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_rows", "percent", "size"), [(60, 1, 1), (100, 1, 1), (101, 1, 2), (700, 1, 7), (30, 5, 2)]
)
def test_the_top_is_rounded_up_to_whole_rows_and_not_by_float_error(num_rows: int, percent: int, size: int) -> None:
    # only the very first row is a binder: 1 of `size` rows over 1 of n. (0.01 * 700 is 7.000000000000001 in floats.)
    predicted = np.arange(num_rows, 0, -1)
    measured = np.where(predicted == num_rows, 9.0, 0.0)
    assert enrichment(predicted, measured, percent=percent).value == pytest.approx(num_rows / size)


def test_a_tie_that_the_top_ends_in_counts_by_its_share() -> None:
    # the top 3 of 10 are the row at 9 and 2 of the 4 at 8, of which 2 are binders: 0 + 2 * 2/4 of 3, over 2/10
    predicted, measured = [9, 8, 8, 8, 8, 1, 1, 1, 1, 1], [0, 9, 9, 0, 0, 0, 0, 0, 0, 0]
    assert enrichment(predicted, measured, percent=30).value == pytest.approx((1 / 3) / (2 / 10))


def test_a_constant_scores_what_chance_does_and_a_perfect_order_the_most() -> None:
    constant = np.zeros(10)
    assert average_precision(constant, MEASURED).value == pytest.approx(0.3)
    assert enrichment(constant, MEASURED, percent=5).value == pytest.approx(1.0)
    assert average_precision(MEASURED, MEASURED).value == 1.0
    assert enrichment(MEASURED, MEASURED, percent=5).value == pytest.approx(10 / 3)


# --- brute force ------------------------------------------------------------------------------------------------------


def tied_rows(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 12, num_rows).astype(float), generator.integers(5, 11, num_rows).astype(float)


def precision_by_cut(predicted: np.ndarray, measured: np.ndarray) -> float:
    """The sum over thresholds of (recall gained) * precision, each counted anew over all rows."""
    is_binder, total, recall = measured >= 9, 0.0, 0.0
    for cut in sorted(set(predicted.tolist()), reverse=True):
        called = [hit for hit, value in zip(is_binder, predicted) if value >= cut]
        reached = sum(called) / sum(is_binder)
        total, recall = total + (reached - recall) * sum(called) / len(called), reached
    return total


def precision_row_by_row(predicted: np.ndarray, measured: np.ndarray) -> float:
    """The broken twin: rows of a tie come in one by one, in the order of the data."""
    hits = (measured >= 9)[np.argsort(-predicted, kind="stable")]
    return float(np.mean((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits]))


def equals_brute_force(brute_force: Callable[[np.ndarray, np.ndarray], float]) -> bool:
    cases = [tied_rows(num_rows, seed) for seed, num_rows in enumerate((8, 40, 200, 1000))]
    return all(average_precision(*rows).value == pytest.approx(brute_force(*rows), abs=1e-12) for rows in cases)


def test_average_precision_equals_brute_force_and_the_check_notices_ties_broken_by_position() -> None:
    assert equals_brute_force(precision_by_cut)
    assert not equals_brute_force(precision_row_by_row)


def top_hits(order: tuple[int, ...], is_hit: np.ndarray, size: int) -> int:
    return int(is_hit[list(order[:size])].sum())


def test_enrichment_of_ties_is_the_mean_over_all_orders_and_the_check_notices_the_first_order() -> None:
    predicted, is_hit = np.array([3.0, 2, 2, 2, 2, 1, 1]), np.array([0, 1, 1, 0, 1, 0, 1], bool)
    orders = [o for o in permutations(range(7)) if all(predicted[a] >= predicted[b] for a, b in pairwise(o))]
    assert len(orders) == math.factorial(4) * 2
    first_orders = []
    for size in (1, 2, 3, 4, 5, 6, 7):
        percent = 100 * size // 7
        assert math.ceil(percent * 7 / 100) == size
        found = enrichment(predicted, np.where(is_hit, 9.0, 0.0), percent=percent).value
        expected = np.mean([top_hits(order, is_hit, size) for order in orders]) / size / (4 / 7)
        assert found == pytest.approx(expected)
        first_orders.append(found == pytest.approx(top_hits(orders[0], is_hit, size) / size / (4 / 7)))
    assert not all(first_orders)


# --- where there is no value ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predicted", "measured", "reason"),
    [
        ([], [], "no rows"),
        ([1.0, 2.0], [8.0, 8.9], "no reference is >= 9"),
        ([math.nan, 2.0], [9.0, 8.9], "1 of 2 predictions are NaN or infinite (first: row 0)"),
        ([1.0, 2.0], [9.0, math.inf], "1 of 2 references are NaN or infinite (first: row 1)"),
    ],
)
def test_without_a_binder_or_a_number_there_is_no_value_but_a_reason(
    predicted: list[float], measured: list[float], reason: str
) -> None:
    for result in (average_precision(predicted, measured), enrichment(predicted, measured, percent=1)):
        assert math.isnan(result.value)
        assert result.undefined == reason


def test_rows_of_other_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="2 predictions for 1 references"):
        average_precision([1, 2], [1])
