"""Before the first step: the scale of labels and of embeddings, measured once on the training data."""

from __future__ import annotations

from itertools import islice
from typing import Any

import datasets
import numpy as np
import torch

from ..data.columns import read_columns
from ..embeddings.dataset import join_parts

SAMPLE = 2048  # distinct sequences per input: enough for a mean and a spread per feature
LIVE_SAMPLE = 256  # where encoders train: each costs a forward pass, and their embeddings move anyway


class StandardizationMixin:
    """For models with a `fit_scaling` method: calls it once before training, with the same numbers on every rank."""

    args: Any
    model: Any
    plan: Any
    train_dataset: Any
    data_collator: Any

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer."""
        if hasattr(self.model, "fit_scaling") and not self.model.config.is_scaled:
            self.fit_scaling()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def fit_scaling(self) -> None:
        """Measures mean and spread of labels over all rows, of embeddings over a sample of sequences per input.

        Cost: with the embedding cache, nothing that training would not need anyway; without, 256 sequences per input.
        """
        rows = self.train_dataset
        if not hasattr(rows, "__len__"):
            rows = datasets.Dataset.from_list(list(islice(rows, SAMPLE)))
        labels = np.array(read_columns(rows, ["label"]), np.float64)
        embeddings = {name: self._sample_embeddings(rows, name) for name in self.model.embedding_sizes}
        self.model.fit_scaling(float(labels.mean()), float(labels.std()), embeddings)

    def _sample_embeddings(self, rows: Any, name: str) -> torch.Tensor:
        distinct = sorted({join_parts(parts) for parts in read_columns(rows, self.data_collator.columns[name])})
        is_cached = self.plan.applied("embedding_cache")
        order = np.random.default_rng(self.args.seed).permutation(len(distinct))
        sample = sorted((distinct[i] for i in order[: SAMPLE if is_cached else LIVE_SAMPLE]), key=len)
        if is_cached:
            self.embed_dataset(rows)  # type: ignore[attr-defined]  # whole set first, so that shards are cut from it
        return self.encode_distinct(name, sample)  # type: ignore[attr-defined]
