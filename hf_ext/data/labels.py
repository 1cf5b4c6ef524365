"""Labels: numbers, and numbers that are only known as a bound (`<=7`, `>10.5`)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .numbers import NUMBER, parse_number
from .proteins import Problem, is_missing, shorten

MAX_ABS_LABEL = 1e30  # squared error of larger ones overflows float32

# Of stripped text, and linear: white space can be matched in one place only.
_LABEL = re.compile(rf"(?:(<=|>=|<|>|=)\s*)?({NUMBER})").fullmatch
_NOT_FINITE = re.compile(r"(?:(?:<=|>=|<|>|=)\s*)?[+-]?(?:inf|infinity)", re.IGNORECASE).fullmatch
_SIGN = {"<": -1, "<=": -1, ">": 1, ">=": 1, "=": 0}
# 1 marks a label the assay could not go below, so the true value is at or below it.
_FLAG = {"": None, "0": 0, "0.0": 0, "false": 0, "1": -1, "1.0": -1, "true": -1, **_SIGN}


@dataclass(frozen=True)
class ParsedLabels:
    """`labels` float64 [n] (NaN where refused); `bounds` int8 [n]: -1 true value <= label, 0 exact, +1 >= label."""

    labels: np.ndarray
    bounds: np.ndarray
    problems: list[Problem]


@dataclass(frozen=True)
class _Label:
    value: float
    bound: int | None = None  # None: the cell itself says nothing
    rule: str = ""
    remedy: str = ""


def parse_labels(
    values: Sequence[object],
    column: str,
    rows: Sequence[int],
    *,
    censor_values: Sequence[object] | None = None,
    censor_column: str = "",
) -> ParsedLabels:
    """Turns cells into finite numbers and bounds; refuses what would poison a loss, naming the row.

    Args:
        values: [n] cells; numbers, or text such as `7.3`, `<=7`, `>10.5`.
        column: the label column's name, used in problems.
        rows: [n] 1-based file rows.
        censor_values: [n] cells of the censor column, or None: `<`, `<=`, `>`, `>=`, `=`, empty, or 0/1, where 1 says
            that the true value is at or below the label.
        censor_column: its name.

    Returns:
        `ParsedLabels`. Refused per row: missing, other text (digits of other scripts and 1_000 too), NaN, infinite,
        beyond +-1e30, too near to 0 for float64 (1e-400), an unknown censor value, and a censor value that contradicts
        the label's own sign.

    Cost: each distinct text is parsed once; 0.4 s for 100,000 distinct ones.
    """
    known: dict[object, _Label] = {}
    problems: list[Problem] = []
    labels = np.full(len(values), math.nan, dtype=np.float64)
    bounds = np.zeros(len(values), dtype=np.int8)
    for index, value in enumerate(values):
        if isinstance(value, str):
            label = known.get(value)
            if label is None:
                label = known[value] = _parse_text(value)
        else:
            label = _parse_number(value)
        if label.rule:
            problems.append(Problem(rows[index], column, shorten(value), label.rule, label.remedy))
            continue
        bound, flag = label.bound, None
        if censor_values is not None:
            key = "" if is_missing(censor_values[index]) else str(censor_values[index]).strip().lower()
            flag = _FLAG.get(key)
            rule = _censor_rule(key, flag, bound)
            if rule:
                remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
                problems.append(Problem(rows[index], censor_column, shorten(censor_values[index]), rule, remedy))
                continue
        labels[index] = label.value
        bounds[index] = bound if bound is not None else (flag or 0)
    return ParsedLabels(labels, bounds, problems)


def name_label_kind(values: Sequence[object]) -> str:
    """What labels are that are no numbers, with two of them; empty where they seem to be meant as numbers."""
    texts = list(dict.fromkeys(str(value) for value in values if not is_missing(value)))
    shown = " and ".join(shorten(text) for text in texts[:2])
    if any(re.search(r"[;|\[]|[A-Za-z],", text) for text in texts):
        return f"{shown} look like several labels in one cell"
    return "" if not texts or any(map(str.isdigit, "".join(texts))) else f"{shown} look like names of classes"


def _censor_rule(key: str, flag: int | None, bound: int | None) -> str:
    if key not in _FLAG:
        return "not a censoring mark"
    if flag is not None and bound is not None and flag != bound:
        return "the censoring mark contradicts the sign written in the label"
    return ""


def _parse_number(value: object) -> _Label:
    if value is None:
        return _Label(math.nan, rule="the label is missing", remedy="Fill it in, or leave the row out.")
    if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
        return _Label(math.nan, rule=f"the label is {type(value).__name__}, not a number", remedy="Store a number.")
    try:
        return _check_range(float(value), None)
    except OverflowError:  # an integer of more than 308 digits
        return _check_range(math.inf, None)


def _parse_text(text: str) -> _Label:
    text = text.strip()
    if text.lower() in ("nan", "+nan", "-nan"):
        return _check_range(math.nan, None)
    if is_missing(text):
        return _Label(math.nan, rule="the label is missing", remedy="Fill it in, or leave the row out.")
    if _NOT_FINITE(text):
        return _check_range(math.inf, None)
    match = _LABEL(text.replace("\u2264", "<=").replace("\u2265", ">="))
    if match is None:
        remedy = "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7."
        return _Label(math.nan, rule="the label is not a number", remedy=remedy)
    value = parse_number(match.group(2))
    if value is None:
        return _Label(math.nan, rule="the label is too near to 0 to be stored", remedy="Write 0, or change the unit.")
    return _check_range(value, _SIGN.get(match.group(1)) if match.group(1) else None)


def _check_range(value: float, bound: int | None) -> _Label:
    if math.isnan(value):
        return _Label(value, rule="the label is NaN", remedy="One NaN makes every weight NaN; leave the row out.")
    if math.isinf(value):
        return _Label(value, rule="the label is infinite", remedy="Write a finite number, or a bound such as >10.")
    if abs(value) > MAX_ABS_LABEL:
        return _Label(value, rule="the label is larger than 1e30", remedy="Change the unit, or use a logarithm.")
    return _Label(value, bound)
