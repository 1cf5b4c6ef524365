"""Conformal intervals hold what they say, for a further row and for one of a further group."""

import numpy as np
import pytest
from inside import conformal_half_widths

from hf_ext.errors import DataError
from hf_ext.evaluation import ResamplingGroups
from hf_ext.heads.intervals import least_groups

pytestmark = pytest.mark.internals


def groups_of(sizes) -> ResamplingGroups:
    return ResamplingGroups.of("heavy", np.repeat(np.arange(len(sizes)), sizes))


def test_of_nine_rows_ninety_percent_is_the_largest_and_more_cannot_be_had():
    residuals = [3.0, -1.0, 2.0, -9.0, 4.0, 5.0, -8.0, 6.0, 7.0]
    widths = conformal_half_widths(residuals, (0.1, 0.5, 0.51, 0.9, 0.91))
    # ceil((9 + 1) level): the 1st, the 5th, the 6th, the 9th, and a tenth that is not there.
    assert widths.tolist() == [1.0, 5.0, 6.0, 9.0, np.inf]
    assert [least_groups(level) for level in (0.5, 0.9, 0.91, 0.95, 0.99, 0.999)] == [1, 9, 11, 19, 99, 999]
    with pytest.raises(DataError, match="1 of 2 residuals are NaN or infinite"):
        conformal_half_widths([1.0, np.nan])


def test_a_group_weighs_as_one_however_many_rows_it_has():
    """A tenth of its weight for each of ten rows, among three groups and the one to come: 1/40; single rows 1/4."""
    residuals = np.append(np.arange(1.0, 11.0), [20.0, 30.0])
    widths = conformal_half_widths(residuals, (0.025, 0.1, 0.25, 0.5, 0.75, 0.76), groups=groups_of([10, 1, 1]))
    assert widths.tolist() == [1.0, 4.0, 10.0, 20.0, 30.0, np.inf]
    rows = conformal_half_widths(residuals, (0.5, 0.9), groups=groups_of([1] * 12))
    assert rows.tolist() == [7.0, 30.0]  # ceil(13 * 0.5) and ceil(13 * 0.9)


def held_share(draw, half_width, num_trials: int = 3000) -> float:
    """How often the residual of one further row is within the half width from those before it."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(num_trials):
        residuals, groups, further = draw(generator)
        held += abs(further) <= half_width(residuals, groups)
    return held / num_trials


def at(level: float, by_group: bool = True):
    return lambda residuals, groups: conformal_half_widths(residuals, (level,), groups=groups if by_group else None)[0]


def draw_rows(generator):
    """Twelve independent errors of heavy tails, and one more."""
    errors = generator.standard_t(3, size=13)
    return errors[:-1], None, errors[-1]


def draw_groups(generator):
    """Most of an error is its group's; 30 groups have 1 to 60 rows, large ones are better known. One more is new."""
    sizes = np.minimum(generator.geometric(1 / 15, 31), 60)
    shared = generator.normal(size=31) * np.where(sizes > 15, 0.6, 1.0)
    groups = groups_of(sizes[:-1])
    errors = shared[groups.group_of_row] + 0.4 * generator.normal(size=len(groups.group_of_row))
    return errors, groups, shared[-1] + 0.4 * generator.normal()


MARGIN = 0.017  # three standard errors of a share near 0.9 over 3,000 trials


@pytest.mark.nightly
def test_intervals_hold_their_level_for_a_further_row_and_for_one_of_a_new_group_and_their_broken_twins_do_not():
    assert 0.9 - MARGIN < held_share(draw_rows, at(0.9)) < 0.9 + 1 / 13 + MARGIN
    plain = held_share(draw_rows, lambda residuals, _: np.quantile(np.abs(residuals), 0.9, method="linear"))
    assert plain < 0.9 - 2 * MARGIN  # as if the further row were none
    assert 0.9 - MARGIN < held_share(draw_groups, at(0.9)) < 0.9 + 1 / 31 + MARGIN
    assert held_share(draw_groups, at(0.9, by_group=False)) < 0.9 - 1.5 * MARGIN  # as if rows were independent
