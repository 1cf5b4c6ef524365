"""Regression losses as sums over rows, in float32, so that any split into micro-batches gives the same gradient."""

from __future__ import annotations

import torch
from torch.nn import functional

from ..errors import ArgumentError

LOSSES = ("mse", "huber", "tobit", "ranking")


def regression_loss(
    name: str,
    predictions: torch.Tensor,
    labels: torch.Tensor,
    bounds: torch.Tensor | None = None,
    *,
    huber_delta: float = 1.0,
    tobit_scale: float = 0.25,
    per_row: bool = False,
) -> torch.Tensor:
    """Sum over rows of a loss on standardised labels.

    Args:
        name: one of `LOSSES`.
        predictions, labels: (n,), float32, standardised.
        bounds: (n,), -1 where the truth is at or below the label, 1 at or above, 0 or None: exact. Read by "tobit"
            and "ranking"; "mse" and "huber" take every label as exact.
        huber_delta: where Huber turns linear, in standardised label units.
        tobit_scale: standard deviation of the measurement noise, in standardised label units.
        per_row: return what each row adds, instead of the sum.

    Returns:
        Scalar sum, or (n,). For "ranking", each row counts the mean over its pairs, halved, because every pair belongs
        to two rows; it depends on which rows share a batch.
    """
    if name == "ranking":
        losses = _ranking(predictions, labels, bounds)
    elif name == "tobit":
        losses = _tobit(predictions, labels, bounds, tobit_scale)
    elif name == "mse":
        losses = functional.mse_loss(predictions, labels, reduction="none")
    elif name == "huber":
        losses = functional.huber_loss(predictions, labels, reduction="none", delta=huber_delta)
    else:
        raise ArgumentError(f"loss={name!r}: allowed are {', '.join(LOSSES)}.")
    return losses if per_row else losses.sum()


def _tobit(predictions: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Gaussian negative log-likelihood times scale squared; censored rows by the probability of their tail."""
    residual = labels - predictions
    exact = 0.5 * residual.square()
    if bounds is None:
        return exact
    tail = -torch.special.log_ndtr(-bounds.to(residual.dtype) * residual / scale) * scale**2
    return torch.where(bounds == 0, exact, tail)


def _ranking(predictions: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
    """Logistic loss on every pair of rows whose order is known; a row without a comparable partner adds zero."""
    higher = labels[:, None] > labels[None, :]
    if bounds is not None:
        # i is known to be above j only if i is not "at or below" and j is not "at or above" its label.
        higher = higher & (bounds[:, None] >= 0) & (bounds[None, :] <= 0)
    losses = functional.softplus(predictions[None, :] - predictions[:, None]) * higher
    pairs = higher.sum(1) + higher.sum(0)
    per_row = losses.sum(1) + losses.sum(0)
    return per_row / pairs.clamp(min=1) / 2
