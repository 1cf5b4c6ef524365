"""Alarms: they ring on the failures that were really published, and stay quiet on sound predictions and labels."""

import json
import math

import numpy as np
import pytest
import torch

from hf_ext.errors import DataError
from hf_ext.evaluation import collapse_report, label_audit


def sound_pair(num_rows: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    measured = generator.normal(8, 1.5, num_rows)
    return measured + generator.normal(0, 0.7, num_rows), measured


def test_sound_predictions_raise_no_alarm():
    predicted, measured = sound_pair()
    report = collapse_report(predicted, measured)
    assert (report["alarms"], report["num_distinct"], report["looks_bfloat16"]) == ([], 2000, False)
    assert collapse_report(8 + 0.5 * (predicted - 8), measured)["alarms"] == []


def test_a_constant_model_is_called_one():
    report = collapse_report([6.0] * 40, np.linspace(4, 9, 40))
    assert report["alarms"][0] == "All 40 predictions are 6: the model is a constant."
    assert report["spread_ratio"] == 0.0
    assert collapse_report([6.0] * 3, [1, 2, 3])["alarms"] == ["All 3 predictions are 6."]


@pytest.mark.parametrize(
    ("broken", "alarm"),
    [
        (lambda values: np.where(np.arange(2000) < 700, 6.0, values), "35.0% of the predictions are exactly 6."),
        (lambda values: 8 + 0.05 * (values - 8), "The predictions spread 0.05"),
        (lambda values: 16 - values, "is no better than the 1.5"),
        (lambda values: torch.from_numpy(values).bfloat16().double().numpy(), "Every prediction is a bfloat16 number"),
    ],
)
def test_what_is_wrong_is_named(broken, alarm):
    predicted, measured = sound_pair()
    assert any(alarm in text for text in collapse_report(broken(predicted), measured)["alarms"])


def test_rows_that_are_not_finite_are_counted_and_left_out():
    report = collapse_report([1.0, math.nan, 3.0], [1.0, 2.0, math.inf])
    assert (report["n"], report["num_distinct"]) == (3, 1)
    assert report["alarms"] == [
        "1 of 3 predictions are NaN or infinite (first: row 1).",
        "1 of 3 references are NaN or infinite (first: row 2).",
    ]


def test_label_audit_by_hand():
    report = label_audit([6, 6, 7, 9], bounds=[-1, 0, 0, 1])
    shares = {"share_at_min": 0.5, "share_at_max": 0.25, "tied_share": 0.5, "most_frequent_share": 0.5}
    expected = {"n": 4, "min": 6, "max": 9, "mean": 7, "std": math.sqrt(1.5), "num_distinct": 3, "censored_share": 0.5}
    expected |= shares
    assert {key: report[key] for key in expected} == pytest.approx(expected)
    assert report["alarms"] == []  # too few rows to raise one
    with pytest.raises(DataError, match="1 predictions for 2 references"):
        label_audit([1, 2], bounds=[0])


def test_reports_are_strict_json():
    for report in (collapse_report(*sound_pair(50)), collapse_report([], []), label_audit([1, 2]), label_audit([])):
        assert json.loads(json.dumps(report, allow_nan=False)) == report
