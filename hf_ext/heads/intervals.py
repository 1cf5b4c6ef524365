"""Prediction intervals: fitted on validation rows, stored with the model, read from it, checked on test rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data import label_array, read_bounds
from ..errors import ArgumentError, DataError
from ..evaluation import (
    FloatArray,
    ResamplingGroups,
    as_column,
    check_groups,
    count_not_finite,
    score_mean,
    unpack_labelled,
)
from ..files import Facts, Json
from ..text import format_cell, share

if TYPE_CHECKING:
    from ..trainer import FastTrainer

LEVELS = (*(round(0.01 * i, 2) for i in range(1, 100)), 0.995, 0.999)
ROUNDING = 1e-9  # of sums of weights
COMPARED = 0.8  # level at which widths that differ are compared with one for all rows
MIN_COMPARED = 20  # rows, or groups
SHOWN = (
    0.9,
    0.8,
    0.5,
)  # levels of which the first that there is has its coverage measured


def fit_intervals(
    trainer: FastTrainer,
    rows: Any,
    groups: ResamplingGroups | None,
    predicted: Any = None,
    stds: FloatArray | None = None,
) -> Json:
    """Gives `trainer.model` the half widths of its prediction intervals, by split conformal prediction.

    What they rest on is how far predictions are from the labels of validation rows. The best checkpoint was chosen on
    these rows too, and an ensemble's weights, which is not undone. A label that is a limit has no known distance: such
    rows are left out, and intervals speak about rows that the assay measures.

    With `stds` the distances are divided by them, and so intervals are wide where these are, if that is shown to give
    better intervals (`scales_help`); else one width is for all rows.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` is trained. Called by all processes.
        rows: of validation.
        groups: of these rows, from `find_groups`: then intervals are for a row of a further group.
        predicted: (n,) of an ensemble, by members that were not fitted on these rows; None: the model's own.
        stds: (n,) standard deviations of `predicted`; None: not known.

    Returns:
        What is stored, JSON-able, see `half_width`: `reason` alone where there are none.

    Cost: a pass over the validation rows.
    """
    stored = trainer.model.config.prediction_intervals = _fit(trainer, rows, groups, predicted, stds)
    return stored


def _fit(
    trainer: FastTrainer, rows: Any, groups: ResamplingGroups | None, predicted: Any, stds: FloatArray | None
) -> Json:
    if reason := trainer.model.config.kind.why_no_intervals:
        return {"reason": reason}
    if trainer.model.config.loss == "ranking":
        return {"reason": "the loss ranks rows, and predictions have no unit"}
    if not hasattr(rows, "__len__"):
        return {"reason": "validation rows were a stream, and what was held out together is not known"}
    groups = check_groups(groups, len(rows))
    is_exact = find_exact(rows)
    if not is_exact.any():
        return {"reason": "every label of the validation rows is a limit, and none tells how far a prediction is off"}
    if predicted is None:
        predicted, labels = unpack_labelled(trainer.predict(rows), trainer.model.config.kind)
    else:
        labels = label_array(rows)
    of_exact = None if groups is None else groups.select(is_exact)
    residuals = (labels - predicted)[is_exact]
    scales = np.ones(len(residuals)) if stds is None else stds[is_exact]
    is_scaled = scales_help(residuals, scales, of_exact)
    widths = conformal_half_widths(residuals / scales if is_scaled else residuals, groups=of_exact)
    known = int(np.isfinite(widths).sum())
    return {
        "levels": list(LEVELS[:known]),
        "half_widths": widths[:known].tolist(),
        "num_rows": int(is_exact.sum()),
        "num_limits": int((~is_exact).sum()),  # rows left out
        "unit": None if of_exact is None else of_exact.column,
        "num_units": None if of_exact is None else of_exact.num_groups,
        "times_std": is_scaled,
    }


def scales_help(residuals: FloatArray, scales: FloatArray, groups: ResamplingGroups | None = None) -> bool:
    """Returns whether intervals are better, beyond chance, if they are as wide as `scales` say.

    Widths from one half of the rows or groups are scored on the other by their width plus what they miss by, times 2 /
    (1 - level): the interval score of T. Gneiting and A. Raftery (2007). False of fewer than 20 rows or groups.

    Args:
        residuals, scales: (n,) of rows that the model was not fitted on.
        groups: of these rows; None: each row by itself.
    """
    units = np.arange(len(residuals)) if groups is None else groups.group_of_row
    num_units = units.max() + 1
    if num_units < MIN_COMPARED or np.ptp(scales) == 0:
        return False
    is_even = np.random.default_rng(0).permutation(num_units)[units] % 2 == 0
    gains = np.zeros(len(residuals))
    for fitted in (is_even, ~is_even):
        one_width = _score_unseen(residuals, np.ones(len(scales)), fitted)
        gains += one_width - _score_unseen(residuals, scales, fitted)
    low = score_mean(gains, seed=0, groups=groups)["low"]
    return low is not None and bool(low > 0)


def _score_unseen(residuals: FloatArray, scales: FloatArray, fitted: np.ndarray) -> FloatArray:
    (reach,) = conformal_half_widths((residuals / scales)[fitted], (COMPARED,))
    widths = reach * scales
    missed = np.maximum(np.abs(residuals) - widths, 0)
    return np.where(fitted, 0, 2 * widths + 2 / (1 - COMPARED) * missed)


def conformal_half_widths(
    residuals: Any,
    levels: FloatArray | tuple[float, ...] = LEVELS,
    *,
    groups: ResamplingGroups | None = None,
) -> FloatArray:
    """Computes half widths of intervals that hold the truth of a further row with the probability of their level.

    Of n rows it is the ceil((n + 1) level)-th smallest absolute residual: the further row counts as one more, and may
    be the worst. Whatever the errors look like, that holds for rows that could as well have stood among these. Rows of
    one antibody cannot: they share what a model gets wrong. With `groups` each group weighs as one, shared evenly by
    its rows, beside the one more group that the further row is of; then it holds for a row of a new group, averaged
    over groups, not for each. Fitted by groups that are rows, both are the same to the bit.

    Sources: V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World (2005); Y. Lee, R. F. Barber,
    R. Willett, Distribution-free inference with hierarchical data (2023), arXiv:2306.06342, their HCP; R. Dunn,
    L. Wasserman, A. Ramdas, Distribution-free prediction sets for two-layer hierarchical models (2022).

    Args:
        residuals: (n,) truth less prediction, of rows that the model was not fitted on; the sign plays
            no part.
        levels: each above 0, below 1.
        groups: of the rows; None: each row by itself.

    Returns:
        One half width per level, (levels,), in the unit of the residuals; infinite where a level needs more rows, or
        groups, than there are (`least_groups`).

    Raises:
        DataError: a residual is not finite, or groups are of another number of rows.

    Cost: one sort.
    """
    errors = np.abs(as_column(residuals, "residuals"))
    if problem := count_not_finite(errors, "residuals"):
        raise DataError(f"{problem}: intervals need finite ones.")
    groups = check_groups(groups, len(errors))
    num_groups = len(errors) if groups is None else groups.num_groups
    sizes = np.ones(len(errors)) if groups is None else groups.sizes[groups.group_of_row]
    order = np.argsort(errors, kind="stable")
    held = np.cumsum(1 / sizes[order]) / (num_groups + 1)
    place = np.searchsorted(held, np.asarray(levels, np.float64) - ROUNDING)
    return np.append(errors[order], np.inf)[place]


def half_width(stored: Facts | None, level: float, stds: FloatArray | float | None = 1.0) -> Any:
    """Returns half the width of an interval around a prediction, label units: of all rows, or if
    `stored["times_std"]` in proportion to `stds`, of each.

    Args:
        stored: `AffinityConfig.prediction_intervals`: `levels`, rising, each with one of `half_widths`, and what stands
            behind them (`num_rows`, `num_limits` left out, `unit`, `num_units`); or `reason`, why there are none.
        level: share of rows that the interval is to hold, above 0, below 1; between two stored ones the higher counts.

    Raises:
        ArgumentError: not a level; the model has no intervals, or none of this level.
    """
    if not 0 < level < 1:  # also NaN
        raise ArgumentError(f"An interval of level {level:g}: give the share of rows that it is to hold, 0.9 say.")
    if stored is None:
        raise ArgumentError(
            f"An interval of level {level:g}: this model holds no residuals of validation rows. Run `hf-ext train` "
            "again with the arguments of its run: training that has ended is not repeated where its last checkpoint is "
            "there (--resume auto)."
        )
    if stored.get("reason"):
        raise ArgumentError(f"An interval of level {level:g}: this model has none: {stored['reason']}.")
    known = zip(stored["levels"], stored["half_widths"])
    found = next((width for at, width in known if at >= level - 1e-9), None)
    if found is None:
        highest = stored["levels"][-1]
        noun = "rows" if stored.get("unit") is None else f"values of {stored['unit']}"
        raise ArgumentError(
            f"An interval of level {level:g} needs at least {least_groups(level):,} {noun} for validation; "
            f"behind this model's intervals are {describe_basis(stored)}, which allow {highest:g} at most. Ask for "
            "less, or train with more to validate on."
        )
    return found if stds is None or not stored.get("times_std") else found * stds


def least_groups(level: float) -> int:
    """Returns how many rows, or groups that were held out together, an interval of a level needs at least."""
    return math.ceil(level / (1 - level) - 1e-9)


def describe_basis(stored: Facts) -> str:
    """Describes 120 validation rows; or 12 values of heavy in 120 validation rows."""
    rows = f"{stored['num_rows']:,} validation rows" + (" with exact labels" if stored.get("num_limits") else "")
    return rows if stored.get("unit") is None else f"{stored['num_units']:,} values of {stored['unit']} in {rows}"


def score_intervals(
    stored: Facts,
    predictions: np.ndarray,
    labels: np.ndarray,
    rows: Any,
    groups: ResamplingGroups | None,
    stds: FloatArray | None = None,
) -> Json:
    """Scores intervals: which share of test rows they hold.

    Args:
        stored: from `fit_intervals`.
        predictions, labels: (n,), label units, of the test rows.
        rows: the test split.
        groups: of these rows, from `find_groups`.
        stds: (n,) of the predictions, where intervals are as wide as these say.

    Returns:
        JSON-able: `stored` without its table; `level`, the highest of `SHOWN` that there is, `width` (label units, the
        mean over rows) and `coverage`; `notes`, sentences for reports.
    """
    if stored.get("reason"):
        return {
            "reason": stored["reason"],
            "notes": [f"No prediction intervals: {stored['reason']}."],
        }
    is_exact = find_exact(rows)
    errors = np.abs(labels - predictions)[is_exact]
    highest = stored["levels"][-1]
    basis = {name: value for name, value in stored.items() if name not in ("levels", "half_widths")}
    level = next((level for level in SHOWN if level <= highest), None)
    beside = f"`hf-ext predict --interval {level or highest:g}` writes them, from {describe_basis(stored)}"
    if level is None or not len(errors):
        return {
            **basis,
            "notes": [f"Prediction intervals: none of a level above {highest:g} ({beside})."],
        }
    widths = half_width(stored, level, 1.0 if stds is None else stds[is_exact])
    width = float(np.mean(widths))
    how = "in proportion to prediction_std, on average" if stored.get("times_std") else "at a width of"
    there = None if groups is None else check_groups(groups.select(is_exact), len(errors))
    held = score_mean(errors <= widths, seed=0, groups=there)
    ends = "" if held["low"] is None else f" [{share(held['low'])}, {share(held['high'])}]"
    of = f"{held['n']:,} test rows{' with exact labels' if stored['num_limits'] else ''}"
    text = (
        f"Prediction intervals of {share(level)} held {share(held['value'])}{ends} of {of}, {how} "
        f"{format_cell(2 * width)} ({beside})."
    )
    return {
        **basis,
        "level": level,
        "width": 2 * width,
        "coverage": held,
        "notes": [text],
    }


def find_exact(rows: Any) -> np.ndarray:
    """Finds rows whose label is no limit: (n,), bool."""
    bounds = read_bounds(rows)
    return np.ones(len(rows), bool) if bounds is None else bounds == 0
