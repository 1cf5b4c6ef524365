"""Predictions that spread too far, or sit beside the labels, are mended after training: fitted on held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, minimize
from scipy.special import log_ndtr

from ..errors import ArgumentError
from ..models.calibration import KINDS, calibrate
from ._arrays import FloatArray, as_groups, as_pair, count_not_finite
from .limits import rmse_at_limits

NUM_FOLDS = 10
MIN_UNITS = 10  # a fold each; fewer say little about rows that the fit has not seen
MIN_ISOTONIC_ROWS = 1000  # below, the steps of an isotonic fit follow the noise of single rows

_Fit = Callable[[FloatArray, FloatArray, FloatArray], dict[str, Any]]


@dataclass(frozen=True)
class FittedCalibration:
    """What `fit_calibration` found.

    Attributes:
        calibration: for `hf_ext.models.calibration.calibrate`; None where predictions are better left as they are.
        num_rows: that it was fitted on.
        rmse_before, rmse_after: label units, on these rows; each prediction calibrated by a fit without its own fold.
        reason: why there is none; None where there is one.
    """

    calibration: dict[str, Any] | None
    num_rows: int
    rmse_before: float | None = None
    rmse_after: float | None = None
    reason: str | None = None


def fit_calibration(
    predictions: Any,
    labels: Any,
    *,
    kind: str = "line",
    bounds: Any = None,
    units: Sequence[Any] | NDArray[Any] | None = None,
    seed: int = 0,
) -> FittedCalibration:
    """Fits a map from predictions to labels, and keeps it only if it helps rows that it was not fitted on.

    That is tried out by cross-fitting in ten folds, which never cut a unit in two. A line leaves every order as it is;
    an isotonic fit may make neighbours equal.

    Args:
        predictions, labels: (n,) or (n, 1), label units, of rows that the model was not trained on.
        kind: "line" or "isotonic", which needs 1,000 rows and is a line where there are fewer.
        bounds: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact), or None. A line is then
            the most likely one under normal noise (a tobit regression).
        units: (n,) names of what was held out together (antibody, cluster); None for rows.
        seed: of the folds.

    Raises:
        ArgumentError: an unknown kind, or isotonic with bounds.
        DataError: lengths do not fit, or a value is not a number.

    Cost: eleven fits: some milliseconds; with bounds 0.3 s for 10,000 rows.
    """
    if kind not in KINDS:
        raise ArgumentError(f"calibration={kind!r}: allowed are {', '.join(KINDS)}.")
    predicted, measured = as_pair(predictions, labels)
    sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
    if kind == "isotonic" and sides.any():
        raise ArgumentError("calibration='isotonic' takes every label as exact, and some are limits: use 'line'.")
    names = np.arange(len(measured)) if units is None else as_groups(units, len(measured))
    none = partial(FittedCalibration, None, len(measured))
    if reason := _why_impossible(predicted, measured, sides, names):
        return none(reason=reason)
    is_isotonic = kind == "isotonic" and len(measured) >= MIN_ISOTONIC_ROWS
    fit: _Fit = _fit_isotonic if is_isotonic else _fit_line
    found = fit(predicted, measured, sides)
    if found["kind"] == "line" and found["slope"] <= 0:
        return none(reason=f"labels do not rise with predictions (slope {found['slope']:.3g})")
    mended = _cross_fit(fit, predicted, measured, sides, names, seed)
    before, after = (rmse_at_limits(each, measured, sides) for each in (predicted, mended))
    if not after < before:
        return none(before, after, "no better on rows that it was not fitted on")
    return FittedCalibration(found, len(measured), before, after)


def apply_calibration(predictions: Any, calibration: dict[str, Any] | None) -> FloatArray:
    """`calibrate` for numpy: any shape, float64 in and out."""
    return calibrate(torch.from_numpy(np.asarray(predictions, np.float64)), calibration).numpy()


def _why_impossible(predicted: FloatArray, measured: FloatArray, sides: FloatArray, names: Any) -> str | None:
    if problem := count_not_finite(predicted, "predictions"):
        return problem
    num_units = len(np.unique(names[sides == 0]))
    if num_units < MIN_UNITS:
        exact = " with exact labels" if sides.any() else ""
        return f"{num_units} rows or groups{exact} are too few; {MIN_UNITS} are needed"
    if np.ptp(predicted[sides == 0]) == 0:
        return "all predictions are equal"
    return None


def _cross_fit(
    fit: _Fit, predicted: FloatArray, measured: FloatArray, sides: FloatArray, names: Any, seed: int
) -> FloatArray:
    """Every prediction as calibrated by a fit on the other folds."""
    unit_of_row = np.unique(names, return_inverse=True)[1]
    num_units = int(unit_of_row.max()) + 1
    fold_of_unit = np.random.default_rng(seed).permutation(num_units) % NUM_FOLDS
    folds, mended = fold_of_unit[unit_of_row], predicted.copy()
    for fold in range(NUM_FOLDS):
        inside, rest = folds == fold, folds != fold
        if np.ptp(predicted[rest & (sides == 0)]) > 0:
            mended[inside] = apply_calibration(predicted[inside], fit(predicted[rest], measured[rest], sides[rest]))
    return mended


def _fit_line(predicted: FloatArray, measured: FloatArray, sides: FloatArray) -> dict[str, Any]:
    exact = sides == 0
    slope, intercept = _least_squares(predicted[exact], measured[exact])
    if not exact.all():
        slope, intercept = _most_likely_line(predicted, measured, sides, slope, intercept)
    return {"kind": "line", "slope": float(slope), "intercept": float(intercept)}


def _least_squares(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    centred = x - x.mean()
    slope = centred @ (y - y.mean()) / (centred @ centred)
    return float(slope), float(y.mean() - slope * x.mean())


def _most_likely_line(
    x: FloatArray, y: FloatArray, sides: FloatArray, slope: float, intercept: float
) -> tuple[float, float]:
    """Tobit regression with its noise fitted too, from the least-squares line of the exact rows."""
    exact, centre, spread = sides == 0, x.mean(), x.std()
    scaled = (x - centre) / spread

    def cost(parameters: FloatArray) -> float:
        level, rise, log_noise = parameters
        errors = (y - level - rise * scaled) / np.exp(log_noise)
        tails = log_ndtr(-sides[~exact] * errors[~exact])
        return float(0.5 * errors[exact] @ errors[exact] + exact.sum() * log_noise - tails.sum()) / len(x)

    noise = max(float(np.std((y - slope * x - intercept)[exact])), 1e-6 * float(y.std()) + 1e-12)
    start = np.array([intercept + slope * centre, slope * spread, np.log(noise)])
    level, rise, _ = minimize(cost, start, method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10}).x
    return rise / spread, level - rise * centre / spread


def _fit_isotonic(predicted: FloatArray, measured: FloatArray, sides: FloatArray) -> dict[str, Any]:
    x, place, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    means = np.bincount(place, weights=measured) / counts
    y = isotonic_regression(means, weights=counts).x
    # Of a flat stretch its two ends say it all.
    inner = np.concatenate([[False], (y[1:-1] == y[:-2]) & (y[1:-1] == y[2:]), [False]])
    return {"kind": "isotonic", "x": x[~inner].tolist(), "y": y[~inner].tolist()}
