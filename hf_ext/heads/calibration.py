"""Probabilities that say how often they are right: logits divided by one temperature (arXiv:1706.04599)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_expit, log_softmax

from ..labels import UNKNOWN

if TYPE_CHECKING:
    from ..trainer import FastTrainer

LIMITS = (
    0.25,
    10.0,
)  # a few rows that are all right would ask for ever less, and for certainty
LEAST = 1e-4  # of the log loss, in nats: below it 1 stays


def fit_temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    """Fits the temperature by which logits are divided so that the mean log loss of these labels is lowest.

    Args:
        logits: (..., classes), or of the shape of `labels` where these are 0 or 1, float: of sets.
        labels: numbers of classes, integer, or 0 or 1, float; `UNKNOWN` where not known.

    Returns:
        Between `LIMITS`; 1.0 where another one lowers the loss by less than `LEAST`, or no label is known.

    Cost: some twenty passes over the logits.
    """
    known = labels != UNKNOWN
    values = np.asarray(logits, np.float64)[known]
    targets = labels[known]
    if not len(targets):
        return 1.0

    def log_loss(log_temperature: float) -> float:
        scaled = values / np.exp(log_temperature)
        if np.issubdtype(labels.dtype, np.floating):
            return -float(log_expit(np.where(targets > 0, scaled, -scaled)).mean())
        return -float(np.take_along_axis(log_softmax(scaled, axis=-1), targets[:, None], axis=-1).mean())

    found = minimize_scalar(log_loss, bounds=np.log(LIMITS), method="bounded")
    return float(np.exp(found.x)) if log_loss(0.0) - found.fun > LEAST else 1.0


def calibrate(trainer: FastTrainer, rows: Any) -> float:
    """Gives the trained model of `trainer` the temperature that suits `rows`, and returns it; of numbers 1.0.

    Of mixed heads too: they were weighed by their log loss.

    Args:
        rows: of validation, with labels; never those of training or test.

    Cost: one prediction of `rows`. To be called by all processes.
    """
    config = trainer.model.config
    if not config.kind.has_probabilities or trainer.model.ensemble is not None:
        return 1.0
    config.temperature = 1.0
    output = trainer.predict(rows)
    config.temperature = fit_temperature(np.asarray(output.predictions), np.asarray(output.label_ids))
    return config.temperature
