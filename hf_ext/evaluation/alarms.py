"""Plain sentences about predictions that have collapsed and labels that are not what they seem: likely, not sure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from ..errors import DataError
from ._arrays import FloatArray, as_column, as_pair, count_not_finite

MIN_ROWS = 30  # below this, shares and spreads are too uncertain to raise an alarm about
MIN_OTHER_ROWS = 10  # of a split that is held against train
FEW_DISTINCT_SHARE = 0.01
FEW_DISTINCT_OF_REFERENCES = 0.1
MIN_SPREAD_RATIO = 0.1
BLOCK_SHARE = 0.05  # of rows that share one value: a detection limit or a default rather than a measurement
SIMPLE_STEP = 0.25  # multiples of it are bfloat16 numbers anyway, so they say nothing about rounding

# Nobody's dissociation constants in M reach a millimolar; a pKd or a fitness in which all are smaller is none.
MOLAR = 1e-3
DECADES = 1e3  # between the smallest and the largest concentration of one table
NANOMOLAR = 100.0  # tables in nM or pM go beyond; ratios to a wild type, which are skewed alike, mostly do not
SKEWED = 3.0  # mean over median: 1 of symmetric labels, above 3 where ln(label) has a standard deviation above 1.5
UNIT_GAP = 2.0  # decades without any label: units differ by three at least, and labels of one unit leave no such hole
MIN_SIDE = 0.02  # of the labels, on each side of the gap
LOGARITHMS = (2.0, 15.0)  # in which nearly all -log10 of a constant in M lie
ABOVE_LOGARITHMS = 50.0  # -log10 of a concentration never is
MIN_ISOLATED_GAP = 0.5  # of the range of all other labels, between them and a value that many rows share
MIN_DISTINCT = 10  # of the other labels: fewer are classes
FAR_MEANS = 5.0  # standard deviations, the larger of both; splits into low and high labels touch at 2 to 3
OTHER_SPREAD = 100.0  # times as wide; a skewed fitness, split into its low and high half, differs seventyfold


class AlarmKind(Enum):
    """What is wrong with predictions."""

    NOT_FINITE = "NaN or infinite"
    CONSTANT = "one value"
    FEW_VALUES = "few values"
    BLOCK = "many times the same value"
    LITTLE_SPREAD = "little spread"
    NO_BETTER = "no better than the mean"
    BFLOAT16 = "rounded to bfloat16"


class Alarm(NamedTuple):
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
    predicted, measured = predicted[finite], measured[finite]
    spread, constant = _std(predicted), _std(measured)
    report = {
        "n": len(finite),
        "num_not_finite": int(np.count_nonzero(~finite)),
        **_distinct(predicted),
        "prediction_std": spread,
        "reference_std": constant,
        "spread_ratio": spread / constant if spread is not None and constant else None,
        "rmse": float(np.sqrt(np.mean((predicted - measured) ** 2))) if len(measured) else None,
        "constant_rmse": constant,
        "looks_bfloat16": _looks_bfloat16(predicted),
    }
    alarms = [Alarm(AlarmKind.NOT_FINITE, f"{problem}.") for problem in problems if problem]
    return report, [*alarms, *_collapse_alarms(report, measured)]


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
    low, high, mean = (float(values.min()), float(values.max()), float(values.mean())) if len(values) else (None,) * 3
    shares = {
        "share_at_min": values == low,
        "share_at_max": values == high,
        "censored_share": sides != 0,
        "censored_below_share": sides < 0,
        "censored_above_share": sides > 0,
    }
    report = {
        "n": len(column),
        "num_not_finite": len(column) - len(values),
        "min": low,
        "max": high,
        "mean": mean,
        "std": _std(values),
        **_distinct(values),
        **{key: float(np.mean(rows)) if len(values) else None for key, rows in shares.items()},
    }
    alarms = _label_alarms(report, values, sides) if len(values) else ["There are no labels."]
    return {**report, "alarms": [*([f"{problem}."] if problem else []), *alarms]}


def unit_alarms(labels: FloatArray) -> list[str]:
    """Sentences about labels that read as concentrations, or as two units in one column.

    Args:
        labels: (n,) finite numbers; below 30 nothing is said.
    """
    if len(labels) < MIN_ROWS or labels.min() <= 0:
        return []
    if mixed := _mixed_units(labels):
        return [mixed]
    low, high, median = float(labels.min()), float(labels.max()), float(np.median(labels))
    advice = (
        "the weakest binders alone would decide the loss. Train on -log10 of the value in M (pKd = 9 - log10 of nM)."
    )
    if high < MOLAR:
        return [
            f"All labels are positive and below {MOLAR:g} ({low:.3g} to {high:.3g}), as concentrations in M: {advice}"
        ]
    if high >= NANOMOLAR and high >= DECADES * low and labels.mean() >= SKEWED * median:
        text = f"The labels are positive and spread from {low:.3g} to {high:.3g}, half of them below {median:.3g}"
        return [f"{text}, as concentrations in nM or pM: {advice}"]
    return []


def split_alarms(labels: Mapping[str, Any]) -> list[str]:
    """Sentences about splits whose labels cannot be of train's scale or sign.

    Args:
        labels: split name -> (n,) numbers; "train" needs 30, others are held against it from 10 rows on.
    """
    columns = {name: as_column(values, f"labels of {name}") for name, values in labels.items()}
    train = columns.pop("train", np.zeros(0))
    found = []
    for name, other in columns.items() if len(train) >= MIN_ROWS else ():
        if len(other) < MIN_OTHER_ROWS:
            continue
        narrow, wide = sorted((float(train.std()), float(other.std())))
        means_differ = abs(train.mean() - other.mean()) > FAR_MEANS * wide
        spreads_differ = narrow > 0 and wide > OTHER_SPREAD * narrow  # 0: all labels of one split are the same
        if not means_differ and not spreads_differ:
            continue
        has_other_sign = (train.min() > 0 and other.max() < 0) or (train.max() < 0 and other.min() > 0)
        here, there = (
            f"{column.min():.3g} to {column.max():.3g}, mean {column.mean():.3g}" for column in (train, other)
        )
        found.append(
            f"Labels of {name} ({there}) have another {'sign' if has_other_sign else 'scale'} than those of train "
            f"({here}): another unit, or the logarithm of one of them? Scores between them mean nothing; convert one."
        )
    return found


def format_report(report: Mapping[str, Any], title: str = "") -> list[str]:
    """Returns the lines that print a `collapse_report` or a `label_audit`: one per number, then one per alarm."""
    lines = [title] if title else []
    width = max(len(key) for key in report)
    for key, value in report.items():
        if key != "alarms":
            lines.append(f"  {key.replace('_', ' '):<{width}}  {_text(key, value)}")
    alarms = report["alarms"]
    return lines + ([f"  ALARM: {alarm}" for alarm in alarms] if alarms else ["  no alarms"])


def _looks_bfloat16(values: FloatArray) -> bool | None:
    """Say whether all values equal their bfloat16 rounding, by chance a 1 in 65,536 event for a single float32.

    None where that proves nothing: fewer than 30 values, or all of them multiples of 0.25.
    """
    if len(values) < MIN_ROWS or np.all(values % SIMPLE_STEP == 0):
        return None
    as_float32 = values.astype(np.float32)
    # bfloat16 is the upper half of a float32: exact where the lower half is empty.
    return bool(np.all(as_float32 == values) and np.all(as_float32.view(np.uint32) & 0xFFFF == 0))


def _collapse_alarms(report: Mapping[str, Any], measured: FloatArray) -> list[Alarm]:
    num_rows, distinct = len(measured), report["num_distinct"]
    value, share, ratio = report["most_frequent_value"], report["most_frequent_share"], report["spread_ratio"]
    if distinct == 1 < num_rows:
        is_sure = "" if num_rows < MIN_ROWS else ": the model is a constant"
        alarms = [Alarm(AlarmKind.CONSTANT, f"All {num_rows:,} predictions are {value:g}{is_sure}.")]
    else:
        alarms = []
    if num_rows < MIN_ROWS:
        return alarms
    of_references = len(np.unique(measured))
    if 1 < distinct <= max(FEW_DISTINCT_SHARE * num_rows, FEW_DISTINCT_OF_REFERENCES * of_references):
        text = f"{distinct:,} distinct values in {num_rows:,} predictions (the references have {of_references:,})."
        alarms.append(Alarm(AlarmKind.FEW_VALUES, text))
    if share >= BLOCK_SHARE and distinct > 1:
        alarms.append(Alarm(AlarmKind.BLOCK, f"{share:.1%} of the predictions are exactly {value:g}."))
    if ratio is not None and ratio < MIN_SPREAD_RATIO and distinct > 1:
        text = f"The predictions spread {ratio:.3f} times as far as the references: close to a constant."
        alarms.append(Alarm(AlarmKind.LITTLE_SPREAD, text))
    if report["reference_std"] and report["rmse"] >= report["constant_rmse"]:
        text = (
            f"RMSE {report['rmse']:.4f} is no better than the {report['constant_rmse']:.4f} of predicting the mean of "
            "these references everywhere."
        )
        alarms.append(Alarm(AlarmKind.NO_BETTER, text))
    if report["looks_bfloat16"]:
        text = "Every prediction is a bfloat16 number: the head ran, or its output was kept, in bfloat16."
        alarms.append(Alarm(AlarmKind.BFLOAT16, text))
    return alarms


def _label_alarms(report: Mapping[str, Any], values: FloatArray, sides: FloatArray) -> list[str]:
    num_rows = len(values)
    if report["num_distinct"] == 1 and num_rows > 1:
        return [f"All {num_rows:,} labels are {values[0]:g}: there is nothing to learn."]
    if num_rows < MIN_ROWS:
        return []
    if report["num_distinct"] == 2 and not sides.any():
        return ["Two values, {min:g} and {max:g}: classes? hf_ext trains numbers alone, so these too.".format(**report)]
    isolated = _find_isolated(values, sides)
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
    return alarms


def _mixed_units(labels: FloatArray) -> str:
    advice = "Convert all to one unit."
    logs = np.sort(np.log10(labels))
    least = max(2, round(MIN_SIDE * len(logs)))
    gaps = np.diff(logs)[least - 1 : len(logs) - least]  # between neighbours with that many labels on each side
    if len(gaps) and gaps.max() >= UNIT_GAP:
        edge = least + int(np.argmax(gaps))
        below, above = 10 ** logs[edge - 1], 10 ** logs[edge]
        return (
            f"{edge:,} labels are at most {below:.3g}, the other {len(logs) - edge:,} at least {above:.3g}, with none "
            f"between: two units in one column? {advice}"
        )
    num_logarithms = int(np.count_nonzero((labels >= LOGARITHMS[0]) & (labels <= LOGARITHMS[1])))
    beyond = labels[labels >= ABOVE_LOGARITHMS]
    if len(beyond) >= 2 and num_logarithms >= 0.8 * len(labels):
        return (
            f"{num_logarithms:,} labels lie between {LOGARITHMS[0]:g} and {LOGARITHMS[1]:g}, as pKd do, and "
            f"{len(beyond):,} at {beyond.min():.3g} and above: two units in one column, such as pKd and nM? {advice}"
        )
    return ""


def _find_isolated(labels: FloatArray, sides: FloatArray) -> dict[float, str]:
    """Values at either end that several rows share, far from all other labels, each with a sentence.

    Args:
        labels: (n,) finite numbers, 30 or more.
        sides: (n,) of -1, 0, 1; a marked limit is none.
    """
    found = {}
    for value in (float(labels.min()), float(labels.max())):
        num = int(np.count_nonzero((labels == value) & (sides == 0)))
        others = labels[labels != value]
        if num < 2 or len(np.unique(others)) < MIN_DISTINCT:
            continue
        low, high = float(others.min()), float(others.max())
        if max(value - high, low - value) < MIN_ISOLATED_GAP * (high - low):
            continue
        limit = f"<={low:.3g}" if value < low else f">={high:.3g}"
        found[value] = (
            f"{num:,} labels ({num / len(labels):.1%}) are exactly {value:g}, and all others lie between {low:g} and "
            f"{high:g}: written where nothing was measured? Leave these rows out (--filter), or write the limit "
            f"({limit})."
        )
    return found


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
