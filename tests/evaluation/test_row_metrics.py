"""What evaluations compute while training: by hand, with the groups of exactly these rows, and what has no value."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from hf_ext.errors import DataError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.metrics import THRESHOLD_METRICS
from hf_ext.evaluation.row_metrics import RowMetrics

LABELS = np.random.default_rng(0).normal(8, 1.5, 60).round(1)
PREDICTED = (LABELS + np.random.default_rng(1).normal(0, 1, 60)).round(1)
GROUPS = np.array(["a"] * 30 + ["b"] * 21 + ["c"] * 9)
ORDER = np.random.default_rng(2).permutation(60)  # so that groups do not lie together


def table(**columns: Any) -> Dataset:
    return Dataset.from_dict({"label": LABELS[ORDER].tolist(), "antigen": GROUPS[ORDER].tolist(), **columns})


def call(metrics: RowMetrics, rows: Any = slice(None)) -> dict[str, float]:
    """As Trainer does, in single precision, (n, 1)."""
    predicted, labels = (values[ORDER][rows].astype(np.float32) for values in (PREDICTED, LABELS))
    return metrics(SimpleNamespace(predictions=predicted[:, None], label_ids=labels))


def test_names_and_values_are_those_of_the_final_scores() -> None:
    metrics = RowMetrics(9.0, "antigen")
    found = call(metrics.of_rows(table(), None))
    scores = score_predictions(PREDICTED, LABELS, groups=GROUPS, num_resamples=0)
    expected = {name: score["value"] for name, score in scores.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert set(found) == {*expected, "num_distinct", "num_defined_groups"}
    assert set(metrics.names) == {*expected, "loss", "num_distinct"}
    assert found["num_distinct"] == len(np.unique(PREDICTED))
    assert found["num_defined_groups"] == 2.0  # c has 9 rows
    assert all(type(value) is float for value in found.values())


def test_without_a_threshold_and_groups_there_are_the_plain_metrics() -> None:
    assert set(call(RowMetrics())) == {"spearman", "pearson", "rmse", "mae", "r2", "num_distinct"}
    assert "per_group_spearman" not in call(RowMetrics(9.0, "antigen"))  # of which nobody knows the rows


def test_of_a_subset_the_groups_are_those_of_its_rows_and_other_rows_are_refused() -> None:
    rows = np.sort(np.random.default_rng(3).choice(60, 40, replace=False))
    metrics = RowMetrics(9.0, "antigen").of_rows(table(), rows)
    scores = score_predictions(
        PREDICTED[ORDER][rows], LABELS[ORDER][rows], groups=GROUPS[ORDER][rows], num_resamples=0
    )["per_group_spearman"]
    assert call(metrics, rows)["per_group_spearman"] == pytest.approx(scores["value"], abs=1e-6)
    assert call(metrics, rows)["num_defined_groups"] == scores["num_defined_groups"]
    for wrong in (rows[::-1], np.arange(40), slice(None)):
        with pytest.raises(DataError, match="group_column='antigen': the labels of this evaluation are not those"):
            call(metrics, wrong)


def test_a_set_without_labels_is_trusted_and_one_without_the_column_is_not() -> None:
    nameless = table().remove_columns("label")
    assert call(RowMetrics(None, "antigen").of_rows(nameless, None))["num_defined_groups"] == 2.0
    with pytest.raises(DataError, match="group_column='antibody': the evaluation set has label, antigen"):
        RowMetrics(None, "antibody").of_rows(table(), None)


def test_labels_of_lists_and_tensors_are_read_as_numbers() -> None:
    for rows in (
        table(labels=[[value] for value in LABELS[ORDER]]).remove_columns("label"),
        table().with_format("torch"),
    ):
        metrics = RowMetrics(None, "antigen").of_rows(rows, None)
        assert metrics.labels == pytest.approx(LABELS[ORDER], abs=1e-5)
        assert call(metrics)["num_defined_groups"] == 2.0


def test_what_has_no_value_is_nan() -> None:
    found = call(RowMetrics(99.0, groups=np.array([f"{i}" for i in range(60)])))
    assert all(math.isnan(found[name]) for name in (*THRESHOLD_METRICS, "per_group_spearman"))
    assert found["num_defined_groups"] == 0.0


def test_that_a_metric_will_have_no_value_is_known_from_labels_and_groups() -> None:
    for metric, threshold, rows, reason in (
        ("recall", 9.0, None, None),
        ("recall", 99.0, None, "no label of the evaluation rows is at or above the threshold 99"),
        ("enrichment_1pct", 9.0, LABELS[ORDER] < 9, "no label of the evaluation rows is at or above the threshold 9"),
        ("spearman", 99.0, None, None),
        ("per_group_spearman", None, None, None),
        ("per_group_spearman", None, GROUPS[ORDER] == "c", "no antigen has 10 of the evaluation rows"),
    ):
        chosen = None if rows is None else np.flatnonzero(rows)
        assert RowMetrics(threshold, "antigen").why_undefined(metric, table(), chosen) == reason
    metrics, stream = RowMetrics(None, "antigen"), table().to_iterable_dataset()
    assert metrics.of_rows(stream, None) is metrics
    assert metrics.why_undefined("per_group_spearman", stream, None) == "a stream has no groups"
