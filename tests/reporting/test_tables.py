"""Tables, numbers and metrics as text: exact, aligned, with sensible digits."""

import math

import numpy as np
import pytest

from hf_ext.text import format_markdown_table, format_table, units

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


def test_names_that_begin_with_a_digit_are_text() -> None:
    assert format_table([["1A2Y"], ["x"]], ["antibody"]).splitlines()[2] == "1A2Y"


def test_a_table_without_rows_is_its_headers() -> None:
    assert format_table([], ["a", "b"]) == "a  b\n-  -"


def test_rows_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        format_table([[1, 2], [1]], ["a", "b"])


def test_numbers_scores_and_ticks_have_sensible_digits_and_units() -> None:
    for text, expected in (
        (units.format_cell(None), "-"),
        (units.format_cell(1234567), "1,234,567"),
        (units.format_cell(0.0), "0.000"),
        (units.format_cell(0.0000123), "1.23e-05"),
        (units.format_cell(131072.4), "131,072"),
        (units.format_cell(3e12), "3.00e+12"),
        (units.format_cell(math.nan), "nan"),
        (units.format_cell(np.float32(0.5)), "0.500"),
        (units.format_cell(np.bool_(False)), "no"),
        (units.format_cell("two\nlines"), "two lines"),
        (units.number(26000), "26,000"),
        (units.number(0.81943), "0.819"),
        (units.number(None), "not measured"),
        (units.number(True), "yes"),
        (units.seconds(754.2), "12 min 34 s"),
        (units.seconds(11520), "3 h 12 min"),
        (units.seconds(187200), "2 d 4 h"),
        (units.seconds(float("nan")), "not measured"),
        (units.share(0.366), "36.6 %"),
        (units.gib(1.2549), "1.25 GiB"),
        (units.seconds_span((0.0, 0.09)), "less than 0.1 s"),
        (units.seconds_span((0.26, 12.4)), "0.3 s to 12 s"),
        (units.seconds_span((5400.0, 72000.0)), "1.5 h to 20.0 h"),
        (units.memory(2**26), "64.0 MiB"),
        (units.storage(2.5e9), "2.50 GB"),
        (units.rounded(187770.4), "187,770"),
        (units.rounded(12.34), "12.3"),
        (units.capitalize("rows whose VH is new"), "Rows whose VH is new"),
        (units.score({"value": 0.87654, "low": 0.85, "high": 0.9}), "0.877 [0.850, 0.900]"),
        (units.score({"value": -0.0009, "low": -0.019, "high": -0.0001}), "-0.001 [-0.019, 0.000]"),
        (units.score({"value": 0.00002, "low": 0.00001, "high": 0.00003}), "2.00e-05 [1.00e-05, 3.00e-05]"),
        (units.score({"value": None, "low": 0.1, "high": 0.2}), "undefined"),
        (units.score(None), "not measured"),
    ):
        assert text == expected


def test_a_metric_has_a_name_and_a_title() -> None:
    for metric, name, title in (
        ("spearman", "Spearman", "Spearman's rho"),
        ("per_group_spearman", "Spearman within groups", "Mean Spearman's rho per group"),
        ("recall", "recall", "Recall"),
        ("nrmse", "nRMSE", "nRMSE, overall"),
        ("darcy2d_nrmse", "nRMSE of darcy2d", "nRMSE of darcy2d"),
        ("my_own_metric", "my own metric", "My own metric"),
    ):
        assert (units.metric_name(metric), units.metric_title(metric)) == (name, title)


def test_errors_are_better_low_and_scores_high() -> None:
    errors = ["loss", "eval_loss", "rmse", "eval_new_mae", "mse", "token_loss", "perplexity", "darcy2d_nrmse"]
    scores = ["spearman", "r2", "accuracy", "f1", "num_distinct", "per_group_spearman"]
    assert [metric for metric in [*errors, *scores] if units.less_is_better(metric)] == errors
