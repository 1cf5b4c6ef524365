"""What heads are fitted by and judged by: the squared error of numbers, or the log loss of classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ..evaluation.baselines import solve_ridges
from ..labels import UNKNOWN
from ..models.ensemble import LEAST

FloatArray = NDArray[np.float64]

PENALTIES = np.logspace(-4, 3, 8)  # of ridges, relative to the mean eigenvalue of the features
CLASS_PENALTIES = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of logistic regressions; each begins where the one before ended
MIN_STEPS, MAX_STEPS = 10, 100  # of L-BFGS, for a penalty
MAX_OPERATIONS = 1e12  # of these steps


class SquaredError:
    """Of numbers: members are summed in label units and judged by their RMSE.

    Args:
        labels: (n,), label units.
    """

    measure, link, num_outputs, penalties = "RMSE", "identity", 1, PENALTIES

    def __init__(self, labels: FloatArray):
        self.labels = labels
        self.shift, self.scale = float(labels.mean()), float(labels.std()) or 1.0  # of networks' outputs
        self.targets = torch.from_numpy((labels - self.shift) / self.scale).float()

    def constant(self, rows: NDArray[np.int64]) -> FloatArray:
        """The best prediction of `rows` that is the same for all, as `link` makes it, (num_outputs,)."""
        return self.labels[rows].mean(keepdims=True)

    def fit_linear(self, features: NDArray[np.float32], rows: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """Linear models of each penalty on the features of `rows`, (n, d).

        Returns:
            Weights (penalties, d, num_outputs) and levels (penalties, num_outputs).
        """
        weights, levels = solve_ridges(features, self.labels[rows], self.penalties, standardize=False)
        return weights.T[..., None], levels[:, None]

    def loss(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sum over networks of each one's mean loss: outputs (number, n, num_outputs), rows (number, n)."""
        targets = self.targets.to(outputs.device)[rows]
        return (outputs.squeeze(-1) - targets).square().mean(1).sum()

    def judged(self, predicted: NDArray[Any], rows: NDArray[np.int64]) -> FloatArray:
        """What of predictions, (n, num_outputs) as `link` makes them, the error is of: (entries,)."""
        return predicted[:, 0].astype(np.float64)

    def errors(self, judged: FloatArray, rows: NDArray[np.int64]) -> FloatArray:
        """Of each of m members, (m, entries) -> (m,)."""
        return np.sqrt(np.square(judged - self.labels[rows]).mean(-1))


class LogLoss:
    """Of classes, or of labels that are 0 or 1: probabilities of members are summed and judged by the log loss.

    Args:
        labels: (n,) numbers of classes, or (n, k) of 0 and 1; `UNKNOWN` where not known.
        num_outputs: classes, or k.
    """

    measure, penalties = "log loss", CLASS_PENALTIES
    shift, scale = 0.0, 1.0

    def __init__(self, labels: FloatArray, num_outputs: int):
        self.num_outputs, self.is_set = num_outputs, labels.ndim == 2
        self.link = "sigmoid" if self.is_set else "softmax"
        self.labels, self.known = labels.astype(np.int64), labels != UNKNOWN
        self.targets = torch.from_numpy(labels).float() if self.is_set else torch.from_numpy(self.labels)

    def constant(self, rows: NDArray[np.int64]) -> FloatArray:
        """The shares of classes, or of ones, each label seen half a time more than it was."""
        labels, known = self.labels[rows], self.known[rows]
        if self.is_set:
            return (np.where(known, labels, 0).sum(0) + 0.5) / (known.sum(0) + 1)
        counts = np.bincount(labels[known], minlength=self.num_outputs) + 0.5
        return counts / counts.sum()

    def fit_linear(self, features: NDArray[np.float32], rows: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """As of `SquaredError`: logistic regressions, by L-BFGS along the principal directions of the features, each
        scaled by the most that the loss can curve there."""
        values, index = torch.from_numpy(features), torch.from_numpy(rows)[None]
        mean = values.mean(0)
        gram = torch.zeros(len(mean), len(mean), dtype=torch.float64)
        for chunk in values.split(8192):
            gram += (chunk - mean).double().T @ (chunk - mean).double()
        variances, vectors = torch.linalg.eigh(gram / len(values))
        per_step = 4 * values.numel() * self.num_outputs
        steps = int(np.clip(MAX_OPERATIONS / per_step / len(self.penalties), MIN_STEPS, MAX_STEPS))
        level = torch.from_numpy(self.constant(rows))
        level = (level.logit() if self.is_set else level.log()).float().requires_grad_()
        weights, found = torch.zeros(len(mean), self.num_outputs, dtype=torch.float64), []
        for penalty in self.penalties:
            penalty *= float(variances.mean())
            scales = (variances.clamp(min=0) / 4 + penalty).rsqrt()
            inputs = (values - mean) @ (vectors * scales).float()
            inner = ((vectors.T @ weights) / scales[:, None]).float().requires_grad_()
            shrink = (penalty * scales.square() / 2).float()[:, None]
            _minimize(partial(self._penalized, inputs, inner, level, shrink, index), [inner, level], steps)
            weights = vectors @ (inner.detach().double() * scales[:, None])
            found.append((weights.numpy(), (level.detach().double() - mean.double() @ weights).numpy()))
        return np.stack([one for one, _ in found]), np.stack([one for _, one in found])

    def _penalized(
        self,
        inputs: torch.Tensor,
        inner: torch.Tensor,
        level: torch.Tensor,
        shrink: torch.Tensor,
        index: torch.Tensor,
    ) -> torch.Tensor:
        return self.loss((inputs @ inner + level)[None], index) + (shrink * inner.square()).sum()

    def loss(self, outputs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """As of `SquaredError`."""
        targets = self.targets.to(outputs.device)[rows]
        if not self.is_set:
            total = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
            return total / rows.shape[1]
        known = targets.ne(UNKNOWN)
        losses = functional.binary_cross_entropy_with_logits(outputs, targets.clamp(min=0), reduction="none")
        return ((losses * known).sum((1, 2)) / known.sum((1, 2)).clamp(min=1)).sum()

    def judged(self, predicted: NDArray[Any], rows: NDArray[np.int64]) -> FloatArray:
        """The probability of what is true, of each label that is known."""
        known, labels = self.known[rows], self.labels[rows]
        if self.is_set:
            return np.where(labels > 0, predicted, 1 - predicted)[known].astype(np.float64)
        return np.take_along_axis(predicted, labels.clip(0)[:, None], 1)[known, 0].astype(np.float64)

    def errors(self, judged: FloatArray, rows: NDArray[np.int64]) -> FloatArray:
        """As of `SquaredError`."""
        return -np.log(judged.clip(LEAST)).mean(-1)


def _minimize(loss: Callable[[], torch.Tensor], parameters: list[torch.Tensor], steps: int) -> None:
    optimizer = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(evaluate)


Objective = SquaredError | LogLoss
