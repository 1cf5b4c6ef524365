import math

import numpy as np
import pytest

from hf_ext.data.labels import parse_labels


def rules_of(values, **kwargs):
    return [p.rule for p in parse_labels(values, "pKd", range(2, 2 + len(values)), **kwargs).problems]


def test_numbers_and_signs_become_values_and_bounds():
    parsed = parse_labels(["7.3", "<=7", "> 10.5", "<-2", "=4", 8, " 1e-3 ", ">=9"], "pKd", range(2, 10))
    assert parsed.labels.tolist() == [7.3, 7.0, 10.5, -2.0, 4.0, 8.0, 0.001, 9.0]
    assert parsed.bounds.tolist() == [0, -1, 1, -1, 0, 0, 0, 1]
    assert parsed.bounds.dtype == np.int8
    assert parsed.problems == []


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("", "the label is missing"),
        (None, "the label is missing"),
        ("NA", "the label is missing"),
        ("strong", "the label is not a number"),
        ("7,3", "the label is not a number"),
        ("1_000", "the label is not a number"),
        ("nan", "the label is NaN"),
        (math.nan, "the label is NaN"),
        ("inf", "the label is infinite"),
        ("-Infinity", "the label is infinite"),
        (math.inf, "the label is infinite"),
        ("1e400", "the label is infinite"),
        (10**400, "the label is infinite"),
        ("1e38", "the label is larger than 1e30"),
        (-1e38, "the label is larger than 1e30"),
        ([1.0], "the label is list, not a number"),
    ],
)
def test_unusable_label_is_refused(value, rule):
    (problem,) = parse_labels([value], "pKd", [9]).problems
    assert (problem.row, problem.column, problem.rule) == (9, "pKd", rule)
    assert problem.remedy


@pytest.mark.parametrize(
    ("mark", "bound"),
    [("<", -1), ("<=", -1), (">", 1), (">=", 1), ("=", 0), ("", 0), (None, 0), ("0", 0), ("1", -1), (1, -1), (0.0, 0)],
)
def test_censor_column_gives_the_bound_and_one_means_at_or_below(mark, bound):
    parsed = parse_labels(["7"], "pKd", [2], censor_values=[mark], censor_column="censored")
    assert parsed.bounds.tolist() == [bound]
    assert parsed.problems == []


def test_unknown_and_contradicting_censor_marks_are_refused():
    parsed = parse_labels(["7", "<=7", ">7"], "pKd", [2, 3, 4], censor_values=["yes", "0", "1"], censor_column="c")
    assert [(p.row, p.column, p.rule) for p in parsed.problems] == [
        (2, "c", "not a censoring mark"),
        (3, "c", "the censoring mark contradicts the sign written in the label"),
        (4, "c", "the censoring mark contradicts the sign written in the label"),
    ]


def test_empty_censor_mark_leaves_the_sign_in_the_label():
    parsed = parse_labels(["<=7", ">9"], "pKd", [2, 3], censor_values=["", None], censor_column="c")
    assert parsed.bounds.tolist() == [-1, 1]
