"""Predictions that spread too far, or sit beside the labels, are mended after training: fitted on held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from scipy.special import log_ndtr

from ..errors import ArgumentError
from ..models.postprocess import KINDS, calibrate, is_ridge_alone
from ._arrays import FloatArray, as_pair, count_not_finite
from .metrics import rmse_at_limits
from .resampling import ResamplingUnits, check_units

NUM_FOLDS = 10
MIN_ROWS = 30  # with exact labels; two weights and an intercept fitted on fewer can be far off for new rows
RIDGE_MARGIN = 1.01  # by which a ridge alone must be better than what is fitted
MIN_UNITS = 10  # a fold each; fewer say little about rows that the fit has not seen
MIN_ISOTONIC_ROWS = 1000  # below, the steps of an isotonic fit follow the noise of single rows

Fit = Callable[[FloatArray, FloatArray, FloatArray], dict[str, Any]]  # columns (n, k), labels, sides -> calibration


@dataclass(frozen=True)
class FittedCalibration:
    """What `fit_calibration` found.

    Attributes:
        calibration: for `hf_ext.models.postprocess.calibrate`; None where predictions are better left as they are.
        num_rows: that it was fitted on.
        rmse_before, rmse_after: label units, on these rows; each prediction calibrated by a fit without its own fold.
        rmse_ridge: of the ridge beside the model, on these rows.
        reason: why there is none; None where there is one.
    """

    calibration: dict[str, Any] | None
    num_rows: int
    rmse_before: float | None = None
    rmse_after: float | None = None
    rmse_ridge: float | None = None
    reason: str | None = None


def fit_calibration(
    predictions: Any,
    labels: Any,
    *,
    kind: str = "line",
    ridge: Any = None,
    bounds: Any = None,
    units: ResamplingUnits | None = None,
    seed: int = 0,
) -> FittedCalibration:
    """Fits a map from predictions to labels, and keeps it only if it helps rows that it was not fitted on.

    That is tried out by cross-fitting in ten folds, which never cut a unit in two. A line leaves every order as it is;
    an isotonic fit may make neighbours equal; with `ridge` the best of a line, a weighted sum of both predictors, with
    weights of 0 or more, and the ridge as it is is taken.

    Args:
        predictions, labels: (n,) or (n, 1), label units, of rows that the model was not trained on.
        kind: "line" or "isotonic", which needs 1,000 rows and is a line where there are fewer.
        ridge: (n,), label units: predictions of a regression beside the model, to stack; None for none.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact), or None. A line is then
            the most likely one under normal noise (a tobit regression).
        units: rows that were held out together (of an antibody, of a cluster); None for rows.
        seed: of the folds.

    Raises:
        ArgumentError: an unknown kind, or isotonic with bounds.
        DataError: lengths do not fit, or a value is not a number.

    Cost: eleven fits per form: some milliseconds; with bounds a second for 10,000 rows.
    """
    if kind not in KINDS:
        raise ArgumentError(f"calibration={kind!r}: allowed are {', '.join(KINDS)}.")
    predicted, measured = as_pair(predictions, labels)
    sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
    if kind == "isotonic" and sides.any():
        raise ArgumentError("calibration='isotonic' takes every label as exact, and some are limits: use 'line'.")
    units = check_units(units, len(measured))
    unit_of_row = np.arange(len(measured)) if units is None else units.unit_of_row
    noun = "rows" if units is None else f"values of {units.column}"
    if reason := _why_impossible(predicted, sides, unit_of_row, noun):
        before = None if count_not_finite(predicted, "predictions") else rmse_at_limits(predicted, measured, sides)
        return FittedCalibration(None, len(measured), before, reason=reason)
    is_isotonic = kind == "isotonic" and len(measured) >= MIN_ISOTONIC_ROWS
    forms: list[tuple[Fit, FloatArray]] = [(_fit_isotonic if is_isotonic else _fit_line, predicted[:, None])]
    if ridge is not None:
        both = np.stack([predicted, as_pair(ridge, measured)[0]], axis=1)
        forms += [(_fit_line, both), (_take_ridge, both)]
    return _choose_form(forms, measured, sides, _draw_folds(unit_of_row, seed))


def apply_calibration(predictions: Any, calibration: dict[str, Any] | None, ridge: Any = None) -> FloatArray:
    """`calibrate` for numpy: any shape, float64 in and out."""
    values = torch.from_numpy(np.asarray(predictions, np.float64))
    beside = None if ridge is None else torch.from_numpy(np.asarray(ridge, np.float64))
    return calibrate(values, calibration, beside).numpy()


def cross_fit_calibration(
    predictions: Any,
    labels: Any,
    calibration: dict[str, Any] | None,
    *,
    ridge: Any = None,
    bounds: Any = None,
    units: ResamplingUnits | None = None,
    seed: int = 0,
) -> FloatArray:
    """Each prediction as calibrated by a fit of the form of `calibration` on the other folds: (n,), label units.

    Its errors are those of rows that no fit has seen; where `calibration` is None predictions are as they were.
    Arguments and cost as `fit_calibration`; `ridge` only where `calibration` stacks it, `units` of the rows.
    """
    predicted, measured = as_pair(predictions, labels)
    if calibration is None:
        return predicted
    sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
    unit_of_row = np.arange(len(measured)) if units is None else units.unit_of_row
    columns = [predicted] if ridge is None else [predicted, as_pair(ridge, measured)[0]]
    if is_ridge_alone(calibration) and calibration["ridge"] == 1:
        return columns[-1]  # nothing of it was fitted on these rows
    fit: Fit = _fit_isotonic if calibration["kind"] == "isotonic" else _fit_line
    return _cross_fit(fit, np.stack(columns, axis=1), measured, sides, _draw_folds(unit_of_row, seed))


def _choose_form(
    forms: list[tuple[Fit, FloatArray]], measured: FloatArray, sides: FloatArray, folds: NDArray[np.int64]
) -> FittedCalibration:
    """The form with the lowest cross-fitted error, fitted on all rows, if that error is below the one without."""
    errors = [rmse_at_limits(_cross_fit(fit, x, measured, sides, folds), measured, sides) for fit, x in forms]
    # The penalty of the ridge was chosen on these rows, so its error is too low here: near it, a mixture is safer.
    margins = [RIDGE_MARGIN if fit is _take_ridge else 1.0 for fit, _ in forms]
    best = int(np.argmin(np.multiply(errors, margins)))
    fit, columns = forms[best]
    found = fit(columns, measured, sides)
    last = forms[-1][1]
    before, of_last = (rmse_at_limits(last[:, i], measured, sides) for i in (0, -1))
    reason = None
    if found["kind"] == "line" and (found["slope"] < 0 or found["slope"] + found.get("ridge", 0.0) <= 0):
        reason = "labels do not rise with predictions"
    elif not errors[best] < before:
        reason = "no better on rows that it was not fitted on"
    of_ridge = of_last if last.shape[1] > 1 else None
    return FittedCalibration(None if reason else found, len(measured), before, errors[best], of_ridge, reason)


def _why_impossible(predicted: FloatArray, sides: FloatArray, unit_of_row: NDArray[np.int64], noun: str) -> str | None:
    if problem := count_not_finite(predicted, "predictions"):
        return problem
    num_rows, num_units = int((sides == 0).sum()), len(np.unique(unit_of_row[sides == 0]))
    exact = " with exact labels" if sides.any() else ""
    if num_rows < MIN_ROWS:
        return f"fewer than {MIN_ROWS} rows{exact} ({num_rows})"
    if num_units < MIN_UNITS:
        return f"fewer than {MIN_UNITS} {noun}{exact} ({num_units})"
    if np.ptp(predicted[sides == 0]) == 0:
        return "all predictions are equal"
    return None


def _draw_folds(unit_of_row: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The fold of each row."""
    return (np.random.default_rng(seed).permutation(int(unit_of_row.max()) + 1) % NUM_FOLDS)[unit_of_row]


def _cross_fit(
    fit: Fit, columns: FloatArray, measured: FloatArray, sides: FloatArray, folds: NDArray[np.int64]
) -> FloatArray:
    """Every prediction as calibrated by a fit on the other folds."""
    mended = columns[:, 0].copy()
    for fold in range(NUM_FOLDS):
        inside, rest = folds == fold, folds != fold
        if np.ptp(columns[rest & (sides == 0), 0]) > 0:
            found = fit(columns[rest], measured[rest], sides[rest])
            ridge = columns[inside, -1] if "ridge" in found else None
            mended[inside] = apply_calibration(columns[inside, 0], found, ridge)
    return mended


def _fit_line(columns: FloatArray, measured: FloatArray, sides: FloatArray) -> dict[str, Any]:
    """Weights of one or two predictors; of two, one that would be negative is left out."""
    weights, intercept = _most_likely_weights(columns, measured, sides)
    if columns.shape[1] == 1:
        return {"kind": "line", "slope": float(weights[0]), "intercept": float(intercept)}
    if weights.min() < 0:
        kept = int(weights.argmax())
        (weight,), intercept = _most_likely_weights(columns[:, [kept]], measured, sides)
        weights = np.where(np.arange(2) == kept, weight, 0.0)
    return {"kind": "line", "slope": float(weights[0]), "intercept": float(intercept), "ridge": float(weights[1])}


def _take_ridge(columns: FloatArray, measured: FloatArray, sides: FloatArray) -> dict[str, Any]:
    """The second predictor as it is: where it is right already, weights fitted on few rows only add noise."""
    return {"kind": "line", "slope": 0.0, "intercept": 0.0, "ridge": 1.0}


def _most_likely_weights(x: FloatArray, y: FloatArray, sides: FloatArray) -> tuple[FloatArray, float]:
    """Least squares; with limits a tobit regression, its noise fitted too, that begins there."""
    exact, centre = sides == 0, x.mean(0)
    spread = np.where(x.std(0) > 0, x.std(0), 1.0)
    columns = np.column_stack([np.ones(len(y)), (x - centre) / spread])
    start = np.linalg.lstsq(columns[exact], y[exact], rcond=None)[0]
    found = start if exact.all() else _fit_tobit(columns, y, sides, start)
    weights = found[1:] / spread
    return weights, float(found[0] - weights @ centre)


def _fit_tobit(columns: FloatArray, y: FloatArray, sides: FloatArray, start: FloatArray) -> FloatArray:
    exact = sides == 0

    def cost(parameters: FloatArray) -> float:
        log_noise = parameters[-1]
        errors = (y - columns @ parameters[:-1]) / np.exp(log_noise)
        tails = log_ndtr(-sides[~exact] * errors[~exact])
        return float(0.5 * errors[exact] @ errors[exact] + exact.sum() * log_noise - tails.sum()) / len(y)

    noise = max(float(np.std((y - columns @ start)[exact])), 1e-6 * float(y.std()) + 1e-12)
    options = {"xatol": 1e-6, "fatol": 1e-10, "maxiter": 2000}
    return minimize(cost, np.append(start, np.log(noise)), method="Nelder-Mead", options=options).x[:-1]


def _fit_isotonic(columns: FloatArray, measured: FloatArray, sides: FloatArray) -> dict[str, Any]:
    x, place, counts = np.unique(columns[:, 0], return_inverse=True, return_counts=True)
    means = np.bincount(place, weights=measured) / counts
    y = isotonic_regression(means, weights=counts).x
    # Of a flat stretch its two ends say it all.
    inner = np.concatenate([[False], (y[1:-1] == y[:-2]) & (y[1:-1] == y[2:]), [False]])
    return {"kind": "isotonic", "x": x[~inner].tolist(), "y": y[~inner].tolist()}
