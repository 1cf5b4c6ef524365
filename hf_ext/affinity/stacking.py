"""A ridge regression on the frozen embeddings: a baseline, and mixed with the model where that predicts better."""

from __future__ import annotations

from typing import Any

from ..data.columns import read_columns
from .baselines import pooled_features, sample_rows, sequence_columns
from .embedding_ridge import EmbeddingRidge, fit_embedding_ridge
from .rows import label_array

STACKING_LOSSES = ("mse", "huber")  # others rank, or know limits, which least squares does not


def fit_ridge(trainer: Any, splits: Any) -> EmbeddingRidge | None:
    """Fits on `splits["train"]`, its penalty on `splits["validation"]`.

    None for streams, and where an encoder trains: its embeddings are the model's own work.

    Args:
        trainer: a `FastTrainer` with an `AffinityModel`. Called by all processes.
        splits: train and validation.

    Cost: as `RidgeBaseline` with at most 50,000 rows, twice where there are partners; embeddings that are not cached
    are encoded.
    """
    model, train, validation = trainer.model, splits["train"], splits["validation"]
    is_frozen = len(model.frozen_inputs) == len(model.embedding_sizes)
    if not (is_frozen and hasattr(train, "__len__") and hasattr(validation, "__len__")):
        return None
    parts, columns = (sample_rows(train, trainer.args.seed), validation), sequence_columns(trainer)
    return fit_embedding_ridge(
        [pooled_features(trainer, part) for part in parts],
        [label_array(part) for part in parts],
        [[*zip(*read_columns(part, columns))] for part in parts],
    )
