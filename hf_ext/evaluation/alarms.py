"""Plain sentences about predictions that have collapsed and labels that are not what they seem: likely, not sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..files import Facts, Json
from ..labels import show_names
from .metrics.arrays import Array, FloatArray, IntArray, as_column, as_pair, count_not_finite
from .metrics.rows import MetricValue

MIN_ROWS = 30  # below this, shares and standard deviations are too uncertain to raise an alarm about
MIN_SPREAD_RATIO = 0.1
NEAR_CONSTANT = "close to a constant"
FEW_DISTINCT_SHARE = 0.01
FEW_DISTINCT_OF_REFERENCES = 0.1
BLOCK_SHARE = 0.05  # of rows that share one value: a detection limit or a default rather than a measurement
Examined = tuple[Json, dict[str, str]]  # a report, and alarms by what they are about

SIMPLE_STEP = 0.25  # multiples of it are bfloat16 numbers anyway, so they say nothing about rounding

# Nobody's dissociation constants in M reach a millimolar; a pKd or a fitness in which all are smaller is none.
MOLAR = 1e-3
NANOMOLAR = 100.0  # tables in nM or pM go beyond; ratios to a wild type, which are skewed alike, mostly do not
DECADES = 1e3  # between the smallest and the largest concentration of one table
SKEWED = 3.0  # mean over median: 1 of symmetric labels, above 3 where ln(label) has a standard deviation above 1.5
UNIT_GAP = 2.0  # decades without any label: units differ by three at least, and labels of one unit leave no such hole
MIN_SIDE = 0.02  # of the labels, on each side of the gap


def examine_numbers(predictions: Any, references: Any) -> Examined:
    """Returns what `collapse_report` says of (n,) numbers, and its alarms by what they are about."""
    predicted, measured = as_pair(predictions, references)
    sides = {"predictions": predicted, "references": measured}
    problems = {name: count_not_finite(values, name) for name, values in sides.items()}
    finite = np.isfinite(predicted) & np.isfinite(measured)
    predicted = predicted[finite]
    measured = measured[finite]
    report = _describe(predicted, len(finite))
    of_references = _describe(measured, len(finite))
    reference_std = of_references["std"]
    report |= {
        "reference_std": reference_std,
        "spread_ratio": report["std"] / reference_std if reference_std else None,
        "rmse": float(np.sqrt(np.mean((predicted - measured) ** 2))) if len(measured) else None,
        "looks_bfloat16": _looks_bfloat16(predicted),
    }
    alarms = {f"not finite {name}": f"{problem}." for name, problem in problems.items() if problem}
    return report, {
        **alarms,
        **_collapse_alarms(report, len(measured), of_references["num_distinct"]),
    }


def label_audit(labels: Any, bounds: Sequence[int] | Any | None = None) -> Json:
    """Says what the labels hold: range, ties, censored rows, blocks like detection limits, units that are off.

    Args:
        labels: (n,) or (n, 1) numbers.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above) and 0 (exact), or None: all exact.

    Returns:
        n, min, max, mean, std, num_distinct, tied_share (rows that share their value with another),
        most_frequent_value, most_frequent_share, share_at_min, share_at_max, censored_share, alarms.
        Shares are of the finite rows, None where there are none.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    column = as_column(labels, "labels")
    sides = np.zeros(len(column)) if bounds is None else as_pair(bounds, column)[0]
    problem = count_not_finite(column, "labels")
    finite = np.isfinite(column)
    values = column[finite]
    sides = sides[finite]
    censored = float(np.mean(sides != 0)) if len(values) else None
    alarms = [*([f"{problem}."] if problem else []), *_label_alarms(values, sides)]
    return {
        **_describe(values, len(column)),
        "censored_share": censored,
        "alarms": alarms,
    }


def unit_alarms(labels: FloatArray) -> list[str]:
    """Returns sentences about labels that read as concentrations, or as two units in one column.

    Args:
        labels: (n,) finite numbers; below 30 nothing is said.
    """
    if len(labels) < MIN_ROWS or labels.min() <= 0:
        return []
    logs = np.sort(np.log10(labels))
    least = max(2, round(MIN_SIDE * len(logs)))
    gaps = np.diff(logs)[least - 1 : len(logs) - least]  # between neighbours with that many labels on each side
    if len(gaps) and gaps.max() >= UNIT_GAP:
        edge = least + int(np.argmax(gaps))
        below = 10 ** logs[edge - 1]
        above = 10 ** logs[edge]
        return [
            f"{edge:,} labels are at most {below:.3g}, the other {len(logs) - edge:,} at least {above:.3g}, with none "
            "between: two units in one column? Convert all to one unit."
        ]
    low = float(labels.min())
    high = float(labels.max())
    median = float(np.median(labels))
    is_skewed = high >= DECADES * low and labels.mean() >= SKEWED * median
    if not is_skewed or MOLAR <= high < NANOMOLAR:
        return []
    return [
        f"The labels are positive and spread from {low:.3g} to {high:.3g}, half of them below {median:.3g}, as "
        f"concentrations in {'M' if high < MOLAR else 'nM or pM'}: the weakest binders alone would decide the loss. "
        "Train on -log10 of the value in M (pKd = 9 - log10 of nM)."
    ]


def _looks_bfloat16(values: FloatArray) -> bool | None:
    """Says whether all values equal their bfloat16 rounding, by chance a 1 in 65,536 event for a single float32.

    None where that proves nothing: fewer than 30 values, or all of them multiples of 0.25.
    """
    if len(values) < MIN_ROWS or np.all(values % SIMPLE_STEP == 0):
        return None
    as_float32 = values.astype(np.float32)
    # bfloat16 is the upper half of a float32: exact where the lower half is empty.
    return bool(np.all(as_float32 == values) and np.all(as_float32.view(np.uint32) & 0xFFFF == 0))


def _collapse_alarms(report: Facts, num_rows: int, of_references: int) -> dict[str, str]:
    distinct = report["num_distinct"]
    constant = report["reference_std"]
    value = report["most_frequent_value"]
    most = report["most_frequent_share"]
    ratio = report["spread_ratio"]
    if num_rows < MIN_ROWS:
        return {"one value": f"All {num_rows:,} predictions are {value:g}."} if distinct == 1 < num_rows else {}
    alarms = {}
    if distinct == 1:
        alarms["one value"] = f"All {num_rows:,} predictions are {value:g}: the model is a constant."
    elif distinct <= max(FEW_DISTINCT_SHARE * num_rows, FEW_DISTINCT_OF_REFERENCES * of_references):
        there = f"(the references have {of_references:,})"
        alarms["few values"] = f"Collapsed: {distinct:,} distinct values in {num_rows:,} predictions {there}."
    if distinct > 1 and most >= BLOCK_SHARE:
        alarms["one value often"] = f"{most:.1%} of the predictions are exactly {value:g}."
    if distinct > 1 and ratio is not None and ratio < MIN_SPREAD_RATIO:
        alarms["little spread"] = f"The predictions spread {ratio:.3f} times as far as the references: {NEAR_CONSTANT}."
    if 0 < constant <= report["rmse"]:
        than = f"{constant:.4f} of predicting the mean of these references everywhere"
        alarms["no better"] = f"RMSE {report['rmse']:.4f} is no better than the {than}."
    if report["looks_bfloat16"]:
        ran = "the head ran, or its output was kept, in bfloat16"
        alarms["bfloat16"] = f"Every prediction is a bfloat16 number: {ran}."
    return alarms


def examine_probabilities(
    names: tuple[str, ...],
    values: Array,
    shares: FloatArray,
    loss: MetricValue,
    constant: MetricValue,
    counted: tuple[IntArray, IntArray] | None = None,
) -> Examined:
    """Returns what `collapse_report` says of probabilities, (n, outputs), and its alarms by what they are about.

    Args:
        names: of the outputs.
        shares: of each name in the labels.
        loss, constant: log loss of the values, and of these shares.
        counted: of classes how often each is the label, and how often it is predicted.
    """
    num = len(values)
    report: Json = {
        "n": num,
        "log_loss": loss.known,
        "reference_log_loss": constant.known,
    }
    report |= {"spread_ratio": None, "num_distinct": None, "never_predicted": []}
    if loss.undefined:
        return report, {"not finite predictions": f"{loss.undefined}."}
    if variance := np.nansum(shares * (1 - shares)):
        report["spread_ratio"] = float(np.sqrt(np.var(values, axis=0, dtype=np.float64).sum() / variance))
    if counted is not None:
        occurs, called = counted
        report["num_distinct"] = int(np.count_nonzero(called))
        report["never_predicted"] = [names[j] for j in np.flatnonzero((occurs >= MIN_ROWS) & (called == 0))]
    if num < MIN_ROWS or not variance:
        return report, {}
    alarms = {}
    if report["num_distinct"] == 1:
        alarms["one value"] = f"All {num:,} predictions are {names[int(values[0].argmax())]}: the model is a constant."
    elif never := report["never_predicted"]:
        named = show_names(never)
        alarms["never predicted"] = f"Never predicted, though {MIN_ROWS} labels or more are it: {named}."
    if (ratio := report["spread_ratio"]) < MIN_SPREAD_RATIO:
        alarms["little spread"] = f"The probabilities spread {ratio:.3f} times as far as the labels: {NEAR_CONSTANT}."
    is_named_alone = np.isin(values, (0, 1)).all()  # names without probabilities, each of which counts as certain
    if loss.value >= constant.value and not is_named_alone:
        than = f"{constant.value:.4f} of predicting the shares in these labels everywhere"
        alarms["no better"] = f"Log loss {loss.value:.4f} is no better than the {than}."
    return report, alarms


def _label_alarms(values: FloatArray, sides: FloatArray) -> list[str]:
    distinct = np.unique(values)
    if not len(values):
        return ["There are no labels."]
    if len(distinct) == 1 < len(values):
        return [f"All {len(values):,} labels are {values[0]:g}: there is nothing to learn."]
    if len(values) < MIN_ROWS:
        return []
    if len(distinct) == 2 and not sides.any():
        return [
            f"Two values, {distinct[0]:g} and {distinct[1]:g}: a regression is fitted to them, of which RMSE and "
            "Spearman say little. If these are classes, give --task classification."
        ]
    alarms = unit_alarms(values)
    for value, sign, kind in (
        (distinct[0], "<=", "lowest"),
        (distinct[-1], ">=", "highest"),
    ):
        # Rows that already say which side the truth lies on are handled; the rest pretend to be exact.
        num = int(np.count_nonzero((values == value) & (sides == 0)))
        if num >= BLOCK_SHARE * len(values):
            alarms.append(
                f"{num / len(values):.1%} of the labels ({num:,} of {len(values):,}) are exactly {value:g}, the {kind} "
                f"value, and not marked as censored: a detection limit? If so, write them as {sign}{value:g}; if "
                "nothing was measured there, leave them out."
            )
    return alarms


def _describe(values: FloatArray, num_rows: int) -> Json:
    """Describes range, std and ties of the finite ones of `num_rows` numbers; None where there are none."""
    if not len(values):
        nothing: Json = dict.fromkeys(_describe(np.zeros(1), 1))
        return {**nothing, "n": num_rows, "num_distinct": 0}
    distinct, counts = np.unique(values, return_counts=True)
    shares = counts / len(values)
    top = int(np.argmax(counts))  # of equally frequent ones the smallest
    return {
        "n": num_rows,
        "min": float(distinct[0]),
        "max": float(distinct[-1]),
        "mean": float(values.mean()),
        "std": 0.0 if len(distinct) == 1 else float(values.std()),
        "num_distinct": len(distinct),
        "tied_share": float(counts[counts > 1].sum() / len(values)),
        "most_frequent_value": float(distinct[top]),
        "most_frequent_share": float(shares[top]),
        "share_at_min": float(shares[0]),
        "share_at_max": float(shares[-1]),
    }
