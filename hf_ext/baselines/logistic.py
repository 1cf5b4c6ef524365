"""Logistic regression: of heads, and what a classifier has to beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..data import draw_rows
from ..evaluation import FloatArray, find_shares, rows_for
from ..labels import UNKNOWN, Float32Array, LabelKind
from .ridge import chunks, principal_axes

ALPHAS = (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5)  # from next to constant to next to none
MAX_VALUES = 40_000_000  # of rows times features that a baseline is fitted on
MAX_WORK = 4_000_000_000  # rows times axes times outputs: about 0.5 s of each step on one core
MIN_AXES = 64
MIN_STEPS = 10  # of L-BFGS, for one alpha
MAX_STEPS = 100
MAX_OPERATIONS = 1e12  # of these steps
PRIOR = 0.5  # of a row with mean features: so often each class, or 0 and 1, counts as seen beside what was
TOLERANCE = 1e-6  # of the loss: a step that gains less is the last


def fit_logistic(
    features: Any,
    labels: FloatArray,
    num_outputs: int,
    alphas: Sequence[float],
    *,
    standardize: bool = False,
) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Yields the logistic regression of each alpha: of classes, or of labels that each stand alone.

    By L-BFGS along the principal axes of the features, each scaled by how much the loss curves there, from where the
    alpha before ended. Beside the rows stands half a mean one of each class, or of 0 and 1, so that one that is rare
    or missing keeps a probability. Where rows, axes and outputs are too many together, only the largest axes are
    fitted.

    Args:
        features: (n, d) array or memory map, any float dtype.
        labels: (n,) class numbers, or (n, k) of 0, 1 and NaN.
        num_outputs: classes, or k.
        alphas: from the strongest on: for the mean loss plus alpha / 2 times the sum of squares of the weights of
            the scaled features.
        standardize: as in `RidgeBaseline`.

    Yields:
        Weights (d, outputs), for raw features, and intercepts (outputs,).

    Raises:
        DataError: a feature is not finite.

    Cost: that of a ridge, and 10^12 operations for all alphas, or of each 10 steps, each half a second at most: half
    a minute on one core.
    """
    import torch  # here, since scores need none of it

    from ..models import class_losses

    mean, axes, variances = principal_axes(features, standardize)
    most = max(MIN_AXES, MAX_WORK // (len(labels) * num_outputs))
    axes = axes[:, -most:]
    variances = variances[-most:]
    narrow = np.pad(axes, ((0, 0), (0, 1))).astype(np.float32)
    is_set = labels.ndim == 2
    prior = np.repeat([[0.0], [1.0]], num_outputs, axis=1) if is_set else np.arange(num_outputs)
    blocks = [(chunk - mean).astype(np.float32) @ narrow for _, chunk in chunks(features)]
    blocks.append(np.zeros((len(prior), narrow.shape[1]), np.float32))
    inputs = torch.from_numpy(np.concatenate(blocks))
    inputs[:, -1] = 1  # of intercepts
    every = np.concatenate([labels, prior])
    targets = torch.from_numpy(np.nan_to_num(every, nan=UNKNOWN))
    targets = targets.to(torch.float32 if is_set else torch.int64)
    counts = targets.ne(UNKNOWN).float()
    counts[len(labels) :] = PRIOR
    shares = find_shares(labels, None if is_set else num_outputs, PRIOR)
    squares = np.append(variances, 1.0)
    curves = torch.from_numpy(squares[:, None] * shares * (1 - shares))
    weights = torch.zeros_like(curves)
    weights[-1] = torch.from_numpy(np.log(shares) - np.log1p(-shares) * is_set)
    operations = 4 * inputs.numel() * num_outputs * len(alphas)
    steps = int(np.clip(MAX_OPERATIONS / operations, MIN_STEPS, MAX_STEPS))

    def loss(inner: Any, scales: Any, shrink: Any) -> Any:
        losses = class_losses(inputs @ (inner * scales), targets)
        mean_loss = (losses * counts).sum() / counts.sum()
        return mean_loss + (inner.square() * shrink).sum()

    for alpha in alphas:
        penalties = torch.full((len(weights), 1), alpha)
        penalties[-1] = 0
        scales = (curves + penalties).rsqrt()
        inner = (weights / scales).float().requires_grad_()
        shrink = penalties * scales.square() / 2
        of_inner = partial(loss, inner, scales.float(), shrink.float())
        _minimize(of_inner, inner, steps)
        weights = inner.detach().double() * scales
        found = axes @ weights[:-1].numpy()
        yield found, weights[-1].numpy() - mean @ found


def _minimize(loss: Callable[[], Any], parameter: Any, steps: int) -> None:
    from torch.optim import LBFGS

    optimizer = LBFGS(
        [parameter],
        max_iter=steps,
        tolerance_change=TOLERANCE,
        line_search_fn="strong_wolfe",
    )

    def evaluate() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(evaluate)


class LogisticBaseline:
    """Multinomial logistic regression, or one of each label where a row has several, with an L2 penalty on the weights.

    Penalties are tried from the strongest on, until the log loss of the validation rows no longer falls. Of more than
    40 million numbers of training a sample of the rows is fitted.

    Cost: see `fit_logistic`.

    Args:
        kind: classification or multilabel; residues of a protein are rows of a classification here.
        alphas, standardize: as of `fit_logistic`.

    Attributes after `fit`: `alpha`, `validation_log_loss`, `num_rows` fitted.
    """

    def __init__(
        self,
        kind: LabelKind,
        alphas: Sequence[float] = ALPHAS,
        *,
        standardize: bool = True,
    ):
        self.kind = kind.of_rows
        self.standardize = standardize
        self.alphas = sorted(alphas, reverse=True)

    def fit(
        self,
        features: Any,
        labels: Any,
        validation_features: Any,
        validation_labels: Any,
    ) -> LogisticBaseline:
        """Fits, and chooses the alpha.

        Args:
            features: (n, d) array or memory map, any float dtype.
            labels: (n,) class numbers, or (n, k) of 0, 1 and NaN.
            validation_features, validation_labels: (m, d), and as `labels`.

        Raises:
            DataError: a feature is not finite, or shapes do not fit.
        """
        rows = draw_rows(len(features), 0, MAX_VALUES // features.shape[1])
        truth = np.asarray(labels, np.float64)
        found = fit_logistic(
            np.asanyarray(features)[rows],
            truth[rows],
            len(self.kind.names),
            self.alphas,
            standardize=self.standardize,
        )
        self.num_rows = len(rows)
        self.validation_log_loss = math.inf
        for alpha, fitted in zip(self.alphas, found):
            predicted = self._predict(validation_features, *fitted)
            loss = rows_for(self.kind, predicted, validation_labels).value("log_loss").value
            if not loss < self.validation_log_loss:
                break
            self.fitted = fitted
            self.alpha = alpha
            self.validation_log_loss = loss
        return self

    def predict(self, features: Any) -> Float32Array:
        """Predicts probabilities, (n, outputs) float32; after `fit`.

        Raises:
            DataError: a value is not finite.
        """
        return self._predict(features, *self.fitted)

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able; after `fit`."""
        chosen = {
            "penalty": self.alpha,
            "validation_log_loss": self.validation_log_loss,
        }
        return {
            "kind": "logistic",
            "num_features": len(self.fitted[0]),
            "num_rows": self.num_rows,
            **chosen,
        }

    def _predict(self, features: Any, weights: FloatArray, intercepts: FloatArray) -> Float32Array:
        logits = [np.empty((0, len(intercepts)), np.float32)]
        for _, chunk in chunks(np.asanyarray(features)):
            logits.append((chunk @ weights + intercepts).astype(np.float32))
        return self.kind.to_predictions(np.concatenate(logits))
