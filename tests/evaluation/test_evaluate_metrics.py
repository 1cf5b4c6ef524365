"""The `evaluate` metrics: every one loads from the package with the network cut, combines, and takes batches."""

import math
import socket
import subprocess
import sys

import evaluate
import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import METRIC_NAMES, load_metric

PREDICTIONS = [5.0, 6.0, 7.0, 9.5]
REFERENCES = [5.0, 7.0, 6.0, 9.0]
# errors 0, -1, 1, 0.5; ranks differ by one swap; references 5, 7, 6, 9 deviate from 6.75: squares sum 8.75
EXPECTED = {
    "spearman": 0.8,
    "rmse": 0.75,
    "mae": 0.625,
    "r2": 1 - 2.25 / 8.75,
    "recall": 1.0,
    "recall_base_rate": 0.25,
    "recall_predicted_rate": 0.25,
    "recall_threshold": 9.0,
    "precision": 1.0,
    "f1": 1.0,
    # the one binder of four rows is predicted highest: the top row, alone in 1 % and 5 %, has 4 times their share
    "average_precision": 1.0,
    "enrichment_1pct": 4.0,
    "enrichment_5pct": 4.0,
    "per_group_spearman_num_groups": 2,
    "per_group_spearman_num_defined_groups": 0,
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a metric tried to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_all_metrics_load_combine_and_take_batches_without_network() -> None:
    assert len(METRIC_NAMES) == 12
    loaded = [load_metric(name) for name in METRIC_NAMES]
    assert [metric.name for metric in loaded] == list(METRIC_NAMES)
    combined, groups = evaluate.combine(loaded), ["01", "01", "1", "1"]  # which stay text
    combined.add_batch(predictions=PREDICTIONS[:3], references=REFERENCES[:3], groups=groups[:3])
    combined.add_batch(predictions=np.float32(PREDICTIONS[3:]), references=np.array(REFERENCES[3:]), groups=groups[3:])
    result = combined.compute()
    assert {key: result[key] for key in EXPECTED} == pytest.approx(EXPECTED)
    assert result["pearson"] == pytest.approx(np.corrcoef(PREDICTIONS, REFERENCES)[0, 1])
    assert list(result["per_group_spearman_by_group"]) == ["01", "1"]
    by_call = combined.compute(predictions=PREDICTIONS, references=REFERENCES, groups=[7, 7, 8, 8], threshold=6.5)
    assert by_call["f1_threshold"] == 6.5
    assert list(by_call["per_group_spearman_by_group"]) == ["7", "8"]


def test_threshold_is_taken_from_the_constructor_or_from_compute() -> None:
    metric = load_metric("recall", threshold=6.5)
    assert metric.compute(predictions=PREDICTIONS, references=REFERENCES)["recall"] == 0.5
    assert metric.compute(predictions=PREDICTIONS, references=REFERENCES, threshold=8.0)["recall"] == 1.0


def test_what_has_no_value_is_nan_with_a_reason() -> None:
    result = load_metric("spearman").compute(predictions=[6.0, 6.0], references=[1.0, 2.0])
    assert math.isnan(result["spearman"])
    assert result["spearman_undefined"] == "all 2 predictions are equal (6)"
    rows = {"predictions": range(11), "references": range(11), "groups": ["a"] * 10 + ["b"]}
    result = load_metric("per_group_spearman").compute(**rows)
    assert (result["per_group_spearman"], result["per_group_spearman_num_defined_groups"]) == (1.0, 1)
    assert result["per_group_spearman_by_group"]["b"]["value_undefined"] == "1 row; at least 10 are needed"


def test_unknown_names_and_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="'spearmann': allowed are spearman"):
        load_metric("spearmann")
    with pytest.raises(ArgumentError, match="unknown argument 'treshold'"):
        load_metric("recall", treshold="3")
    with pytest.raises(TypeError, match="treshold"):
        load_metric("recall").compute(predictions=[1], references=[1], treshold=3)


def test_importing_the_package_and_scoring_rows_imports_nothing_heavy() -> None:
    heavy = ("torch", "scipy", "matplotlib", "datasets", "evaluate", "transformers")
    use = "from hf_ext.evaluation import judge, score_predictions, RidgeBaseline; score_predictions([1, 2], [1, 2])"
    code = f"import sys, hf_ext.reporting; {use}; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
