"""Prediction intervals of a trained model: fitted on the validation rows, stored with it, checked on the test rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..evaluation.calibration import LEVELS, conformal_half_widths, cross_fit_calibration
from ..evaluation.resampling import ResamplingUnits, check_units
from ..evaluation.row_metrics import unpack_labelled
from ..evaluation.scores import score_mean
from ..models.postprocess import describe_basis, half_width
from ..reporting.units import format_cell, share
from .calibrating import ridge_part, uncalibrated
from .rows import read_bounds

SHOWN = (0.9, 0.8, 0.5)  # levels of which the first that there is has its coverage measured


def fit_intervals(trainer: Any, rows: Any, units: ResamplingUnits | None) -> dict[str, Any]:
    """Gives `trainer.model` the half widths of its prediction intervals, by split conformal prediction.

    What they rest on is how far calibrated predictions are from the labels of validation rows, each calibrated by a fit
    without its own fold (`--calibration`); the best checkpoint was chosen on these rows too, which is not undone. A
    label that is a limit has no known distance: such rows are left out, and intervals speak about rows that the assay
    measures.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` is trained and calibrated. Called by all processes.
        rows: of validation.
        units: of these rows, from `find_units`: then intervals are for a row of a further unit.

    Returns:
        What is stored, JSON-able, see `hf_ext.models.postprocess`: `reason` alone where there are none.

    Cost: a pass over the validation rows and ten fits of the calibration.
    """
    stored = trainer.model.config.prediction_intervals = _fit(trainer, rows, units)
    return stored


def _fit(trainer: Any, rows: Any, units: ResamplingUnits | None) -> dict[str, Any]:
    if trainer.model.config.loss == "ranking":
        return {"reason": "the loss ranks rows, and predictions have no unit"}
    if not hasattr(rows, "__len__"):
        return {"reason": "validation rows were a stream, of which nobody knows what was held out together"}
    bounds, units = _bounds(rows), check_units(units, len(rows))
    is_exact = bounds == 0
    if not is_exact.any():
        return {"reason": "every label of the validation rows is a limit, and none tells how far a prediction is off"}
    with uncalibrated(trainer.model) as calibration:
        raw, labels = unpack_labelled(trainer.predict(rows))
    given: dict[str, Any] = {"ridge": ridge_part(trainer, rows), "bounds": bounds, "units": units}
    predicted = cross_fit_calibration(raw, labels, calibration, seed=trainer.args.seed, **given)
    of_exact = None if units is None else units.select(is_exact)
    widths = conformal_half_widths((labels - predicted)[is_exact], units=of_exact)
    known = int(np.isfinite(widths).sum())
    return {
        "levels": list(LEVELS[:known]),
        "half_widths": widths[:known].tolist(),
        "num_rows": int(is_exact.sum()),
        "num_limits": int((~is_exact).sum()),  # rows left out
        "unit": None if of_exact is None else of_exact.column,
        "num_units": None if of_exact is None else of_exact.num_units,
    }


def score_intervals(
    stored: Mapping[str, Any],
    predictions: np.ndarray,
    labels: np.ndarray,
    rows: Any,
    units: ResamplingUnits | None,
) -> dict[str, Any]:
    """Which share of test rows the stored intervals hold.

    Args:
        stored: from `fit_intervals`.
        predictions, labels: (n,), label units, of the test rows.
        rows: the test split.
        units: of these rows, from `find_units`.

    Returns:
        JSON-able: `stored` without its table; `level`, the highest of `SHOWN` that there is, `width` (label units, the
        same for all rows) and `coverage`; `notes`, sentences for reports.
    """
    if stored.get("reason"):
        return {"reason": stored["reason"], "notes": [f"No prediction intervals: {stored['reason']}."]}
    is_exact = _bounds(rows) == 0
    errors, highest = np.abs(labels - predictions)[is_exact], stored["levels"][-1]
    basis = {name: value for name, value in stored.items() if name not in ("levels", "half_widths")}
    beside = f"`hf-ext predict --interval 0.9` writes them, from {describe_basis(stored)}"
    level = next((level for level in SHOWN if level <= highest), None)
    if level is None or not len(errors):
        return {**basis, "notes": [f"Prediction intervals: none of a level above {highest:g} ({beside})."]}
    width = half_width(stored, level)
    there = None if units is None else check_units(units.select(is_exact), len(errors))
    held = score_mean(errors <= width, seed=0, units=there)
    ends = "" if held["low"] is None else f" [{share(held['low'])}, {share(held['high'])}]"
    of = f"{held['n']:,} test rows{' with exact labels' if stored['num_limits'] else ''}"
    text = (
        f"Prediction intervals of {share(level)} held {share(held['value'])}{ends} of {of}, at a width of "
        f"{format_cell(2 * width)} ({beside})."
    )
    return {**basis, "level": level, "width": 2 * width, "coverage": held, "notes": [text]}


def _bounds(rows: Any) -> np.ndarray:
    bounds = read_bounds(rows)
    return np.zeros(len(rows)) if bounds is None else bounds
