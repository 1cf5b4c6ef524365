"""Conformal intervals hold what their level says, by row and by unit; without either of two corrections they do not."""

from __future__ import annotations

import numpy as np
import pytest

from hf_ext.errors import DataError
from hf_ext.evaluation.conformal import LEVELS, conformal_half_widths, measure_coverage
from hf_ext.evaluation.resampling import ResamplingUnits
from hf_ext.models.postprocess import least_units


def units_of(sizes) -> ResamplingUnits:
    return ResamplingUnits.of("heavy", np.repeat(np.arange(len(sizes)), sizes))


def test_of_nine_rows_ninety_percent_is_the_largest_and_more_cannot_be_had():
    residuals = [3.0, -1.0, 2.0, -9.0, 4.0, 5.0, -8.0, 6.0, 7.0]
    widths = conformal_half_widths(residuals, (0.1, 0.5, 0.51, 0.9, 0.91))
    # ceil((9 + 1) level): the 1st, the 5th, the 6th, the 9th, and a tenth that is not there.
    assert widths.tolist() == [1.0, 5.0, 6.0, 9.0, np.inf]
    assert [least_units(level) for level in (0.5, 0.9, 0.91, 0.95, 0.99, 0.999)] == [1, 9, 11, 19, 99, 999]


@pytest.mark.parametrize("num_rows", [1, 9, 10, 19, 57, 99, 999, 1234])
def test_the_rank_is_exact_for_every_level_and_number_of_rows(num_rows):
    """Sums of weights are rounded, and must not move a level to the next row."""
    exact = [-(-(num_rows + 1) * round(1000 * level) // 1000) for level in LEVELS]
    expected = [float(rank) if rank <= num_rows else np.inf for rank in exact]
    assert conformal_half_widths(np.arange(1, num_rows + 1.0)).tolist() == expected


def test_a_unit_weighs_as_one_however_many_rows_it_has():
    """A tenth of its weight for each of ten rows, among three units and the one to come: 1/40; single rows 1/4."""
    units = units_of([10, 1, 1])
    residuals = np.append(np.arange(1.0, 11.0), [20.0, 30.0])
    widths = conformal_half_widths(residuals, (0.025, 0.1, 0.25, 0.5, 0.75, 0.76), units=units)
    assert widths.tolist() == [1.0, 4.0, 10.0, 20.0, 30.0, np.inf]
    rows = conformal_half_widths(residuals, (0.5, 0.9), units=None)
    assert rows.tolist() == [7.0, 30.0]  # ceil(13 * 0.5) and ceil(13 * 0.9)


def test_units_of_one_row_each_are_rows():
    residuals = np.random.default_rng(0).normal(size=30)
    rows = conformal_half_widths(residuals)
    assert np.array_equal(conformal_half_widths(residuals, units=units_of([1] * 30)), rows)


def test_what_is_not_finite_is_refused():
    with pytest.raises(DataError, match="1 of 2 residuals are NaN or infinite"):
        conformal_half_widths([1.0, np.nan])
    with pytest.raises(DataError, match="units of 3 rows for 2 rows"):
        conformal_half_widths([1.0, 2.0], units=units_of([3]))


def held_share(draw, half_width, num_trials: int = 3000) -> float:
    """How often the residual of one further row is within the half width from those before it."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(num_trials):
        residuals, units, further = draw(generator)
        held += abs(further) <= half_width(residuals, units)
    return held / num_trials


def at(level: float, by_unit: bool = True):
    return lambda residuals, units: conformal_half_widths(residuals, (level,), units=units if by_unit else None)[0]


def draw_rows(num_rows: int):
    """Independent errors of heavy tails."""

    def draw(generator):
        errors = generator.standard_t(3, size=num_rows + 1)
        return errors[:-1], None, errors[-1]

    return draw


def draw_units(num_units: int):
    """Most of an error is its unit's; units have 1 to 60 rows, large ones are better known. The further one is new."""

    def draw(generator):
        sizes = np.minimum(generator.geometric(1 / 15, num_units + 1), 60)
        shared = generator.normal(size=num_units + 1) * np.where(sizes > 15, 0.6, 1.0)
        units = units_of(sizes[:-1])
        errors = shared[units.unit_of_row] + 0.4 * generator.normal(size=len(units.unit_of_row))
        return errors, units, shared[-1] + 0.4 * generator.normal()

    return draw


# Three standard errors of a share near 0.9 over 3,000 trials.
MARGIN = 0.017


@pytest.mark.parametrize(("num_rows", "level"), [(9, 0.9), (25, 0.8), (200, 0.9)])
def test_intervals_of_independent_rows_hold_their_level_and_are_not_wider_than_needed(num_rows, level):
    share = held_share(draw_rows(num_rows), at(level))
    assert level - MARGIN < share < level + 1 / (num_rows + 1) + MARGIN


def test_without_the_row_to_come_few_rows_hold_too_little():
    """The broken twin: the empirical quantile, as if the further row were none."""
    share = held_share(draw_rows(9), lambda residuals, _: np.quantile(np.abs(residuals), 0.9, method="higher"))
    assert share > 0.88  # 9 of 9 is the same rank
    share = held_share(draw_rows(12), lambda residuals, _: np.quantile(np.abs(residuals), 0.9, method="linear"))
    assert share < 0.9 - 2 * MARGIN
    assert held_share(draw_rows(12), at(0.9)) > 0.9 - MARGIN


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("num_units", "level"), [(9, 0.9), (30, 0.8), (30, 0.9)])
def test_intervals_by_unit_hold_their_level_for_a_row_of_a_new_unit(num_units, level):
    share = held_share(draw_units(num_units), at(level))
    assert level - MARGIN < share < level + 1 / (num_units + 1) + MARGIN


@pytest.mark.parametrize("num_units", [9, 30])
def test_intervals_by_row_of_grouped_data_hold_too_little(num_units):
    """The broken twin: the same rows as if they were independent."""
    assert held_share(draw_units(num_units), at(0.9, by_unit=False)) < 0.9 - 1.5 * MARGIN


def test_coverage_of_rows_has_wilsons_interval():
    """8 of 10: (0.8 + z2 / 20) / (1 + z2 / 10) and so on, with t of 9 degrees of freedom, 2.262, as z."""
    found = measure_coverage(np.arange(10) < 8)
    assert (found.value, found.num_rows, found.num_units, found.mean_of_units) == (0.8, 10, None, None)
    assert (found.low, found.high) == (pytest.approx(0.4445, abs=1e-4), pytest.approx(0.9524, abs=1e-4))


def test_coverage_says_rows_and_units_apart_and_never_leaves_0_to_1():
    units = units_of([8, 1, 1])
    found = measure_coverage(np.arange(10) < 8, units=units)
    assert (found.value, found.mean_of_units, found.num_units) == (0.8, pytest.approx(1 / 3), 3)
    everything = measure_coverage(np.ones(10, bool), units=units_of([2] * 5))
    assert everything.low is not None
    assert (everything.value, everything.high) == (1.0, 1.0)
    assert 0.3 < everything.low < 0.5  # five units that agree are five rows: 1 / (1 + 2.776 ** 2 / 5)
    one = measure_coverage(np.ones(4, bool), units=units_of([4]))
    assert (one.low, one.high) == (None, None)


def test_the_interval_of_a_coverage_holds_it_where_rows_come_in_units_and_by_row_it_does_not():
    generator = np.random.default_rng(1)
    held = {"units": 0, "rows": 0}
    for _ in range(1000):
        chance = generator.beta(4.5, 0.5, size=30)  # of a row to be held: 0.9, by unit
        units = units_of(generator.integers(5, 25, 30))
        rows = generator.random(len(units.unit_of_row)) < chance[units.unit_of_row]
        for name, by in (("units", units), ("rows", None)):
            found = measure_coverage(rows, units=by)
            held[name] += found.low <= 0.9 <= found.high
    assert 930 <= held["units"] <= 985
    assert held["rows"] < 850
