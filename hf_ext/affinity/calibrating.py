"""After training: the model's predictions are fitted to the labels of the validation rows, and must beat a constant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ..evaluation.calibration import FittedCalibration, apply_calibration, fit_calibration
from ..evaluation.metrics import at_limits, rmse_at_limits
from ..evaluation.resampling import ResamplingUnits, check_units, unit_facts
from ..evaluation.row_metrics import unpack_labelled
from ..evaluation.scores import compare_paired
from ..models.postprocess import StackedRidge, is_ridge_alone, stacks_ridge
from ..models.process_settings import replaced
from ..reporting.units import format_cell
from .baselines import pooled_features, sequence_columns
from .embedding_ridge import EmbeddingRidge, Stack
from .rows import FloatArray, read_bounds
from .stacking import STACKING_LOSSES

NONE = "none"


@dataclass(frozen=True)
class _Deciding:
    """The rows that decide: what the model predicts for them, their labels and limits, (n,) each, and their units."""

    predicted: FloatArray
    labels: FloatArray
    sides: FloatArray
    units: ResamplingUnits | None

    @classmethod
    def of(cls, trainer: Any, rows: Any, units: ResamplingUnits | None) -> _Deciding:
        predicted, labels = unpack_labelled(trainer.predict(rows))
        bounds = read_bounds(rows)
        sides = np.zeros(len(labels)) if bounds is None else bounds.astype(np.float64)
        return cls(predicted, labels, sides, check_units(units, len(labels)))

    def rmse(self, predicted: FloatArray) -> float:
        return rmse_at_limits(predicted, self.labels, self.sides)


def calibrate_model(
    trainer: Any, kind: str, rows: Any, *, ridge: EmbeddingRidge | None = None, units: ResamplingUnits | None = None
) -> dict[str, Any]:
    """Fits `trainer.model`'s calibration on `rows`, and gives it to the model.

    A loss that ranks has no scale to fit; that, and whatever else leaves predictions as they are, is said.

    Args:
        trainer: a `FastTrainer` whose `AffinityModel` is trained. Called by all processes.
        kind: "stack", "line" or "none"; what cannot be stacked is a line.
        rows: of validation, which the model was not trained on.
        ridge: to stack, from `stacking.fit_ridge`; None where there is none.
        units: rows that were held out together, from `find_units`. No fold cuts one in two, and the comparison with
            the constant resamples them; None: rows.

    Returns:
        JSON-able: `calibration` (None where there is none), `num_rows`, `rmse_before`, `rmse_after` (cross-fitted),
        `rmse_ridge` and `rmse_constant` of the ridge and the training mean on the same rows, `beats_constant`, whether
        the model's is lower than that beyond the noise (None where the units are too few to tell), `reason`, and
        `interval_by`, `num_units` and `num_effective_units`.

    Raises:
        DataError: the units are of another number of rows.

    Cost: one pass over the rows, and `fit_calibration`.
    """
    model = trainer.model
    model.set_calibration(None)
    if model.config.loss == "ranking":
        return asdict(FittedCalibration(None, 0, reason="the loss ranks rows, and has no scale"))
    deciding = _Deciding.of(trainer, rows, units)
    predicted, num_rows = deciding.predicted, len(deciding.labels)
    if kind == NONE:
        fitted = FittedCalibration(None, num_rows, deciding.rmse(predicted), reason="--calibration none")
    else:
        stacked = ridge if kind == "stack" and model.config.loss in STACKING_LOSSES else None
        fitted, predicted = _fit(trainer, rows, deciding, kind, stacked)
    return {**asdict(fitted), **_compare_constant(trainer, deciding, predicted), **unit_facts(deciding.units, num_rows)}


def _fit(
    trainer: Any, rows: Any, deciding: _Deciding, kind: str, ridge: EmbeddingRidge | None
) -> tuple[FittedCalibration, FloatArray]:
    """Gives the model its calibration; returns it with the calibrated predictions."""
    chosen, beside = (None, None) if ridge is None else _choose_ridge(trainer, rows, deciding, ridge)
    fitted = fit_calibration(
        deciding.predicted,
        deciding.labels,
        ridge=beside,
        bounds=deciding.sides,
        units=deciding.units,
        seed=trainer.args.seed,
    )
    found = fitted.calibration
    if chosen is not None and stacks_ridge(found):
        found = {**found, **chosen.described}
        fitted = replace(fitted, calibration=found)
        trainer.model.set_calibration(found, chosen.ridge)
        return fitted, apply_calibration(deciding.predicted, found, beside)
    trainer.model.set_calibration(found)
    return fitted, apply_calibration(deciding.predicted, found)


def _choose_ridge(trainer: Any, rows: Any, deciding: _Deciding, ridge: EmbeddingRidge) -> tuple[Stack, FloatArray]:
    """One for all rows or one for each partner, whichever has the lower error; and what it predicts, (n,)."""
    features = pooled_features(trainer, rows)
    stacks = ridge.stacks(trainer.model, sequence_columns(trainer), trainer.data_collator.columns)
    predicted = [_predict_ridge(stack.ridge, features) for stack in stacks]
    best = int(np.argmin([deciding.rmse(each) for each in predicted]))
    return stacks[best], predicted[best]


def _compare_constant(trainer: Any, deciding: _Deciding, predicted: FloatArray) -> dict[str, Any]:
    constant = np.full(len(deciding.labels), trainer.model.config.label_mean)
    trivial, kept = (at_limits(each, deciding.labels, deciding.sides) for each in (constant, predicted))
    compared = compare_paired(deciding.labels, trivial, kept, "rmse", seed=trainer.args.seed, units=deciding.units)
    beats = compared.is_better if compared.is_trusted else None
    return {"rmse_constant": deciding.rmse(constant), "beats_constant": beats}


def describe_calibration(facts: dict[str, Any]) -> list[str]:
    """The facts of `calibrate_model` as sentences; the last is an alarm where a constant would have done as well."""
    numbers = {name: format_cell(facts.get(name)) for name in ("rmse_before", "rmse_after", "rmse_constant")}
    found, lines, by = facts["calibration"], [], facts.get("interval_by")
    if found is None:
        lines.append(f"Predictions are not calibrated: {facts['reason']}.")
    else:
        form = f"a line of slope {found['slope']:.3g}"
        if is_ridge_alone(found):
            form = f"taking {found['ridge']:.3g} x a ridge on the embeddings{_each(found)} alone, chosen"
        elif stacks_ridge(found):
            ridge = f"{found['ridge']:.3g} x a ridge on its embeddings{_each(found)}"
            form = f"{found['slope']:.3g} x the model + {ridge}, fitted"
        folds = f"cross-fitted by {facts['num_units']:,} values of {by}" if by else "cross-fitted"
        lines.append(
            f"Predictions are calibrated by {form} on {facts['num_rows']:,} validation rows: RMSE there "
            f"{numbers['rmse_before']} before, {numbers['rmse_after']} after ({folds})."
        )
    if is_ridge_alone(found):
        lines.append(
            "ALARM: the head adds nothing to a ridge on the same embeddings, and has no part in what is predicted."
        )
    if by and facts["beats_constant"] is None:
        lines.append(
            f"The values of {by} in the validation rows ({facts['num_units']:,}) are too few, or too uneven, to show "
            "whether the model is better than the training mean."
        )
    if facts.get("beats_constant") is False:
        kept = numbers["rmse_after" if found else "rmse_before"]
        lines.append(
            f"ALARM: on the validation rows the model that was kept is not shown to be better than the training mean: "
            f"RMSE {kept} against {numbers['rmse_constant']}. More epochs, another --learning_rate or other encoders "
            "may help."
        )
    return lines


def _each(calibration: Mapping[str, Any]) -> str:
    """, one for each of 4 values of heavy,light; empty where one ridge serves all."""
    if "partners" not in calibration:
        return ""
    partners = calibration["partners"]
    return f", one for each of {partners['number']} values of {', '.join(partners['inputs'])}"


def ridge_part(trainer: Any, rows: Any) -> np.ndarray | None:
    """What the stacked ridge of a calibrated model predicts for `rows`, (n,), before its weight; None without.

    Cost: with the embedding cache, a look-up.
    """
    model = trainer.model
    if not stacks_ridge(model.config.calibration):
        return None
    return _predict_ridge(model.ridge, pooled_features(trainer, rows))


@torch.no_grad()
def _predict_ridge(ridge: StackedRidge, features: np.ndarray) -> FloatArray:
    """(n,) from (n, width) embeddings."""
    return ridge(torch.from_numpy(features.astype(np.float64)).to(ridge.weights.device)).cpu().numpy()


@contextmanager
def uncalibrated(model: Any) -> Iterator[dict[str, Any] | None]:
    """Within it the model predicts as it was trained; gives what it is calibrated by otherwise."""
    calibration = model.config.calibration
    with replaced(model.config, calibration=None):
        yield calibration
