"""Tables: exact text, aligned, with numbers to the right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hf_ext.errors import ArgumentError
from hf_ext.reporting import format_markdown_table, format_table
from hf_ext.reporting.tables import format_cell

ROWS = [["ridge", 0.8189, 26000, "1.7x"], ["constant", None, 5, "10 %"]]
HEADERS = ["model", "spearman", "n", "speed"]


def test_numbers_are_right_aligned_and_text_is_left_aligned() -> None:
    assert format_table(ROWS, HEADERS).splitlines() == [
        "model     spearman       n  speed",
        "--------  --------  ------  -----",
        "ridge        0.819  26,000   1.7x",
        "constant         -       5   10 %",
    ]


def test_markdown_is_aligned_and_marks_numeric_columns() -> None:
    assert format_markdown_table(ROWS, HEADERS).splitlines() == [
        "| model    | spearman |      n | speed |",
        "| -------- | -------: | -----: | ----: |",
        "| ridge    |    0.819 | 26,000 |  1.7x |",
        "| constant |        - |      5 |  10 % |",
    ]


def test_a_pipe_in_a_cell_or_header_does_not_break_markdown() -> None:
    lines = format_markdown_table([["a|b"]], ["x|y"]).splitlines()
    assert lines == ["| x\\|y |", "| ---- |", "| a\\|b |"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (True, "yes"),
        (1234567, "1,234,567"),
        (0.0, "0.000"),
        (-0.12345, "-0.123"),
        (0.0000123, "1.23e-05"),
        (131072.4, "131,072"),
        (3e12, "3.00e+12"),
        (math.nan, "nan"),
        (np.float64(0.5), "0.500"),
        (np.float32(0.5), "0.500"),
        (np.int64(1234), "1,234"),
        (np.bool_(False), "no"),
        ("two\nlines", "two lines"),
    ],
)
def test_cells_read_well(value: object, text: str) -> None:
    assert format_cell(value) == text


def test_names_that_begin_with_a_digit_are_text() -> None:
    assert format_table([["1A2Y"], ["x"]], ["antibody"]).splitlines()[2] == "1A2Y"


def test_a_table_without_rows_is_its_headers() -> None:
    assert format_table([], ["a", "b"]) == "a  b\n-  -"


def test_rows_of_another_length_are_refused_by_number() -> None:
    with pytest.raises(ArgumentError, match="row 1 has 1 cells for 2 headers"):
        format_table([[1, 2], [1]], ["a", "b"])
    with pytest.raises(ArgumentError, match="headers is empty"):
        format_markdown_table([], [])
