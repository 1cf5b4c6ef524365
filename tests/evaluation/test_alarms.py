"""Guards: they ring on the failures that were really published, and stay quiet on sound predictions and labels."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from hf_ext.errors import DataError
from hf_ext.evaluation import collapse_report, format_report, label_audit


def sound_pair(num_rows: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    measured = generator.normal(8, 1.5, num_rows)
    return measured + generator.normal(0, 0.7, num_rows), measured


def alarm_with(report: dict[str, list[str]], words: str) -> bool:
    return any(words in alarm for alarm in report["alarms"])


def test_sound_predictions_raise_no_alarm() -> None:
    report = collapse_report(*sound_pair())
    assert report["alarms"] == []
    assert report["num_distinct"] == report["n"] == 2000
    assert report["looks_bfloat16"] is False


def test_nine_values_in_23961_rows_are_reported_as_such() -> None:
    _, measured = sound_pair(23961)
    report = collapse_report(np.resize(np.arange(9) * 0.03125 + 7.03125, 23961), measured)
    assert report["num_distinct"] == 9
    assert alarm_with(report, "9 distinct values in 23,961 predictions (the references have 23,961).")
    assert alarm_with(report, "close to a constant")
    assert alarm_with(report, "bfloat16")
    assert alarm_with(report, "no better than")


def test_numbers_by_hand() -> None:
    # predictions deviate 1 from 2 (std 1), references 2 from 2 (std 2); errors 1, -1, 1, -1
    report = collapse_report([1, 3, 1, 3], [0, 4, 0, 4])
    assert (report["prediction_std"], report["reference_std"], report["spread_ratio"]) == (1.0, 2.0, 0.5)
    assert (report["rmse"], report["constant_rmse"]) == (1.0, 2.0)
    assert (report["distinct_share"], report["most_frequent_value"], report["most_frequent_share"]) == (0.5, 1.0, 0.5)


def test_a_constant_model_is_called_one() -> None:
    report = collapse_report([6.0] * 40, np.linspace(4, 9, 40))
    assert report["alarms"][0] == "All 40 predictions are 6: the model is a constant."
    assert report["spread_ratio"] == 0.0
    assert collapse_report([6.0] * 3, [1, 2, 3])["alarms"] == ["All 3 predictions are 6."]


def test_a_third_of_predictions_at_one_value_is_an_alarm() -> None:
    predicted, measured = sound_pair(300)
    predicted[:110] = 6.0
    assert "36.7% of the predictions are exactly 6." in collapse_report(predicted, measured)["alarms"]


def test_predictions_that_barely_move_are_an_alarm_and_half_the_spread_is_not() -> None:
    predicted, measured = sound_pair()
    assert alarm_with(collapse_report(8 + 0.05 * (measured - 8), measured), "spread 0.050 times")
    assert collapse_report(8 + 0.5 * (predicted - 8), measured)["alarms"] == []


def test_worse_than_the_mean_is_an_alarm() -> None:
    predicted, measured = sound_pair()
    assert alarm_with(collapse_report(16 - predicted, measured), "no better than")


def looks_bfloat16(values: np.ndarray) -> bool | None:
    return collapse_report(values, np.zeros(len(values)))["looks_bfloat16"]


def test_bfloat16_rounding_is_recognised_and_float16_rounding_is_not() -> None:
    values = torch.from_numpy(sound_pair()[0])
    assert looks_bfloat16(values.bfloat16().double().numpy()) is True
    assert looks_bfloat16(values.half().double().numpy()) is False
    assert looks_bfloat16(values.float().double().numpy()) is False


def test_few_or_simple_values_prove_nothing_about_bfloat16() -> None:
    assert looks_bfloat16(np.full(29, 7.03125)) is None
    assert looks_bfloat16(np.resize([6.0, 6.5, 7.25], 100)) is None


def test_rows_that_are_not_finite_are_counted_and_left_out() -> None:
    report = collapse_report([1.0, math.nan, 3.0], [1.0, 2.0, math.inf])
    assert (report["n"], report["num_not_finite"], report["num_distinct"]) == (3, 2, 1)
    assert report["alarms"] == [
        "1 of 3 predictions are NaN or infinite (first: row 1).",
        "1 of 3 references are NaN or infinite (first: row 2).",
    ]


def test_label_audit_by_hand() -> None:
    report = label_audit([6, 6, 7, 9], bounds=[-1, 0, 0, 1])
    expected = {
        "n": 4,
        "min": 6.0,
        "max": 9.0,
        "mean": 7.0,
        "std": math.sqrt(1.5),
        "num_distinct": 3,
        "tied_share": 0.5,
        "most_frequent_value": 6.0,
        "most_frequent_share": 0.5,
        "share_at_min": 0.5,
        "share_at_max": 0.25,
        "censored_share": 0.5,
        "censored_below_share": 0.25,
        "censored_above_share": 0.25,
    }
    assert {key: report[key] for key in expected} == pytest.approx(expected)
    assert report["alarms"] == []  # too few rows to raise one


def test_a_floor_block_is_suspected_unless_its_rows_are_marked_as_censored() -> None:
    labels = np.concatenate([np.full(30, 7.0), np.linspace(7.1, 11, 70)])
    report = label_audit(labels)
    assert len(report["alarms"]) == 1
    assert report["alarms"][0].startswith(
        "30.0% of the labels (30 of 100) are exactly 7, the lowest value, and not marked"
    )
    assert label_audit(labels, bounds=[-1] * 30 + [0] * 70)["alarms"] == []


def test_a_ceiling_block_is_suspected_too() -> None:
    labels = np.concatenate([np.full(5, 12.0), np.linspace(7.1, 11, 95)])
    assert alarm_with(label_audit(labels), "exactly 12, the highest value")
    assert label_audit(labels[1:])["alarms"] == []  # 4 of 99 is below 5 %


def test_labels_that_teach_nothing_are_named() -> None:
    assert label_audit([6.0] * 40)["alarms"] == ["All 40 labels are 6: there is nothing to learn."]
    assert label_audit([])["alarms"] == ["There are no labels."]
    assert label_audit([math.nan])["alarms"] == [
        "1 of 1 labels are NaN or infinite (first: row 0).",
        "There are no labels.",
    ]


def test_bounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="1 bounds for 2 labels"):
        label_audit([1, 2], bounds=[0])
    with pytest.raises(DataError, match="bounds, row 1: 2 given"):
        label_audit([1, 2], bounds=[0, 2])


def test_reports_are_strict_json() -> None:
    for report in (collapse_report(*sound_pair(50)), collapse_report([], []), label_audit([1, 2]), label_audit([])):
        assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_printed_lines_hold_every_number_and_every_alarm() -> None:
    lines = format_report(collapse_report([6.0] * 40, np.linspace(4, 9, 40)), "Test split")
    assert lines[0] == "Test split"
    assert "  n                    40" in lines
    assert "  most frequent share  100 %" in lines
    assert "  looks bfloat16       undefined" in lines
    assert lines[-2].startswith("  ALARM: All 40 predictions are 6")
    assert format_report(label_audit([1, 2]))[-1] == "  no alarms"
