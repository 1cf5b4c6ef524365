import numpy as np
import pytest

from hf_ext.data.placeholders import find_placeholders


def rows_refused(labels, bounds=None):
    given = np.array(labels, dtype=np.float64)
    sides = np.zeros(len(given), dtype=np.int8) if bounds is None else np.array(bounds)
    return [one.row for one in find_placeholders(given, sides, "pKd", range(2, 2 + len(given)), labels)]


@pytest.mark.parametrize(
    ("labels", "rows"),
    [
        ([7.1, 8.2, 6.5, -999], [5]),
        ([7.1, 8.2, 6.5, 99], [5]),
        ([7.1, 8.2, 6.5, 9999.0, -99], [5, 6]),
        ([0.0, 20000.0, 15.0, -999], [5]),  # no concentration is negative
        ([-3.0, 2.5, 0.1, -99], [5]),
        ([0.1, 12.0, 40.0, 999], []),  # Kd in nM: 999 may be measured
        ([-90.0, 80.0, 10.0, -99], []),  # in the range of its neighbours
        ([-3.0, 2.5, 0.1, 9], []),  # a single 9 is a label as any
        ([7.1, 8.2, 6.5, -998], []),  # nobody writes that for missing: the audit looks at it
        ([7.1, 8.2, -999], []),  # two labels say little about where labels lie
        ([7.1, float("nan"), 8.2, 6.5, -999], [6]),
    ],
)
def test_nines_are_refused_where_they_cannot_be_measured(labels, rows):
    assert rows_refused(labels) == rows


def test_a_marked_limit_is_no_placeholder():
    assert rows_refused([7.1, 8.2, 6.5, 99], [0, 0, 0, 1]) == []


def test_the_problem_names_row_column_range_and_remedy():
    labels = np.array([7.1, 8.2, 6.5, -999.0])
    (problem,) = find_placeholders(labels, np.zeros(4), "pKd", [2, 3, 4, 9], ["7.1", "8.2", "6.5", " -999 "])
    assert (problem.row, problem.column, problem.value) == (9, "pKd", "-999")
    assert problem.rule == "the label reads as a missing value, all others lie between 6.5 and 8.2"
    assert problem.remedy.startswith("Leave the row out")
