"""After training, by held-out rows: a line through predictions that spread too far, and how wide intervals must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..models.calibration import calibrate
from ._arrays import FloatArray, as_column, as_pair, count_not_finite
from .metrics import rmse_at_limits
from .resampling import ResamplingUnits, check_units

NUM_FOLDS = 10
MIN_ROWS = 30  # with exact labels; two weights and an intercept fitted on fewer can be far off for new rows
MIN_UNITS = 10  # a fold each; fewer say little about rows that the fit has not seen

LEVELS = (*(round(0.01 * i, 2) for i in range(1, 100)), 0.995, 0.999)  # of prediction intervals
ROUNDING = 1e-9  # of sums of weights


@dataclass(frozen=True)
class FittedCalibration:
    """What `fit_calibration` found.

    Attributes:
        calibration: for `hf_ext.models.calibration.calibrate`; None where predictions are better left as they are.
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


def fit_calibration(predictions: Any, labels: Any, *, ridge: Any = None, **options: Any) -> FittedCalibration:
    """Fits a line from predictions to labels, and keeps it only if it helps rows that it was not fitted on.

    That is tried out by cross-fitting in ten folds, which never cut a unit in two. A line leaves every order as it is;
    with `ridge` the better of a line and a weighted sum of both predictors, with weights of 0 or more, is taken.

    Args:
        predictions, labels: (n,) or (n, 1), label units, of rows that the model was not trained on.
        ridge: (n,), label units: predictions of a regression beside the model, to stack; None for none.
        options: `bounds`, (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact), or None: only
            exact labels are fitted, and in the errors that decide, a prediction beyond a limit is no error. `units`,
            rows that were held out together (of an antibody, of a cluster), None for rows. `seed` of the folds.

    Raises:
        DataError: lengths do not fit, or a value is not a number.

    Cost: eleven fits per form: some milliseconds.
    """
    rows = _Rows.of(predictions, labels, ridge, **options)
    if reason := rows.why_impossible():
        before = None if count_not_finite(rows.columns[:, 0], "predictions") else rows.rmse(rows.columns[:, 0])
        return FittedCalibration(None, len(rows.labels), before, reason=reason)
    forms = range(1, rows.columns.shape[1] + 1)  # columns: a line, and a sum with the ridge
    errors = [rows.rmse(rows.cross_fit(num_columns)) for num_columns in forms]
    best = int(np.argmin(errors))
    found = _fit_line(rows.columns[rows.is_exact, : forms[best]], rows.labels[rows.is_exact])
    before, reason = rows.rmse(rows.columns[:, 0]), None
    if found["slope"] < 0 or found["slope"] + found.get("ridge", 0.0) <= 0:
        reason = "labels do not rise with predictions"
    elif not errors[best] < before:
        reason = "no better on rows that it was not fitted on"
    of_ridge = None if ridge is None else rows.rmse(rows.columns[:, 1])
    return FittedCalibration(None if reason else found, len(rows.labels), before, errors[best], of_ridge, reason)


def apply_calibration(predictions: Any, calibration: dict[str, Any] | None, ridge: Any = None) -> FloatArray:
    """`calibrate` for numpy: any shape, float64 in and out."""
    return calibrate(np.asarray(predictions, np.float64), calibration, ridge)


def cross_fit_calibration(
    predictions: Any, labels: Any, calibration: dict[str, Any] | None, *, ridge: Any = None, **options: Any
) -> FloatArray:
    """Each prediction as calibrated by a fit of the form of `calibration` on the other folds: (n,), label units.

    Its errors are those of rows that no fit has seen; where `calibration` is None predictions are as they were.
    Arguments and cost as `fit_calibration`; `ridge` only where `calibration` stacks it, `units` of the rows.
    """
    rows = _Rows.of(predictions, labels, ridge, **options)
    if calibration is None:
        return rows.columns[:, 0]
    return rows.cross_fit(rows.columns.shape[1])


@dataclass(frozen=True)
class _Rows:
    """Predictions of the model, and of a ridge beside it, (n, 1 or 2); labels, their limits and folds, (n,) each."""

    columns: FloatArray
    labels: FloatArray
    sides: FloatArray
    unit_of_row: NDArray[np.int64]
    folds: NDArray[np.int64]
    noun: str

    @classmethod
    def of(
        cls, predictions: Any, labels: Any, ridge: Any, bounds: Any = None, units: Any = None, seed: int = 0
    ) -> _Rows:
        predicted, measured = as_pair(predictions, labels)
        columns = [predicted, *([] if ridge is None else [as_pair(ridge, measured)[0]])]
        sides = np.zeros(len(measured)) if bounds is None else as_pair(bounds, measured)[0]
        units = check_units(units, len(measured))
        unit_of_row = np.arange(len(measured)) if units is None else units.unit_of_row
        fold_of_unit = np.random.default_rng(seed).permutation(int(unit_of_row.max(initial=-1)) + 1) % NUM_FOLDS
        noun = "rows" if units is None else f"values of {units.column}"
        return cls(np.stack(columns, axis=1), measured, sides, unit_of_row, fold_of_unit[unit_of_row], noun)

    @property
    def is_exact(self) -> NDArray[np.bool_]:
        return self.sides == 0

    def rmse(self, predicted: FloatArray) -> float:
        return rmse_at_limits(predicted, self.labels, self.sides)

    def why_impossible(self) -> str | None:
        predicted = self.columns[:, 0]
        if problem := count_not_finite(predicted, "predictions"):
            return problem
        num_rows, num_units = int(self.is_exact.sum()), len(np.unique(self.unit_of_row[self.is_exact]))
        exact = "" if self.is_exact.all() else " with exact labels"
        if num_rows < MIN_ROWS:
            return f"fewer than {MIN_ROWS} rows{exact} ({num_rows})"
        if num_units < MIN_UNITS:
            return f"fewer than {MIN_UNITS} {self.noun}{exact} ({num_units})"
        return "all predictions are equal" if np.ptp(predicted[self.is_exact]) == 0 else None

    def cross_fit(self, num_columns: int) -> FloatArray:
        """Every prediction as calibrated by a fit on the other folds."""
        columns = self.columns[:, :num_columns]
        mended = columns[:, 0].copy()
        for fold in range(NUM_FOLDS):
            inside, fitted = self.folds == fold, (self.folds != fold) & self.is_exact
            if np.ptp(columns[fitted, 0]) > 0:
                found = _fit_line(columns[fitted], self.labels[fitted])
                ridge = columns[inside, -1] if "ridge" in found else None
                mended[inside] = apply_calibration(columns[inside, 0], found, ridge)
        return mended


def _fit_line(columns: FloatArray, labels: FloatArray) -> dict[str, Any]:
    """Least squares on one or two predictors; of two, one whose weight would be negative is left out."""
    weights, intercept = _least_squares(columns, labels)
    if columns.shape[1] == 1:
        return {"kind": "line", "slope": float(weights[0]), "intercept": intercept}
    if weights.min() < 0:
        kept = int(weights.argmax())
        (weight,), intercept = _least_squares(columns[:, [kept]], labels)
        weights = np.where(np.arange(2) == kept, weight, 0.0)
    return {"kind": "line", "slope": float(weights[0]), "intercept": intercept, "ridge": float(weights[1])}


def _least_squares(x: FloatArray, y: FloatArray) -> tuple[FloatArray, float]:
    centre, spread = x.mean(0), np.where(x.std(0) > 0, x.std(0), 1.0)
    found = np.linalg.lstsq(np.column_stack([np.ones(len(y)), (x - centre) / spread]), y, rcond=None)[0]
    weights = found[1:] / spread
    return weights, float(found[0] - weights @ centre)


# --- prediction intervals -------------------------------------------------------------------------------------------


def conformal_half_widths(
    residuals: Any, levels: FloatArray | tuple[float, ...] = LEVELS, *, units: ResamplingUnits | None = None
) -> FloatArray:
    """Half widths of intervals that hold the truth of a further row with the probability that their level says.

    Of n rows it is the ceil((n + 1) level)-th smallest absolute residual: the further row counts as one more, and may
    be the worst. Whatever the errors look like, that holds for rows that could as well have stood among these. Rows of
    one antibody cannot: they share what a model gets wrong. With `units` each unit weighs as one, shared evenly by its
    rows, beside the one more unit that the further row is of; then it holds for a row of a new unit, averaged over
    units, not for each. Fitted by units that are rows, both are the same to the bit.

    Sources: V. Vovk, A. Gammerman, G. Shafer, Algorithmic Learning in a Random World (2005); Y. Lee, R. F. Barber,
    R. Willett, Distribution-free inference with hierarchical data (2023), arXiv:2306.06342, their HCP; R. Dunn,
    L. Wasserman, A. Ramdas, Distribution-free prediction sets for two-layer hierarchical models (2022).

    Args:
        residuals: (n,) truth less prediction, of rows that neither model nor calibration was fitted on; the sign plays
            no part.
        levels: each above 0, below 1.
        units: of the rows; None: each row by itself.

    Returns:
        One half width per level, (levels,), in the unit of the residuals; infinite where a level needs more rows, or
        units, than there are (`hf_ext.models.prediction_intervals.least_units`).

    Raises:
        DataError: a residual is not finite, or units are of another number of rows.

    Cost: one sort.
    """
    errors = np.abs(as_column(residuals, "residuals"))
    if problem := count_not_finite(errors, "residuals"):
        raise DataError(f"{problem}: intervals need finite ones.")
    units = check_units(units, len(errors))
    num_units = len(errors) if units is None else units.num_units
    sizes = np.ones(len(errors)) if units is None else units.sizes[units.unit_of_row]
    order = np.argsort(errors, kind="stable")
    held = np.cumsum(1 / sizes[order]) / (num_units + 1)
    place = np.searchsorted(held, np.asarray(levels, np.float64) - ROUNDING)
    return np.append(errors[order], np.inf)[place]
