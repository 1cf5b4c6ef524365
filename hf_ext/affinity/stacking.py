"""A ridge regression on the frozen embeddings: a baseline, and mixed with the model where that predicts better."""

from __future__ import annotations

from typing import Any

from ..evaluation.baselines import RidgeBaseline
from .baselines import label_array, pooled_features, sample_rows

STACKING_LOSSES = ("mse", "huber")  # others rank, or know limits, which least squares does not


def fit_ridge(trainer: Any, splits: Any) -> RidgeBaseline | None:
    """Fits on `splits["train"]`, its penalty on `splits["validation"]`.

    None for streams, and where an encoder trains: its embeddings are the model's own work.

    Args:
        trainer: a `FastTrainer` with an `AffinityModel`. Called by all processes.
        splits: train and validation.

    Cost: as `RidgeBaseline` with at most 50,000 rows; embeddings that are not cached are encoded.
    """
    model, train, validation = trainer.model, splits["train"], splits["validation"]
    is_frozen = len(model.frozen_inputs) == len(model.embedding_sizes)
    if not (is_frozen and hasattr(train, "__len__") and hasattr(validation, "__len__")):
        return None
    train = sample_rows(train, trainer.args.seed)
    return RidgeBaseline().fit(
        pooled_features(trainer, train),
        label_array(train),
        pooled_features(trainer, validation),
        label_array(validation),
    )
