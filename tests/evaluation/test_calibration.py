"""A calibration mends what spreads too far, on rows that it was not fitted on, and never turns an order around."""

import math

import numpy as np
import pytest
import torch

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.calibration import apply_calibration, cross_fit_calibration, fit_calibration
from hf_ext.evaluation.metrics import rmse_at_limits, value_of
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.models.postprocess import calibrate


def spread_too_far(num=200, slope=3.0, noise=0.5, seed=0):
    """Predictions that are `slope` times as far from 8 as their labels are, and noisy."""
    generator = np.random.default_rng(seed)
    labels = generator.normal(8, 1, num)
    return 8 + slope * (labels - 8) + generator.normal(0, noise, num), labels


def test_a_line_is_the_least_squares_line() -> None:
    found = fit_calibration([0.0, 1.0, 2.0, 3.0] * 8, [1.0, 1.5, 2.0, 2.5] * 8).calibration
    assert found == pytest.approx({"kind": "line", "slope": 0.5, "intercept": 1.0})


def test_predictions_that_spread_too_far_have_a_lower_error_on_further_rows_and_the_same_order() -> None:
    fitted = fit_calibration(*spread_too_far())
    predicted, labels = spread_too_far(num=500, seed=1)
    mended = apply_calibration(predicted, fitted.calibration)
    before, after = (math.sqrt(np.mean((each - labels) ** 2)) for each in (predicted, mended))
    assert after < 0.1 * before
    assert fitted.rmse_after == pytest.approx(after, rel=0.2)  # cross-fitted: what further rows have
    assert value_of("spearman", mended, labels) == value_of("spearman", predicted, labels)


def test_a_ridge_that_is_right_is_taken_as_it_is_where_weights_fitted_on_few_rows_only_add_noise() -> None:
    generator = np.random.default_rng(5)
    truth = generator.normal(8, 1, 40)
    labels = truth + generator.normal(0, 0.3, 40)
    fitted = fit_calibration(truth + generator.normal(0, 1.5, 40), labels, ridge=truth)
    assert fitted.calibration == {"kind": "line", "slope": 0.0, "intercept": 0.0, "ridge": 1.0}
    assert fitted.rmse_after == fitted.rmse_ridge  # nothing was fitted, so nothing is lost on further rows
    np.testing.assert_array_equal(cross_fit_calibration(truth - 1, labels, fitted.calibration, ridge=truth), truth)
    halves = truth[:, None] + generator.normal(0, 0.5, (40, 2))  # the innocent twin: both know something
    both = fit_calibration(halves[:, 0], labels, ridge=halves[:, 1]).calibration
    assert both["slope"] > 0.2
    assert both["ridge"] > 0.2


def test_what_is_calibrated_already_stays_as_it_is() -> None:
    generator = np.random.default_rng(3)
    predicted = generator.normal(8, 1, 60)
    fitted = fit_calibration(predicted, predicted + generator.normal(0, 1, 60))
    assert fitted.calibration is None
    assert fitted.reason == "no better on rows that it was not fitted on"
    assert fitted.rmse_after >= fitted.rmse_before


@pytest.mark.parametrize(
    ("predicted", "labels", "reason"),
    [
        (np.arange(29.0), 2 * np.arange(29.0), "fewer than 30 rows (29)"),
        (np.full(50, 3.0), np.arange(50.0), "all predictions are equal"),
        (np.arange(50.0), -np.arange(50.0), "labels do not rise with predictions"),
        (np.where(np.arange(50) == 7, np.nan, np.arange(50.0)), np.arange(50.0), "1 of 50 predictions are NaN"),
    ],
)
def test_what_cannot_be_fitted_is_left_with_a_reason(predicted, labels, reason) -> None:
    fitted = fit_calibration(predicted, labels)
    assert fitted.calibration is None
    assert reason in fitted.reason


def test_a_group_is_never_cut_in_two() -> None:
    # Twelve antibodies, each with a level of its own that says nothing of the next one's: rows alone would calibrate.
    generator = np.random.default_rng(7)
    groups = np.repeat([f"ab{i}" for i in range(12)], 40)
    predicted = np.repeat(generator.normal(0, 1, 12), 40) + generator.normal(0, 0.01, 480)
    levels = np.repeat(generator.normal(0, 1, 12), 40)
    assert fit_calibration(predicted, levels).calibration
    units = ResamplingUnits.of("antibody", groups)
    assert fit_calibration(predicted, levels, units=units).reason == "no better on rows that it was not fitted on"


def test_ten_groups_are_needed_however_many_rows_there_are() -> None:
    predicted, labels = spread_too_far()
    nine, ten = (ResamplingUnits.of("antibody", np.arange(200) % num) for num in (9, 10))
    assert "fewer than 10 values of antibody (9)" in fit_calibration(predicted, labels, units=nine).reason
    assert fit_calibration(predicted, labels, units=ten).calibration


def test_limits_are_fitted_as_limits() -> None:
    generator = np.random.default_rng(0)
    predicted = generator.uniform(4, 10, 2000)
    truth = 2 + 0.5 * predicted + generator.normal(0, 0.3, 2000)
    labels, sides = np.maximum(truth, 5.0), np.where(truth < 5.0, -1, 0)
    aware = fit_calibration(predicted, labels, bounds=sides).calibration
    unaware = fit_calibration(predicted, labels).calibration
    assert (aware["slope"], aware["intercept"]) == pytest.approx((0.5, 2.0), abs=0.05)
    assert abs(unaware["slope"] - 0.5) > 0.05  # the broken twin


def test_an_isotonic_fit_follows_a_curve_that_no_line_does() -> None:
    generator = np.random.default_rng(0)
    predicted = generator.uniform(-3, 3, 3000)
    labels = np.tanh(2 * predicted) + generator.normal(0, 0.1, 3000)
    curve, line = (fit_calibration(predicted, labels, kind=kind) for kind in ("isotonic", "line"))
    assert curve.calibration["kind"] == "isotonic"
    assert curve.rmse_after < 0.12 < 0.2 < line.rmse_after
    assert fit_calibration(predicted[:999], labels[:999], kind="isotonic").calibration["kind"] == "line"


def test_an_isotonic_fit_is_applied_straight_in_between_and_constant_beyond() -> None:
    steps = {"kind": "isotonic", "x": [0.0, 1.0, 3.0], "y": [1.0, 1.0, 5.0]}
    assert apply_calibration([-9.0, 0.5, 2.0, 3.0, 9.0], steps).tolist() == [1.0, 1.0, 3.0, 5.0, 5.0]
    assert calibrate(torch.tensor([[2.0], [0.0]]), steps).tolist() == [[3.0], [1.0]]


def test_beyond_a_limit_there_is_no_error() -> None:
    sides = np.array([-1.0, 1.0, 0.0, -1.0])
    assert rmse_at_limits(np.array([1.0, 9.0, 4.0, 7.0]), np.full(4, 5.0), sides) == math.sqrt((1 + 4) / 4)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="allowed are line, isotonic"):
        fit_calibration([1.0], [1.0], kind="spline")
    with pytest.raises(ArgumentError, match="use 'line'"):
        fit_calibration([1.0, 2.0], [1.0, 2.0], kind="isotonic", bounds=[0, 1])
    with pytest.raises(DataError, match="units of 2 rows for 3 rows"):
        fit_calibration([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], units=ResamplingUnits.of("antibody", ["a", "b"]))
    with pytest.raises(DataError, match="3 predictions for 2 references"):
        fit_calibration([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("kind", "bounded"), [("line", False), ("isotonic", False), ("stack", False), ("line", True), ("stack", True)]
)
def test_cross_fitted_predictions_have_the_error_that_the_fit_reported(kind, bounded):
    generator = np.random.default_rng(3)
    labels = generator.normal(size=1200)
    groups = ResamplingUnits.of("heavy", np.arange(1200) // 40)
    shared = generator.normal(0, 0.5, groups.num_units)[groups.unit_of_row]
    predictions = 2 * labels + shared + generator.normal(0, 0.5, 1200)
    beside = labels + generator.normal(0, 0.6, 1200) if kind == "stack" else None
    sides = np.where(labels < -1, -1, 0) if bounded else np.zeros(1200)
    options = {"ridge": beside, "bounds": sides, "units": groups, "seed": 2}
    fitted = fit_calibration(predictions, labels, kind="isotonic" if kind == "isotonic" else "line", **options)
    assert fitted.calibration is not None
    mended = cross_fit_calibration(predictions, labels, fitted.calibration, **options)
    assert rmse_at_limits(mended, labels, sides) == pytest.approx(fitted.rmse_after, rel=1e-12)
    by_row = cross_fit_calibration(predictions, labels, fitted.calibration, **{**options, "units": None})
    assert rmse_at_limits(by_row, labels, sides) != pytest.approx(fitted.rmse_after, rel=1e-6)
    np.testing.assert_array_equal(cross_fit_calibration(predictions, labels, None), predictions)
