"""What memory alone is worth: the labels of the training rows most like a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, DataError
from ._arrays import FloatArray, as_column

DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)
CHUNK_PAIRS = 4_000_000  # float32 similarities held at once: 16 MB
# Added to 1 - similarity before it is inverted: equal rows count a million times as much as unlike ones, so that rows
# with an equal twin are predicted from their twins.
SMALLEST_DISTANCE = 1e-6


class NearestBaseline:
    """Predicts the mean label of the `count` most similar training rows, weighted by 1 / (1 - similarity).

    The number of rows is that of the smallest validation RMSE. Similarity is the inner product of rows of unit length:
    1 for equal ones.

    Args:
        counts: numbers of rows to choose from.

    Attributes after `fit`: `count`; `validation_rmse`, {count: RMSE}.

    Cost: n multiply-adds per feature and query, and one partial sort of n: 6 s on one core for 15,000 queries of 13,000
    rows of 1,000 features.
    """

    def __init__(self, counts: Sequence[int] = DEFAULT_COUNTS) -> None:
        """Raises `ArgumentError` where `counts` is empty or one of them is below 1."""
        if not counts or min(counts) < 1:
            raise ArgumentError(f"counts={list(counts)!r}: one or more whole numbers of 1 or more are needed.")
        self.counts = sorted(set(counts))
        self.count: int | None = None
        self.validation_rmse: dict[int, float] = {}
        self._features: NDArray[Any] = np.empty((0, 0))
        self._targets: FloatArray = np.empty(0)

    def fit(self, features: Any, targets: Any, validation_features: Any, validation_targets: Any) -> NearestBaseline:
        """Keeps the training rows, and chooses how many of them a prediction rests on.

        Args:
            features: (n, d) float32 rows of length 1, or 0 where nothing is known of a row.
            targets: (n,) numbers.
            validation_features, validation_targets: (m, d) and (m,), rows that training does not hold.

        Raises:
            DataError: there are no rows, or other numbers of them.
        """
        self._features, self._targets = np.asarray(features), as_column(targets, "targets")
        held_out = as_column(validation_targets, "validation_targets")
        for name, rows, column in (("training", features, targets), ("validation", validation_features, held_out)):
            if not 0 < len(rows) == len(column):
                raise DataError(f"{len(rows)} rows of features for {len(column)} {name} targets: as many are needed.")
        counts = [count for count in self.counts if count <= len(self._targets)] or [len(self._targets)]
        errors = self._predict(validation_features, counts) - held_out[:, None]
        rmse = np.sqrt(np.mean(errors**2, axis=0))
        self.validation_rmse = dict(zip(counts, rmse.tolist()))
        self.count = counts[int(np.argmin(rmse))]
        return self

    def predict(self, features: Any) -> FloatArray:
        """Returns predictions, (n,) float64, for (n, d) features. Raises `ArgumentError` before `fit`."""
        if self.count is None:
            raise ArgumentError("NearestBaseline.predict before fit: call fit(...) first.")
        return self._predict(features, [self.count])[:, 0]

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able."""
        rmse = None if self.count is None else self.validation_rmse[self.count]
        return {"kind": "nearest neighbours", "num_neighbours": self.count, "validation_rmse": rmse}

    def _predict(self, features: Any, counts: Sequence[int]) -> FloatArray:
        """Predictions from each of `counts` rows, (n, number of counts)."""
        rows, predicted = np.asarray(features), np.empty((len(features), len(counts)))
        size, most = max(1, CHUNK_PAIRS // len(self._targets)), max(counts)
        for start in range(0, len(rows), size):
            similarity = rows[start : start + size] @ self._features.T
            nearest = np.argpartition(-similarity, most - 1, axis=1)[:, :most]
            found = np.take_along_axis(similarity, nearest, axis=1)
            order = np.argsort(-found, axis=1, kind="stable")
            nearest, found = np.take_along_axis(nearest, order, 1), np.take_along_axis(found, order, 1)
            weights = 1 / (np.maximum(1 - found.astype(np.float64), 0) + SMALLEST_DISTANCE)
            means = np.cumsum(weights * self._targets[nearest], axis=1) / np.cumsum(weights, axis=1)
            predicted[start : start + size] = means[:, np.asarray(counts) - 1]
        return predicted
