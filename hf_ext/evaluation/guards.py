"""Plain sentences about predictions that have collapsed and labels that are not what they seem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ..errors import DataError
from ._arrays import FloatArray, as_column, as_pair, count_not_finite
from .label_scales import find_isolated, unit_alarms

MIN_ROWS = 30  # below this, shares and spreads are too uncertain to raise an alarm about
FEW_DISTINCT_SHARE = 0.01
FEW_DISTINCT_OF_REFERENCES = 0.1
MIN_SPREAD_RATIO = 0.1
BLOCK_SHARE = 0.05  # of rows that share one value: a detection limit or a default rather than a measurement
SIMPLE_STEP = 0.25  # multiples of it are bfloat16 numbers anyway, so they say nothing about rounding


class AlarmKind(Enum):
    """What is wrong with predictions."""

    NOT_FINITE = "NaN or infinite"
    CONSTANT = "one value"
    FEW_VALUES = "few values"
    BLOCK = "many times the same value"
    LITTLE_SPREAD = "little spread"
    NO_BETTER = "no better than the mean"
    BFLOAT16 = "rounded to bfloat16"


@dataclass(frozen=True)
class Alarm:
    """What is wrong, and a sentence with the numbers that show it."""

    kind: AlarmKind
    text: str


def collapse_report(predictions: Any, references: Any) -> dict[str, Any]:
    """Say whether predictions have collapsed (few values, little spread, rounded) or do no better than a constant.

    Args:
        predictions, references: (n,) or (n, 1) numbers in one unit.

    Returns:
        n, num_not_finite, num_distinct, distinct_share, most_frequent_value, most_frequent_share, prediction_std,
        reference_std, spread_ratio, rmse, constant_rmse (of the references' own mean), looks_bfloat16 (None: too few
        rows to tell), alarms (sentences; empty where nothing is wrong). Numbers are over rows where both are finite,
        None where undefined.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    report, alarms = examine_predictions(predictions, references)
    return {**report, "alarms": [alarm.text for alarm in alarms]}


def examine_predictions(predictions: Any, references: Any) -> tuple[dict[str, Any], list[Alarm]]:
    """Returns what `collapse_report` does, without the alarms, and these with their kinds."""
    predicted, measured = as_pair(predictions, references)
    problems = [count_not_finite(predicted, "predictions"), count_not_finite(measured, "references")]
    finite = np.isfinite(predicted) & np.isfinite(measured)
    num_not_finite = int(np.count_nonzero(~finite))
    predicted, measured = predicted[finite], measured[finite]
    report: dict[str, Any] = {"n": len(finite), "num_not_finite": num_not_finite, **_distinct(predicted)}
    prediction_std, reference_std = _std(predicted), _std(measured)
    report["prediction_std"], report["reference_std"] = prediction_std, reference_std
    report["spread_ratio"] = prediction_std / reference_std if prediction_std is not None and reference_std else None
    report["rmse"] = float(np.sqrt(np.mean((predicted - measured) ** 2))) if len(measured) else None
    report["constant_rmse"] = reference_std
    report["looks_bfloat16"] = looks_bfloat16(predicted)
    alarms = [Alarm(AlarmKind.NOT_FINITE, f"{problem}.") for problem in problems if problem]
    return report, alarms + [Alarm(kind, text) for kind, text in _collapse_alarms(report, measured)]


def label_audit(labels: Any, bounds: Sequence[int] | Any | None = None) -> dict[str, Any]:
    """Say what the labels hold: range, ties, censored rows, blocks that look like detection limits, units that are off.

    Args:
        labels: (n,) or (n, 1) numbers.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above) and 0 (exact), or None: all exact.

    Returns:
        n, num_not_finite, min, max, mean, std, num_distinct, distinct_share, tied_share (rows that share their value
        with another), most_frequent_value, most_frequent_share, share_at_min, share_at_max, censored_share,
        censored_below_share, censored_above_share, alarms. Shares are of the finite rows, None where there are none.

    Raises:
        DataError: shapes or lengths do not fit, or a bound is not -1, 0 or 1.
    """
    column = as_column(labels, "labels")
    sides = _check_bounds(bounds, len(column))
    problem = count_not_finite(column, "labels")
    finite = np.isfinite(column)
    values, sides = column[finite], sides[finite]
    report: dict[str, Any] = {"n": len(column), "num_not_finite": len(column) - len(values)}
    report.update({"min": None, "max": None, "mean": None, "std": _std(values), **_distinct(values)})
    if len(values):
        report.update({"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())})
    shares = {
        "share_at_min": values == report["min"],
        "share_at_max": values == report["max"],
        "censored_share": sides != 0,
        "censored_below_share": sides < 0,
        "censored_above_share": sides > 0,
    }
    report.update({key: float(np.mean(rows)) if len(values) else None for key, rows in shares.items()})
    report["alarms"] = [f"{problem}."] if problem else []
    report["alarms"] += _label_alarms(report, values, sides) if len(values) else ["There are no labels."]
    return report


def format_report(report: Mapping[str, Any], title: str = "") -> list[str]:
    """Returns the lines that print a `collapse_report` or a `label_audit`: one per number, then one per alarm."""
    lines = [title] if title else []
    width = max(len(key) for key in report)
    for key, value in report.items():
        if key != "alarms":
            lines.append(f"  {key.replace('_', ' '):<{width}}  {_text(key, value)}")
    alarms = report["alarms"]
    return lines + ([f"  ALARM: {alarm}" for alarm in alarms] if alarms else ["  no alarms"])


def looks_bfloat16(values: FloatArray) -> bool | None:
    """Say whether all values equal their bfloat16 rounding, by chance a 1 in 65,536 event for a single float32.

    None where that proves nothing: fewer than 30 values, or all of them multiples of 0.25.
    """
    if len(values) < MIN_ROWS or np.all(values % SIMPLE_STEP == 0):
        return None
    as_float32 = values.astype(np.float32)
    # bfloat16 is the upper half of a float32: exact where the lower half is empty.
    return bool(np.all(as_float32 == values) and np.all(as_float32.view(np.uint32) & 0xFFFF == 0))


def _collapse_alarms(report: Mapping[str, Any], measured: FloatArray) -> list[tuple[AlarmKind, str]]:
    num_rows, distinct = len(measured), report["num_distinct"]
    value, share = report["most_frequent_value"], report["most_frequent_share"]
    alarms = []
    if num_rows < MIN_ROWS:
        is_constant = distinct == 1 < num_rows
        return [(AlarmKind.CONSTANT, f"All {num_rows} predictions are {value:g}.")] if is_constant else []
    distinct_references = len(np.unique(measured))
    if distinct == 1:
        text = f"All {num_rows:,} predictions are {value:g}: the model is a constant."
        alarms.append((AlarmKind.CONSTANT, text))
    elif distinct <= max(FEW_DISTINCT_SHARE * num_rows, FEW_DISTINCT_OF_REFERENCES * distinct_references):
        text = (
            f"{distinct:,} distinct values in {num_rows:,} predictions (the references have {distinct_references:,})."
        )
        alarms.append((AlarmKind.FEW_VALUES, text))
    if share >= BLOCK_SHARE and distinct > 1:
        alarms.append((AlarmKind.BLOCK, f"{share:.1%} of the predictions are exactly {value:g}."))
    ratio = report["spread_ratio"]
    if ratio is not None and ratio < MIN_SPREAD_RATIO and distinct > 1:
        text = f"The predictions spread {ratio:.3f} times as far as the references: close to a constant."
        alarms.append((AlarmKind.LITTLE_SPREAD, text))
    if report["reference_std"] and report["rmse"] >= report["constant_rmse"]:
        text = (
            f"RMSE {report['rmse']:.4f} is no better than the {report['constant_rmse']:.4f} of predicting the mean of "
            "these references everywhere."
        )
        alarms.append((AlarmKind.NO_BETTER, text))
    if report["looks_bfloat16"]:
        text = "Every prediction is a bfloat16 number: the head ran, or its output was kept, in bfloat16."
        alarms.append((AlarmKind.BFLOAT16, text))
    return alarms


def _label_alarms(report: Mapping[str, Any], values: FloatArray, sides: FloatArray) -> list[str]:
    num_rows = len(values)
    if report["num_distinct"] == 1 and num_rows > 1:
        return [f"All {num_rows:,} labels are {values[0]:g}: there is nothing to learn."]
    if num_rows < MIN_ROWS:
        return []
    if report["num_distinct"] == 2 and not sides.any():
        return ["Two values, {min:g} and {max:g}: classes? hf_ext trains numbers alone, so these too.".format(**report)]
    isolated = dict(find_isolated(values, sides))
    alarms = [*isolated.values(), *unit_alarms(values[~np.isin(values, list(isolated))])]
    for end, side, kind in (("min", -1, "lowest"), ("max", 1, "highest")):
        if report[end] in isolated:
            continue
        # Rows that already say which side the truth lies on are handled; the rest pretend to be exact.
        unmarked = int(np.count_nonzero((values == report[end]) & (sides == 0)))
        sign = f"{'<=' if side < 0 else '>='}{report[end]:g}"
        if unmarked >= BLOCK_SHARE * num_rows:
            alarms.append(
                f"{unmarked / num_rows:.1%} of the labels ({unmarked:,} of {num_rows:,}) are exactly {report[end]:g}, "
                f"the {kind} value, and not marked as censored: a detection limit? If so, write them as {sign}."
            )
    value, share = report["most_frequent_value"], report["most_frequent_share"]
    if share >= BLOCK_SHARE and value not in (report["min"], report["max"]):
        alarms.append(
            f"{share:.1%} of the labels are exactly {value:g}, inside the range: a default or a limit of one source?"
        )
    if report["censored_share"] > 0.5:
        alarms.append(f"{report['censored_share']:.1%} of the labels are censored: most rows give a limit, no value.")
    return alarms


def _distinct(values: FloatArray) -> dict[str, Any]:
    """Counts distinct values; the most frequent one is the smallest of equals."""
    if len(values) == 0:
        empty = ("distinct_share", "tied_share", "most_frequent_value", "most_frequent_share")
        return {"num_distinct": 0, **dict.fromkeys(empty)}
    distinct, counts = np.unique(values, return_counts=True)
    top = int(np.argmax(counts))
    return {
        "num_distinct": len(distinct),
        "distinct_share": len(distinct) / len(values),
        "tied_share": float(counts[counts > 1].sum() / len(values)),
        "most_frequent_value": float(distinct[top]),
        "most_frequent_share": float(counts[top] / len(values)),
    }


def _std(values: FloatArray) -> float | None:
    """Population standard deviation: 0.0 exactly for equal values, None for no values."""
    if len(values) == 0:
        return None
    return 0.0 if values.min() == values.max() else float(values.std())


def _check_bounds(bounds: Sequence[int] | Any | None, num_rows: int) -> FloatArray:
    if bounds is None:
        return np.zeros(num_rows)
    sides = as_column(bounds, "bounds")
    if len(sides) != num_rows:
        raise DataError(f"{len(sides)} bounds for {num_rows} labels: one per row is needed, or None.")
    bad = np.flatnonzero(~np.isin(sides, (-1.0, 0.0, 1.0)))
    if len(bad):
        raise DataError(f"bounds, row {bad[0]}: {sides[bad[0]]:g} given; -1, 0 or 1 is needed.")
    return sides


def _text(key: str, value: Any) -> str:
    if value is None:
        return "undefined"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if key.endswith("_share") or key.startswith("share_"):
        return f"{100 * value:.3g} %"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
