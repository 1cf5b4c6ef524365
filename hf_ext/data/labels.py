"""Labels: numbers, and numbers that are only known as a bound (`<=7`, `>10.5`); what stands for no value is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .columns import Distinct, distinct
from .row_errors import RowError, find_rows, is_missing, shorten

# ASCII digits, a point, an exponent; nothing else that Python would take for a number. Linear: no digit can be matched
# in two places.
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
MAX_ABS_LABEL = 1e30  # squared error of larger ones overflows float32
UNSAID = 2  # by a mark: whether its label is a bound
SIGNS = {"<": -1, "<=": -1, ">": 1, ">=": 1, "=": 0}
# 1 marks a label the assay could not go below, so the true value is at or below it.
MARKS = {"": UNSAID, "0": 0, "0.0": 0, "false": 0, "1": -1, "1.0": -1, "true": -1, **SIGNS}

# Numbers that other programs write where nothing was measured.
NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 99.99, 999.9, 999.99, 9999.9, 9999.99)
MIN_OTHERS = 3  # distinct labels, which say where measurements lie
FAR = 10.0  # ranges of the other labels between them and a placeholder
MAX_RATIO = 100.0  # of positive labels: where they spread further, such as Kd in nM, 999 may be measured

_LABEL = re.compile(rf"(?:(<=|>=|<|>|=)\s*)?({NUMBER})").fullmatch  # of stripped text, and linear
_BEGINS_NUMBER = re.compile(r"\s*[0-9<>=+.\u2264\u2265-]").match


class ParsedLabels(NamedTuple):
    """`labels` float64 (n,), NaN where refused; `bounds` int8 (n,): -1 true value <= label, 0 exact, +1 >= label."""

    labels: np.ndarray
    bounds: np.ndarray
    errors: list[RowError]


class Label(NamedTuple):
    """A cell as `value` (NaN where refused) and `bound`; or the `rule` that refuses it."""

    value: float = math.nan
    bound: int = 0
    rule: str = ""
    remedy: str = ""


def parse_labels(
    values: pa.ChunkedArray | Sequence[Any],
    column: str,
    rows: np.ndarray,
    *,
    marks: pa.ChunkedArray | Sequence[Any] | None = None,
    mark_column: str = "",
) -> ParsedLabels:
    """Turns cells into finite numbers and bounds; refuses what would poison a loss, naming the row.

    Args:
        values: n cells; numbers, or text such as `7.3`, `<=7`, `>10.5`.
        column: the label column's name, used in errors.
        rows: (n,) the row of each value in its file.
        marks: n cells of the censor column, or None: `<`, `<=`, `>`, `>=`, `=`, empty, or 0/1, where 1 says that the
            true value is at or below the label.
        mark_column: its name.

    Returns:
        `ParsedLabels`. Refused per row: missing, other text (digits of other scripts and 1_000 too), beyond +-1e30, a
        missing value written as nines (`find_placeholders`), an unknown mark, and a mark that contradicts the label's
        own sign.

    Cost: each distinct cell is parsed once; 0.3 s for 100,000 distinct ones.
    """
    found = distinct(values)
    judged = [judge_label(cell) for cell in found.cells.to_pylist()]
    labels = np.array([one.value for one in judged], np.float64)[found.number]
    bounds = np.array([one.bound for one in judged], np.int8)[found.number]
    refused = {number: (one.rule, one.remedy) for number, one in enumerate(judged) if one.rule}
    errors = find_rows(refused, found, column, rows)
    if marks is not None:
        bounds, of_marks = _merge_marks(distinct(marks), bounds, np.isfinite(labels), mark_column, rows)
        errors += of_marks
    return ParsedLabels(labels, bounds, errors + find_placeholders(labels, bounds, found, column, rows))


def judge_label(cell: object) -> Label:
    """A single cell by the rules of `parse_labels` that need no other one."""
    if is_missing(cell):
        return Label(rule="the label is missing", remedy="Fill it in, or leave the row out.")
    bound, value = 0, cell
    if isinstance(cell, str):
        match = _LABEL(cell.strip().replace("\u2264", "<=").replace("\u2265", ">="))
        if not match:
            remedy = "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7."
            return Label(rule="the label is not a number", remedy=remedy)
        bound, value = SIGNS.get(match[1], 0), float(match[2])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Label(rule=f"the label is {type(cell).__name__}, not a number", remedy="Store a number.")
    if abs(value) > MAX_ABS_LABEL:
        return Label(rule="the label is larger than 1e30", remedy="Change the unit, or use a logarithm.")
    return Label(float(value), bound)


def _merge_marks(
    marks: Distinct, bounds: np.ndarray, is_label: np.ndarray, column: str, rows: np.ndarray
) -> tuple[np.ndarray, list[RowError]]:
    """The bounds by label and mark together, and errors of marks that are none, or say otherwise than the label."""
    cells = marks.cells.to_pylist()
    known = [MARKS.get("" if is_missing(cell) else str(cell).strip().lower()) for cell in cells]
    given = np.array([UNSAID if one is None else one for one in known], np.int8)[marks.number]
    is_unknown = np.array([one is None for one in known], bool)[marks.number] & is_label
    contradicts = (given != UNSAID) & (bounds != 0) & (given != bounds) & is_label
    remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
    errors = [
        RowError(int(rows[row]), column, shorten(cells[marks.number[row]]), rule, remedy)
        for is_wrong, rule in (
            (is_unknown, "not a censoring mark"),
            (contradicts, "the censoring mark contradicts the sign written in the label"),
        )
        for row in np.flatnonzero(is_wrong)
    ]
    return np.where(given == UNSAID, bounds, given), errors


def find_placeholders(
    labels: np.ndarray, bounds: np.ndarray, values: Distinct, column: str, rows: np.ndarray
) -> list[RowError]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels; a bound (`<=999`) is none.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels spread over two decades, as concentrations do.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    others = np.unique(labels[np.isfinite(labels) & ~is_nines]) if is_nines.any() else labels[:0]
    if len(others) < MIN_OTHERS:
        return []
    low, high = float(others[0]), float(others[-1])
    is_outside = (labels < low) | (labels > high)
    may_be_measured = (labels > 0) & (low > 0) & (high > MAX_RATIO * low)
    is_far = (np.maximum(labels - high, low - labels) > FAR * (high - low)) & ~may_be_measured
    rule = f"the label reads as a missing value, all others lie between {low:g} and {high:g}"
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    found = np.flatnonzero(is_nines & is_outside & (is_far | ((labels < 0) & (low >= 0))))
    texts = [str(values.cells[values.number[i]].as_py()).strip() for i in found]
    return [RowError(int(rows[i]), column, text, rule, remedy) for i, text in zip(found, texts)]


def describe_classes(values: pa.ChunkedArray | Sequence[Any]) -> str:
    """What labels are that are no numbers, and what to do with them; empty where they seem to be meant as numbers."""
    texts = [str(cell) for cell in distinct(values).cells.to_pylist() if not is_missing(cell)]
    shown = " and ".join(shorten(text) for text in texts[:2])
    if any(re.search(r"[;|\[]|[A-Za-z],", text) for text in texts):
        return f"{shown} look like several labels in one cell. Give a column with one number per row."
    if not texts or any(map(_BEGINS_NUMBER, texts)):
        return ""
    return (
        f"{shown} look like names of classes, which `hf-ext train` does not train yet: it predicts numbers.\n"
        "  Two classes: write them as 0 and 1; --binder_threshold 0.5 adds recall, precision and F1.\n"
        "  Classes as such: FastTrainer trains them in Python, see docs/library.md."
    )
