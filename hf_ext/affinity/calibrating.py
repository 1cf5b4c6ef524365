"""After training: the model's predictions are fitted to the labels of the validation rows, and must beat a constant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ..data.columns import column_names
from ..evaluation.calibration import FittedCalibration, apply_calibration, fit_calibration
from ..evaluation.limits import at_limits, rmse_at_limits
from ..evaluation.paired import compare_paired
from ..models.calibration import stacks_ridge
from ..units import format_cell
from .baselines import pooled_features
from .stacking import fit_ridge

NONE = "none"


def calibrate_model(trainer: Any, kind: str, splits: Any) -> dict[str, Any]:
    """Fits `trainer.model`'s calibration on the validation rows, and gives it to the model.

    A loss that ranks has no scale to fit; that, and whatever else leaves predictions as they are, is said.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` is trained. Called by all processes.
        kind: "stack", "line", "isotonic" or "none"; what cannot be stacked is a line.
        splits: train and validation.

    Returns:
        JSON-able: `calibration` (None where there is none), `num_rows`, `rmse_before`, `rmse_after` (cross-fitted),
        `rmse_ridge` and `rmse_constant` of the ridge and the training mean on the same rows, `beats_constant`, whether
        the model's is lower than that beyond the noise, and `reason`.

    Raises:
        ArgumentError: isotonic, and some labels are limits.

    Cost: one pass over the validation rows, `fit_calibration` and `fit_ridge`.
    """
    model, rows = trainer.model, splits["validation"]
    model.set_calibration(None)
    if model.config.loss == "ranking":
        return asdict(FittedCalibration(None, 0, reason="the loss ranks rows, and has no scale"))
    predicted, labels = predict_labelled(trainer, rows)
    is_sized = hasattr(rows, "__len__")
    sides = np.asarray(rows["bound"][:]) if is_sized and "bound" in column_names(rows) else np.zeros(len(labels))
    if kind == NONE:
        before = rmse_at_limits(predicted, labels, sides)
        fitted, mended = FittedCalibration(None, len(labels), before, reason="--calibration none"), predicted
    else:
        fitted, mended = _fit(trainer, kind, splits, predicted, labels, sides)
    constant = np.full(len(labels), model.config.label_mean)
    trivial, kept = (at_limits(each, labels, sides) for each in (constant, mended))
    beats = compare_paired(labels, trivial, kept, "rmse", seed=trainer.args.seed).is_better
    return {**asdict(fitted), "rmse_constant": rmse_at_limits(constant, labels, sides), "beats_constant": beats}


def _fit(
    trainer: Any, kind: str, splits: Any, predicted: np.ndarray, labels: np.ndarray, sides: np.ndarray
) -> tuple[FittedCalibration, np.ndarray]:
    """Gives the model its calibration; returns it with the calibrated predictions."""
    ridge = fit_ridge(trainer, splits) if kind == "stack" else None
    beside = None if ridge is None else ridge.predict(trainer, splits["validation"])
    form = "isotonic" if kind == "isotonic" else "line"
    fitted = fit_calibration(predicted, labels, kind=form, ridge=beside, bounds=sides, seed=trainer.args.seed)
    found = fitted.calibration
    if ridge is None or found is None or not stacks_ridge(found):
        trainer.model.set_calibration(found)
        return fitted, apply_calibration(predicted, found)
    intercept = found["intercept"] + found["ridge"] * ridge.intercept  # the model holds weights alone
    trainer.model.set_calibration({**found, "intercept": intercept}, torch.from_numpy(ridge.weights))
    return fitted, apply_calibration(predicted, found, beside)


def describe_calibration(facts: dict[str, Any]) -> list[str]:
    """The facts of `calibrate_model` as sentences; the last is an alarm where a constant would have done as well."""
    numbers = {name: format_cell(facts.get(name)) for name in ("rmse_before", "rmse_after", "rmse_constant")}
    found, lines = facts["calibration"], []
    if found is None:
        lines.append(f"Predictions are not calibrated: {facts['reason']}.")
    else:
        form = "an isotonic fit" if found["kind"] == "isotonic" else f"a line of slope {found['slope']:.3g}"
        if stacks_ridge(found):
            form = f"{found['slope']:.3g} x the model + {found['ridge']:.3g} x a ridge on its embeddings, fitted"
        lines.append(
            f"Predictions are calibrated by {form} on {facts['num_rows']:,} validation rows: RMSE there "
            f"{numbers['rmse_before']} before, {numbers['rmse_after']} after (cross-fitted)."
        )
    if facts.get("beats_constant") is False:
        kept = numbers["rmse_after" if found else "rmse_before"]
        lines.append(
            f"ALARM: on the validation rows the model that was kept is not shown to be better than the training mean: "
            f"RMSE {kept} against {numbers['rmse_constant']}. More epochs, another --learning_rate or other encoders "
            "may help."
        )
    return lines


def predict_labelled(trainer: Any, rows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predictions for `rows`, and their labels: (n,) float64 each, label units."""
    output = trainer.predict(rows)
    raw = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    labels = output.label_ids[0] if isinstance(output.label_ids, tuple) else output.label_ids
    return np.asarray(raw, np.float64).reshape(-1), np.asarray(labels, np.float64).reshape(-1)


def ridge_part(trainer: Any, rows: Any) -> np.ndarray | None:
    """What the stacked ridge of a calibrated model adds to predictions for `rows`, before its weight; None without."""
    model = trainer.model
    if not stacks_ridge(model.config.calibration):
        return None
    return pooled_features(trainer, rows).astype(np.float64) @ model.ridge_weights.double().cpu().numpy()


@contextmanager
def uncalibrated(model: Any) -> Iterator[dict[str, Any] | None]:
    """Within it the model predicts as it was trained; gives what it is calibrated by otherwise."""
    calibration, model.config.calibration = model.config.calibration, None
    try:
        yield calibration
    finally:
        model.config.calibration = calibration
