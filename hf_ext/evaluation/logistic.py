"""Logistic regression on features: what a classifier has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..labels import LabelKind
from ._arrays import FloatArray
from .baselines import chunks, fit_scale
from .class_metrics import LEAST
from .kinds import rows_for, to_predictions

PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)  # from next to constant to next to none
MAX_VALUES = 40_000_000  # of rows times features that are fitted
MAX_WORK = 4_000_000_000  # rows times features times outputs: about 0.5 s of each step on one core
MIN_COMPONENTS = 64
MAX_STEPS = 40
CHUNK_SCORES = 4_000_000

Matrix = NDArray[np.float32]


def draw(num_rows: int, most: int) -> NDArray[np.int64]:
    """At most so many numbers below `num_rows`, rising; always the same."""
    return np.sort(np.random.default_rng(0).permutation(num_rows)[:most])


class LogisticBaseline:
    """Multinomial logistic regression, or one of each label where a row has several, with an L2 penalty on the weights.

    Penalties are tried from the strongest on, each from the weights of the one before (L-BFGS, 40 steps), until the log
    loss of the validation rows no longer falls. Of more than 40 million numbers of training a sample of the rows is
    fitted; where rows, features and outputs are too many together, the features' largest principal components are.

    Cost: 12,000 rows of 320 features and 1,195 classes in a minute on one core, of two classes in seconds.

    Args:
        kind: classification or multilabel; residues of a protein are rows of a classification here.
        penalties: for the mean loss plus penalty / 2 times the sum of squares of the weights of the scaled features.
        standardize: as in `RidgeBaseline`.

    Attributes after `fit`: `penalty`, `validation_log_loss`, `num_rows` fitted, `num_components` or None.
    """

    def __init__(self, kind: LabelKind, penalties: Sequence[float] = PENALTIES, *, standardize: bool = True) -> None:
        self.kind = replace(kind, task="classification") if kind.per_residue else kind
        self.standardize = standardize
        self.penalties = sorted(penalties, reverse=True)
        self.num_components: int | None = None

    def fit(self, features: Any, labels: Any, validation_features: Any, validation_labels: Any) -> LogisticBaseline:
        """Fits, and chooses the penalty.

        Args:
            features: (n, d) array or memory map, any float dtype.
            labels: (n,) class numbers, or (n, k) of 0, 1 and NaN.
            validation_features, validation_labels: (m, d), and as `labels`.

        Raises:
            DataError: a feature is not finite, or shapes do not fit.
        """
        rows = draw(len(features), MAX_VALUES // features.shape[1])
        train, truth = np.asanyarray(features)[rows], np.asarray(labels, np.float64)[rows]
        self.num_rows, num_outputs = len(rows), self.kind.num_outputs
        self._mean, self._scale = fit_scale(train, self.standardize)
        if self.num_rows * train.shape[1] * num_outputs > MAX_WORK:
            self.num_components = max(MIN_COMPONENTS, MAX_WORK // (self.num_rows * num_outputs))
            scaled = ((chunk - self._mean) * self._scale for _, chunk in chunks(train))
            _, vectors = np.linalg.eigh(sum(each.T @ each for each in scaled))
            self._scale = self._scale[:, None] * vectors[:, -self.num_components :]
        design, held_out = self._scaled(train), self._scaled(validation_features)
        weights = np.zeros((design.shape[1] + 1, num_outputs))
        weights[-1] = self._start(truth)
        self.validation_log_loss = math.inf
        for penalty in self.penalties:
            weights = self._minimize(design, truth, weights, penalty)
            predicted = to_predictions(self.kind, self._scores(held_out, weights.astype(np.float32)))
            loss = rows_for(self.kind, predicted, validation_labels).value("log_loss").value
            if not loss < self.validation_log_loss:
                break
            self.weights, self.penalty, self.validation_log_loss = weights.astype(np.float32), penalty, loss
        return self

    def predict(self, features: Any) -> Matrix:
        """Probabilities, (n, outputs) float32; after `fit`.

        Raises:
            DataError: a value is not finite.
        """
        return to_predictions(self.kind, self._scores(self._scaled(features), self.weights))

    def summary(self) -> dict[str, Any]:
        """What was fitted, JSON-able; after `fit`."""
        names = ("num_rows", "num_components", "penalty", "validation_log_loss")
        return {"kind": "logistic", "num_features": len(self._mean), **{name: getattr(self, name) for name in names}}

    def _scaled(self, features: Any) -> Matrix:
        is_projected = self._scale.ndim == 2
        scaled = (
            (chunk - self._mean) @ self._scale if is_projected else (chunk - self._mean) * self._scale
            for _, chunk in chunks(np.asanyarray(features))
        )
        return np.concatenate(
            [np.empty((0, self._scale.shape[-1]), np.float32), *(c.astype(np.float32) for c in scaled)]
        )

    def _scores(self, design: Matrix, weights: Matrix) -> Matrix:
        return design @ weights[:-1] + weights[-1]

    def _start(self, truth: FloatArray) -> FloatArray:
        """Intercepts with which the shares in training are predicted."""
        if truth.ndim == 1:
            return np.log(
                np.maximum(np.bincount(truth.astype(np.int64), minlength=self.kind.num_outputs), 0.5) / len(truth)
            )
        shares = np.clip(np.nan_to_num(np.nanmean(truth, axis=0), nan=0.5), 1e-4, 1 - 1e-4)
        return np.log(shares / (1 - shares))

    def _minimize(self, design: Matrix, truth: FloatArray, start: FloatArray, penalty: float) -> FloatArray:
        from scipy.optimize import minimize  # here, since scipy takes 0.2 s that scores do not need

        found = minimize(
            partial(self._objective, design, truth, penalty),
            start.reshape(-1),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": MAX_STEPS, "ftol": 1e-6},
        )
        return found.x.reshape(start.shape)

    def _objective(
        self, design: Matrix, truth: FloatArray, penalty: float, flat: FloatArray
    ) -> tuple[float, FloatArray]:
        """The mean loss with its penalty, and its gradient."""
        exact = flat.reshape(-1, self.kind.num_outputs)
        weights, total = exact.astype(np.float32), 0.0
        gradient = np.zeros_like(weights)
        size = max(1, CHUNK_SCORES // self.kind.num_outputs)
        for start in range(0, len(design), size):
            part, of_part = design[start : start + size], truth[start : start + size]
            errors = to_predictions(self.kind, self._scores(part, weights))
            if truth.ndim == 1:
                index = np.arange(len(part)), of_part.astype(np.int64)
                total -= float(np.log(np.maximum(errors[index], LEAST)).sum(dtype=np.float64))
                errors[index] -= 1
            else:
                known = np.isfinite(of_part)
                of_truth = np.where(of_part == 1, errors, 1 - errors)[known]
                total -= float(np.log(np.maximum(of_truth, LEAST)).sum(dtype=np.float64))
                errors = np.where(known, errors - of_part, 0.0).astype(np.float32)
            gradient[:-1] += part.T @ errors
            gradient[-1] += errors.sum(axis=0)
        number = np.isfinite(truth).sum()
        slopes = gradient.astype(np.float64) / number
        slopes[:-1] += penalty * exact[:-1]
        return total / number + penalty / 2 * float(np.sum(exact[:-1] ** 2)), slopes.reshape(-1)
