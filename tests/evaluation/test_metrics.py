"""Metrics: by hand, a reason where there is no value, as `evaluate` metrics, and as runs log them."""

import math
import socket
import subprocess
import sys
from types import SimpleNamespace

import evaluate
import numpy as np
import pytest
from inside import Regression

from hf_ext.errors import DataError
from hf_ext.evaluation import METRIC_NAMES, RowMetrics, load_metric, rows_for, score_predictions
from hf_ext.evaluation.metrics.regression import mean_of_groups, per_group_spearman
from hf_ext.evaluation.metrics.rows import score_names
from hf_ext.labels import ONE_NUMBER

pytestmark = pytest.mark.internals


def value_of(metric, predicted, measured, threshold=None):
    return rows_for(ONE_NUMBER, predicted, measured, threshold, metric).value(metric)


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
    for metric in ("recall", "f1", "average_precision"):
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


def test_rows_with_one_prediction_come_in_together_whatever_their_order() -> None:
    # cuts: {9} with 1 row, no binder; {8} with 4 rows, 2 binders; {1} with 7 rows, all 3 binders
    for measured in ([0, 9, 9, 0, 0, 0, 9], [0, 0, 9, 9, 9, 0, 0]):
        expected = 2 / 3 * 2 / 4 + 1 / 3 * 3 / 7
        assert value_of("average_precision", [9, 8, 8, 8, 1, 1, 1], measured).value == pytest.approx(expected)


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


PREDICTIONS = [5.0, 6.0, 7.0, 9.5]
REFERENCES = [5.0, 7.0, 6.0, 9.0]
# errors 0, -1, 1, 0.5; ranks differ by one swap; references 5, 7, 6, 9 deviate from 6.75: squares sum 8.75
EXPECTED = {
    "spearman": 0.8,
    "rmse": 0.75,
    "mae": 0.625,
    "r2": 1 - 2.25 / 8.75,
    "recall": 1.0,
    "precision": 1.0,
    "f1": 1.0,
    "average_precision": 1.0,
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a metric tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_all_metrics_load_combine_and_take_batches_without_network() -> None:
    assert len(METRIC_NAMES) == 10
    loaded = [load_metric(name) for name in METRIC_NAMES]
    assert [metric.name for metric in loaded] == list(METRIC_NAMES)
    combined, groups = evaluate.combine(loaded), ["01", "01", "1", "1"]
    combined.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3], groups=groups[:3])
    combined.add_batch(predictions=np.float32(PREDICTIONS[3:]), references=np.array(REFERENCES[3:]), groups=groups[3:])
    result = combined.compute()
    assert {key: result[key] for key in EXPECTED} == pytest.approx(EXPECTED)
    assert result["pearson"] == pytest.approx(np.corrcoef(PREDICTIONS, REFERENCES)[0, 1])
    by_call = combined.compute(predictions=PREDICTIONS, references=REFERENCES, groups=[7, 7, 8, 8], threshold=6.5)
    assert (by_call["precision"], result["precision"]) == (0.5, 1.0)


def test_a_loaded_metric_without_a_value_is_nan_with_a_reason() -> None:
    result = load_metric("spearman").compute(predictions=[6.0, 6.0], references=[1.0, 2.0])
    assert math.isnan(result["spearman"])
    assert result["spearman_undefined"] == "all 2 predictions are equal (6)"
    rows = {"predictions": range(11), "references": range(11), "groups": ["a"] * 10 + ["b"]}
    assert load_metric("per_group_spearman").compute(**rows) == {"per_group_spearman": 1.0}


def test_importing_the_package_and_scoring_rows_imports_nothing_heavy() -> None:
    heavy = ("torch", "scipy", "matplotlib", "datasets", "evaluate", "transformers")
    use = "from hf_ext.evaluation import collapse_report, judge, score_predictions; score_predictions([1, 2], [1, 2])"
    code = f"import sys, hf_ext.reporting; {use}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


LABELS = np.random.default_rng(0).normal(8, 1.5, 60).round(1)
PREDICTED = (LABELS + np.random.default_rng(1).normal(0, 1, 60)).round(1)


def test_names_and_values_are_those_of_the_final_scores() -> None:
    metrics = RowMetrics(9.0)
    predicted, labels = (values.astype(np.float32) for values in (PREDICTED, LABELS))  # as Trainer does, (n, 1)
    found = metrics(SimpleNamespace(predictions=predicted[:, None], label_ids=labels))
    scores = score_predictions(PREDICTED, LABELS, num_resamples=0)
    expected = {name: score["value"] for name, score in scores.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert set(metrics.names) == {*found, "loss"} == {*expected, "loss", "num_distinct"}
    assert found["num_distinct"] == len(np.unique(PREDICTED))
    assert all(type(value) is float for value in found.values())
