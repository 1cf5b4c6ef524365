"""A ridge regression on the frozen embeddings, to be mixed with the model where that predicts better than it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..evaluation.baselines import RidgeBaseline
from .baselines import label_array, pooled_features

MAX_ROWS = 50_000  # training rows that the ridge sees


@dataclass(frozen=True)
class Ridge:
    """Weights (sum of embedding widths,) float64, and the intercept, label units."""

    weights: np.ndarray
    intercept: float

    def predict(self, trainer: Any, rows: Any) -> np.ndarray:
        """Predictions for rows, (n,) float64, label units. Cost: with the embedding cache, a look-up."""
        return pooled_features(trainer, rows).astype(np.float64) @ self.weights + self.intercept


def fit_ridge(trainer: Any, splits: Any) -> Ridge | None:
    """Fits on `splits["train"]`, its penalty on `splits["validation"]`; None where there is nothing to stack.

    That is for a loss that ranks, for censored labels, for streams, and where an encoder trains: its embeddings are
    the model's own work.

    Args:
        trainer: a `FastTrainer` with an `AffinityModel`. Called by all processes.

    Cost: as `RidgeBaseline` with at most 50,000 rows.
    """
    model, train, validation = trainer.model, splits["train"], splits["validation"]
    is_frozen = len(model.frozen_inputs) == len(model.embedding_sizes)
    is_sized = hasattr(train, "__len__") and hasattr(validation, "__len__")
    if not (is_frozen and is_sized) or model.config.loss not in ("mse", "huber"):
        return None
    if len(train) > MAX_ROWS:
        train = train.select(np.sort(np.random.default_rng(trainer.args.seed).permutation(len(train))[:MAX_ROWS]))
    fitted = RidgeBaseline().fit(
        pooled_features(trainer, train),
        label_array(train),
        pooled_features(trainer, validation),
        label_array(validation),
    )
    assert fitted.weights is not None
    return Ridge(fitted.weights, float(fitted.intercept))
