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

SHOWN = (0.5, 0.8, 0.9, 0.95)  # levels whose coverage is measured
HEADLINE = 0.9  # or the highest below, where rows or units are few


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
        JSON-able: `stored` without its table, `levels` with `level`, `width` (label units, the same for all rows) and
        `coverage` each, and `notes`, sentences for reports.
    """
    if stored.get("reason"):
        return {"reason": stored["reason"], "levels": [], "notes": [f"No prediction intervals: {stored['reason']}."]}
    is_exact = _bounds(rows) == 0
    errors = np.abs(labels - predictions)[is_exact]
    there = None if units is None else check_units(units.select(is_exact), len(errors))
    levels = []
    for level in SHOWN:
        if level <= stored["levels"][-1] and len(errors):
            width = half_width(stored, level)
            held = errors <= width
            by_unit = None if there is None else float(np.mean(np.bincount(there.unit_of_row, held) / there.sizes))
            coverage = {**score_mean(held, seed=0, units=there), "mean_of_units": by_unit}
            levels.append({"level": level, "width": 2 * width, "coverage": coverage})
    basis = {name: value for name, value in stored.items() if name not in ("levels", "half_widths")}
    return {**basis, "highest_level": stored["levels"][-1], "levels": levels, "notes": [_describe(stored, levels)]}


def _bounds(rows: Any) -> np.ndarray:
    bounds = read_bounds(rows)
    return np.zeros(len(rows)) if bounds is None else bounds


def _describe(stored: Mapping[str, Any], levels: list[dict[str, Any]]) -> str:
    """The level nearest below 90 % in a sentence."""
    beside = f"`hf-ext predict --interval 0.9` writes them, from {describe_basis(stored)}"
    if not levels:
        return f"Prediction intervals: none of a level above {stored['levels'][-1]:g} ({beside})."
    one = max((found for found in levels if found["level"] <= HEADLINE), key=lambda found: found["level"])
    held = one["coverage"]
    ends = "" if held["low"] is None else f" [{share(held['low'])}, {share(held['high'])}]"
    of_units = "" if held["mean_of_units"] is None else f" ({share(held['mean_of_units'])} where units weigh alike)"
    exact = " with exact labels" if stored["num_limits"] else ""
    return (
        f"Prediction intervals of {share(one['level'])} held {share(held['value'])}{ends} of "
        f"{held['n']:,} test rows{exact}{of_units}, at a width of {format_cell(one['width'])} ({beside})."
    )
