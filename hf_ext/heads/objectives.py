"""What heads are fitted by and scored by: the squared error of numbers, or the log loss of classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..baselines import fit_logistic, solve_ridges
from ..evaluation import find_shares
from ..labels import UNKNOWN, Array, Float32Array, FloatArray, IntArray
from ..models import LEAST, class_losses

Folds = Sequence[IntArray]  # numbers of rows that are held out together
ALPHAS = np.logspace(-4, 3, 8)  # of ridges, relative to the mean eigenvalue of the features
CLASS_ALPHAS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of logistic regressions


class SquaredError:
    """Of numbers: members are summed in label units and scored by their RMSE.

    Args:
        labels: (n,), label units.
    """

    measure = "RMSE"
    link = "identity"
    num_outputs = 1
    alphas = ALPHAS

    def __init__(self, labels: FloatArray, num_outputs: int = 1):
        self.labels = labels
        self.shift = float(labels.mean())  # of networks' outputs
        self.scale = float(labels.std()) or 1.0
        self.targets = torch.from_numpy((labels - self.shift) / self.scale).float()

    def constant(self, rows: IntArray) -> FloatArray:
        """Computes the best prediction of `rows` that is the same for all, as `link` makes it, (num_outputs,)."""
        return self.labels[rows].mean(keepdims=True)

    def fit_linear(self, features: Float32Array, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """Fits linear models of each alpha on the features of `rows`, (n, d).

        Returns:
            Weights (alphas, d, num_outputs) and intercepts (alphas, num_outputs).
        """
        weights, intercepts = solve_ridges(features, self.labels[rows], self.alphas, standardize=False)
        return weights.T[..., None], intercepts[:, None]

    def loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Sums over networks each one's mean loss: outputs (number, n, num_outputs), rows (number, n)."""
        targets = self.targets.to(outputs.device)[rows]
        return (outputs.squeeze(-1) - targets).square().mean(1).sum()

    def entries(self, predicted: Array, rows: IntArray) -> FloatArray:
        """Returns what of predictions, (n, num_outputs) as `link` makes them, the error is of: (entries,)."""
        return predicted[:, 0].astype(np.float64)

    def errors(self, scored: FloatArray, rows: IntArray) -> FloatArray:
        """Computes the error of each of m members, (m, entries) -> (m,)."""
        return np.sqrt(np.square(scored - self.labels[rows]).mean(-1))


class LogLoss:
    """Of classes, or of labels that are 0 or 1: probabilities of members are summed and scored by the log loss.

    Args:
        labels: (n,) numbers of classes, or (n, k) of 0 and 1; `UNKNOWN` where not known.
        num_outputs: classes, or k.
    """

    measure = "log loss"
    alphas = CLASS_ALPHAS
    shift = 0.0
    scale = 1.0

    def __init__(self, labels: FloatArray, num_outputs: int):
        self.num_outputs = num_outputs
        self.is_set = labels.ndim == 2
        self.link = "sigmoid" if self.is_set else "softmax"
        self.labels = np.where(labels == UNKNOWN, np.nan, labels)
        self.targets = torch.from_numpy(labels).to(torch.float32 if self.is_set else torch.int64)

    def constant(self, rows: IntArray) -> FloatArray:
        """Computes the shares of classes, or of ones, each label seen half a time more than it was."""
        return find_shares(self.labels[rows], None if self.is_set else self.num_outputs, 0.5)

    def fit_linear(self, features: Float32Array, rows: IntArray) -> tuple[FloatArray, FloatArray]:
        """Fits logistic regressions, as `SquaredError` fits linear ones."""
        weights, intercepts = zip(*fit_logistic(features, self.labels[rows], self.num_outputs, self.alphas))
        return np.stack(weights), np.stack(intercepts)

    def loss(self, outputs: Tensor, rows: Tensor) -> Tensor:
        """Computes as `SquaredError` does."""
        targets = self.targets.to(outputs.device)[rows]
        known = targets.ne(UNKNOWN)
        losses = class_losses(outputs, targets) * known
        numbers = known.flatten(1).sum(1).clamp(min=1)
        return (losses.flatten(1).sum(1) / numbers).sum()

    def entries(self, predicted: Array, rows: IntArray) -> FloatArray:
        """Returns the probability of what is true, of each label that is known."""
        labels = self.labels[rows]
        known = np.isfinite(labels)
        if self.is_set:
            of_truth = np.where(labels > 0, predicted, 1 - predicted)[known]
        else:
            of_truth = predicted[known, labels[known].astype(np.int64)]
        return of_truth.astype(np.float64)

    def errors(self, scored: FloatArray, rows: IntArray) -> FloatArray:
        """Computes as `SquaredError` does."""
        return -np.log(scored.clip(LEAST)).mean(-1)


Objective = SquaredError | LogLoss
OBJECTIVES: dict[str, type[Objective]] = {
    "ridge": SquaredError,
    "logistic regression": LogLoss,
}  # by linear model
