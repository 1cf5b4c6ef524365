"""Losses of one number per row, in float32: squared errors, bounds, and the order of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ArgumentError
from ..labels import Number


def regression_loss(
    name: str,
    predictions: Tensor,
    labels: Tensor,
    bounds: Tensor | None,
    huber_delta: float = 1.0,
    tobit_scale: float = 0.25,
) -> Tensor:
    """Computes a loss on standardised labels: what each row adds to the sum, (n,).

    For "ranking" that is the mean over its pairs, halved, because every pair belongs to two rows; it depends on which
    rows share a batch.

    Args:
        name: one of `Number.losses`.
        predictions, labels: (n,), float32, standardised.
        bounds: (n,), -1 where the truth is at or below the label, 1 at or above, 0 or None: exact. Read by "tobit"
            and "ranking"; "mse" and "huber" take every label as exact.
        huber_delta: where Huber turns linear, in standardised label units.
        tobit_scale: standard deviation of the measurement noise, in standardised label units.

    Raises:
        ArgumentError: no such loss.
    """
    if name == "ranking":
        return _ranking(predictions, labels, bounds)
    if name == "tobit":
        return _tobit(predictions, labels, bounds, tobit_scale)
    if name == "mse":
        return functional.mse_loss(predictions, labels, reduction="none")
    if name == "huber":
        return functional.huber_loss(predictions, labels, reduction="none", delta=huber_delta)
    raise ArgumentError(f"loss={name!r}: allowed are {', '.join(Number.losses)}.")


def _tobit(predictions: Tensor, labels: Tensor, bounds: Tensor | None, scale: float) -> Tensor:
    """Computes Gaussian negative log-likelihood times scale squared; censored rows by the probability of their tail."""
    residual = labels - predictions
    exact = 0.5 * residual.square()
    if bounds is None:
        return exact
    tail = -torch.special.log_ndtr(-bounds.to(residual.dtype) * residual / scale) * scale**2
    return torch.where(bounds == 0, exact, tail)


def _ranking(predictions: Tensor, labels: Tensor, bounds: Tensor | None) -> Tensor:
    """Computes a logistic loss on every pair of rows whose order is known.

    A row without a comparable partner adds zero.
    """
    higher = labels[:, None] > labels
    if bounds is not None:
        # i is known to be above j only if i is not "at or below" and j is not "at or above" its label.
        higher = higher & (bounds[:, None] >= 0) & (bounds <= 0)
    losses = functional.softplus(predictions - predictions[:, None]) * higher
    pairs = higher.sum(1) + higher.sum(0)
    return (losses.sum(1) + losses.sum(0)) / pairs.clamp(min=1) / 2
