"""A line mends what spreads too far, on rows that it was not fitted on; conformal intervals hold what they say."""

import math

import numpy as np
import pytest

from hf_ext.errors import ArgumentError, DataError
from hf_ext.evaluation.calibration import (
    LEVELS,
    apply_calibration,
    conformal_half_widths,
    cross_fit_calibration,
    fit_calibration,
)
from hf_ext.evaluation.metrics import rmse_at_limits
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.models.calibration import check_calibration
from hf_ext.models.prediction_intervals import least_units

NO_BETTER = "no better on rows that it was not fitted on"


def units_of(sizes) -> ResamplingUnits:
    return ResamplingUnits.of("heavy", np.repeat(np.arange(len(sizes)), sizes))


def spread_too_far(num_rows: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Predictions with three times the deviations of their labels from 8, and little noise."""
    generator = np.random.default_rng(0)
    labels = generator.normal(8, 1, num_rows)
    return 8 + 3 * (labels - 8) + generator.normal(0, 0.1, num_rows), labels


def test_a_line_by_hand():
    found = fit_calibration([0.0, 1.0, 2.0, 3.0] * 8, [1.0, 1.5, 2.0, 2.5] * 8).calibration
    assert found == {"kind": "line", "slope": pytest.approx(0.5), "intercept": pytest.approx(1.0)}
    assert apply_calibration([4.0], found)[0] == pytest.approx(3.0)


def test_what_spreads_too_far_is_mended_for_further_rows_too():
    predicted, labels = spread_too_far()
    fitted = fit_calibration(predicted[:100], labels[:100])
    mended = apply_calibration(predicted[100:], fitted.calibration)
    before, after = (np.sqrt(np.mean((each - labels[100:]) ** 2)) for each in (predicted[100:], mended))
    assert after < 0.1 * before
    assert fitted.rmse_after == pytest.approx(after, rel=0.3)  # cross-fitted: what further rows have


def test_of_two_predictors_that_both_know_something_both_have_a_weight():
    generator = np.random.default_rng(5)
    labels = generator.normal(8, 1, 200)
    halves = labels[:, None] + generator.normal(0, 0.5, (200, 2))
    fitted = fit_calibration(halves[:, 0], labels, ridge=halves[:, 1])
    assert min(fitted.calibration["slope"], fitted.calibration["ridge"]) > 0.2
    assert fitted.rmse_after < min(fitted.rmse_before, fitted.rmse_ridge)


def test_what_cannot_be_helped_is_left_with_a_reason():
    generator, rows = np.random.default_rng(3), np.arange(50.0)
    predicted = generator.normal(8, 1, 60)
    for given, labels, reason in (
        (predicted, predicted + generator.normal(0, 1, 60), NO_BETTER),
        (np.arange(29.0), 2 * np.arange(29.0), "fewer than 30 rows (29)"),
        (np.full(50, 3.0), rows, "all predictions are equal"),
        (rows, -rows, "labels do not rise with predictions"),
        (np.where(rows == 7, np.nan, rows), rows, "1 of 50 predictions are NaN or infinite (first: row 7)"),
    ):
        fitted = fit_calibration(given, labels)
        assert (fitted.calibration, fitted.reason) == (None, reason)


def test_a_group_is_never_cut_in_two_and_ten_are_needed():
    # Twelve antibodies, each with a level of its own that says nothing of the next one's: rows alone would calibrate.
    generator = np.random.default_rng(7)
    predicted = np.repeat(generator.normal(0, 1, 12), 40) + generator.normal(0, 0.01, 480)
    levels = np.repeat(generator.normal(0, 1, 12), 40)
    assert fit_calibration(predicted, levels).calibration
    assert fit_calibration(predicted, levels, units=units_of([40] * 12)).reason == NO_BETTER
    predicted, labels = spread_too_far()
    nine, ten = (ResamplingUnits.of("antibody", np.arange(200) % num) for num in (9, 10))
    assert "fewer than 10 values of antibody (9)" in fit_calibration(predicted, labels, units=nine).reason
    assert fit_calibration(predicted, labels, units=ten).calibration


def test_a_limit_is_no_exact_label():
    generator = np.random.default_rng(0)
    predicted = generator.uniform(4, 10, 200)
    truth = 2 + 0.5 * predicted
    labels, sides = np.where(predicted > 8, 20.0, truth), np.where(predicted > 8, -1, 0)  # at or below 20
    assert fit_calibration(predicted, labels, bounds=sides).calibration["slope"] == pytest.approx(0.5)
    assert fit_calibration(predicted, labels).calibration["slope"] > 1  # the broken twin
    assert rmse_at_limits(np.array([1.0, 9.0, 4.0, 7.0]), np.full(4, 5.0), np.array([-1.0, 1, 0, -1])) == math.sqrt(
        5 / 4
    )
    few = fit_calibration(predicted, labels, bounds=np.where(np.arange(200) < 20, 0, -1)).reason
    assert few == "fewer than 30 rows with exact labels (20)"


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_cross_fitted_predictions_have_the_error_that_the_fit_reported(stacks, bounded):
    generator = np.random.default_rng(3)
    labels = generator.normal(size=1200)
    groups = ResamplingUnits.of("heavy", np.arange(1200) // 40)
    shared = generator.normal(0, 0.5, groups.num_units)[groups.unit_of_row]
    predictions = 2 * labels + shared + generator.normal(0, 0.5, 1200)
    beside = labels + generator.normal(0, 0.6, 1200) if stacks else None
    sides = np.where(labels < -1, -1, 0) if bounded else np.zeros(1200)
    options = {"ridge": beside, "bounds": sides, "units": groups, "seed": 2}
    fitted = fit_calibration(predictions, labels, **options)
    assert ("ridge" in fitted.calibration) is stacks
    mended = cross_fit_calibration(predictions, labels, fitted.calibration, **options)
    assert rmse_at_limits(mended, labels, sides) == pytest.approx(fitted.rmse_after, rel=1e-12)
    by_row = cross_fit_calibration(predictions, labels, fitted.calibration, **{**options, "units": None})
    assert rmse_at_limits(by_row, labels, sides) != pytest.approx(fitted.rmse_after, rel=1e-6)
    np.testing.assert_array_equal(cross_fit_calibration(predictions, labels, None), predictions)


def test_a_stored_calibration_that_could_not_be_applied_is_refused():
    for stored, message in (
        ({"kind": "isotonic"}, "needs a kind, which is line"),
        ("line", "needs a kind"),
        ({"kind": "line", "slope": -1.0, "intercept": 0.0}, "reverse the order"),
        ({"kind": "line", "slope": 1.0}, "every number must be finite"),
        ({"kind": "line", "slope": math.inf, "intercept": 0.0}, "every number must be finite"),
    ):
        with pytest.raises(ArgumentError, match=message):
            check_calibration(stored)
    with pytest.raises(DataError, match="units of 2 rows for 3 rows"):
        fit_calibration([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], units=units_of([2]))
    with pytest.raises(DataError, match="3 predictions for 2 references"):
        fit_calibration([1.0, 2.0, 3.0], [1.0, 2.0])


# --- prediction intervals -------------------------------------------------------------------------------------------


def test_of_nine_rows_ninety_percent_is_the_largest_and_more_cannot_be_had():
    residuals = [3.0, -1.0, 2.0, -9.0, 4.0, 5.0, -8.0, 6.0, 7.0]
    widths = conformal_half_widths(residuals, (0.1, 0.5, 0.51, 0.9, 0.91))
    # ceil((9 + 1) level): the 1st, the 5th, the 6th, the 9th, and a tenth that is not there.
    assert widths.tolist() == [1.0, 5.0, 6.0, 9.0, np.inf]
    assert [least_units(level) for level in (0.5, 0.9, 0.91, 0.95, 0.99, 0.999)] == [1, 9, 11, 19, 99, 999]
    with pytest.raises(DataError, match="1 of 2 residuals are NaN or infinite"):
        conformal_half_widths([1.0, np.nan])


def test_the_rank_is_exact_for_every_level_and_number_of_rows():
    """Sums of weights are rounded, and must not move a level to the next row."""
    for num_rows in (1, 9, 10, 19, 57, 99, 999, 1234):
        exact = [-(-(num_rows + 1) * round(1000 * level) // 1000) for level in LEVELS]
        expected = [float(rank) if rank <= num_rows else np.inf for rank in exact]
        assert conformal_half_widths(np.arange(1, num_rows + 1.0)).tolist() == expected


def test_a_unit_weighs_as_one_however_many_rows_it_has():
    """A tenth of its weight for each of ten rows, among three units and the one to come: 1/40; single rows 1/4."""
    residuals = np.append(np.arange(1.0, 11.0), [20.0, 30.0])
    widths = conformal_half_widths(residuals, (0.025, 0.1, 0.25, 0.5, 0.75, 0.76), units=units_of([10, 1, 1]))
    assert widths.tolist() == [1.0, 4.0, 10.0, 20.0, 30.0, np.inf]
    rows = conformal_half_widths(residuals, (0.5, 0.9), units=units_of([1] * 12))
    assert rows.tolist() == [7.0, 30.0]  # ceil(13 * 0.5) and ceil(13 * 0.9)


def held_share(draw, half_width, num_trials: int = 3000) -> float:
    """How often the residual of one further row is within the half width from those before it."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(num_trials):
        residuals, units, further = draw(generator)
        held += abs(further) <= half_width(residuals, units)
    return held / num_trials


def at(level: float, by_unit: bool = True):
    return lambda residuals, units: conformal_half_widths(residuals, (level,), units=units if by_unit else None)[0]


def draw_rows(generator):
    """Twelve independent errors of heavy tails, and one more."""
    errors = generator.standard_t(3, size=13)
    return errors[:-1], None, errors[-1]


def draw_units(generator):
    """Most of an error is its unit's; 30 units have 1 to 60 rows, large ones are better known. One more is new."""
    sizes = np.minimum(generator.geometric(1 / 15, 31), 60)
    shared = generator.normal(size=31) * np.where(sizes > 15, 0.6, 1.0)
    units = units_of(sizes[:-1])
    errors = shared[units.unit_of_row] + 0.4 * generator.normal(size=len(units.unit_of_row))
    return errors, units, shared[-1] + 0.4 * generator.normal()


MARGIN = 0.017  # three standard errors of a share near 0.9 over 3,000 trials


def test_intervals_hold_their_level_for_a_further_row_and_for_one_of_a_new_unit_and_their_broken_twins_do_not():
    assert 0.9 - MARGIN < held_share(draw_rows, at(0.9)) < 0.9 + 1 / 13 + MARGIN
    plain = held_share(draw_rows, lambda residuals, _: np.quantile(np.abs(residuals), 0.9, method="linear"))
    assert plain < 0.9 - 2 * MARGIN  # as if the further row were none
    assert 0.9 - MARGIN < held_share(draw_units, at(0.9)) < 0.9 + 1 / 31 + MARGIN
    assert held_share(draw_units, at(0.9, by_unit=False)) < 0.9 - 1.5 * MARGIN  # as if rows were independent
