"""What a model has to beat: means by group, and ridge regressions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import DataError
from ..evaluation import FloatArray, as_column, as_groups, count_not_finite
from ..labels import Array

# Relative to the mean eigenvalue of the standardised features (which is 1): from next to none to next to constant.
DEFAULT_ALPHAS = tuple(float(value) for value in np.logspace(-6, 4, 41))
CHUNK_BYTES = 48 * 2**20
CONSTANT_STD = 1e-10  # a standard deviation this far below the feature's own size is rounding, not signal
MANY_FEATURES = 1025  # more than those of two kernels, which no baseline reads
HASHED_ROWS = 4096
NEGLIGIBLE = 1e-10  # of the largest variance, where there are fewer rows than features: rounding

Axes = tuple[FloatArray, FloatArray, FloatArray]
_kept: dict[bytes, Axes] = {}


def predict_group_means(
    targets: Any,
    groups: Sequence[Any] | Array,
    asked: Sequence[Any] | Array,
) -> tuple[FloatArray, int]:
    """Predicts the mean training label of a row's group (antibody, assay, ...), of new groups the mean of all.

    Args:
        targets, groups: (n,) numbers and names of the training rows.
        asked: (m,) names of the rows to predict.

    Returns:
        (m,) predictions, and how many groups training has.

    Raises:
        DataError: no rows, other numbers of them, a label that is not finite, or a row without a group.
    """
    column = _finite_targets(targets, "targets", groups)
    known = as_groups(groups, len(column))
    names, index, counts = np.unique(known, return_inverse=True, return_counts=True)
    means = np.bincount(index, weights=column) / counts
    mean_of = dict(zip(names.tolist(), means.tolist()))
    mean = float(column.mean())
    wanted = as_groups(asked, len(asked)).tolist()
    return np.array([mean_of.get(name, mean) for name in wanted]), len(names)


# --- ridge regression -----------------------------------------------------------------------------------------------


class RidgeBaseline:
    """Linear regression on centred features, its alpha chosen by the validation RMSE; exact, no iterations.

    The features are read in chunks and summed in float64, so they may be float16 or float32 and memory-mapped. With
    fewer rows than features the rows' inner products are decomposed instead, which gives the same weights for less.

    Cost: n d^2 multiply-adds and one eigendecomposition of size min(n, d): 110,000 x 1,400 float32 in about 7 s on two
    cores, some 0.3 GB beside the features.

    Args:
        alphas: strengths of the L2 penalty to choose from, relative to the mean eigenvalue of the scaled features.
        standardize: divide each feature by its own standard deviation, for features in different units such as
            embeddings. False divides all by one number, for counts of residues: standardised, a residue that one
            training row has would weigh as much as one that half of them have (beta-lactamase: Spearman 0.714 instead
            of 0.732).

    Attributes after `fit`:
        weights: (d,) float64, for raw features; intercept: float.
        best_alpha: the chosen alpha, in units of the mean eigenvalue of the scaled features' covariance.
        validation_rmse: with it, label units.
    """

    def __init__(self, alphas: Sequence[float] = DEFAULT_ALPHAS, *, standardize: bool = True):
        self.alphas: FloatArray = np.unique(np.asarray(alphas, dtype=np.float64))
        self.standardize = standardize

    def fit(
        self,
        features: Any,
        targets: Any,
        validation_features: Any,
        validation_targets: Any,
    ) -> RidgeBaseline:
        """Fits every alpha of the grid at once and keeps the one with the smallest validation RMSE.

        Args:
            features: (n, d) array or memory map, any float dtype.
            targets: (n,) numbers.
            validation_features, validation_targets: (m, d) and (m,), rows that training does not hold.

        Raises:
            DataError: numbers of rows do not fit, there are none, or a value is not finite (named by row and column).
        """
        train = np.asanyarray(features)
        held_out = np.asanyarray(validation_features)
        labels = _finite_targets(targets, "targets", train)
        held_out_labels = _finite_targets(validation_targets, "validation_targets", held_out)
        weights, intercepts = solve_ridges(train, labels, self.alphas, standardize=self.standardize)
        errors = np.zeros(len(self.alphas))
        for rows, chunk in chunks(held_out):
            residual = chunk @ weights + intercepts - held_out_labels[rows][:, None]
            errors += np.einsum("nl,nl->l", residual, residual)
        rmse = np.sqrt(errors / len(held_out_labels))
        best = len(rmse) - 1 - int(np.argmin(rmse[::-1]))  # of equals the strongest alpha
        self.best_alpha = float(self.alphas[best])
        self.validation_rmse = float(rmse[best])
        self.weights = weights[:, best]
        self.intercept = float(intercepts[best])
        return self

    def predict(self, features: Any) -> FloatArray:
        """Returns predictions, (n,) float64, for (n, d) features in the unit of the training targets; after `fit`.

        Raises:
            DataError: a value is not finite.
        """
        blocks = [chunk @ self.weights for _, chunk in chunks(np.asanyarray(features))]
        return np.concatenate([np.empty(0), *blocks]) + self.intercept

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able, without the weights; after `fit`."""
        chosen = {
            "best_lambda": self.best_alpha,
            "validation_rmse": self.validation_rmse,
        }
        return {"kind": "ridge", "num_features": len(self.weights), **chosen}


def fit_scale(features: Any, each_by_its_own: bool) -> tuple[FloatArray, FloatArray]:
    """Computes mean and inverse standard deviation of each feature; one that does not vary gets 0 and so no weight.

    Two passes: the mean first, then the squares around it, which is exact also where the mean is large.
    """
    num_rows, num_features = features.shape
    total = np.zeros(num_features)
    squares = np.zeros(num_features)
    largest = np.zeros(num_features)
    for _, chunk in chunks(features):
        total += chunk.sum(axis=0)
        np.maximum(largest, np.abs(chunk).max(axis=0), out=largest)
    mean = total / num_rows
    for _, chunk in chunks(features):
        centred = chunk - mean
        squares += np.einsum("nd,nd->d", centred, centred)
    std = np.sqrt(squares / num_rows)
    varies = std > CONSTANT_STD * largest
    if not each_by_its_own and varies.any():
        variance = np.mean(std[varies] ** 2)
        std = np.full_like(std, np.sqrt(variance))
    return mean, np.divide(1.0, std, out=np.zeros_like(std), where=varies)


def solve_ridges(
    features: Any, labels: FloatArray, alphas: FloatArray, *, standardize: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Solves ridge regressions of several alphas by one eigendecomposition, of size min(n, d).

    Args:
        features, standardize: as in `RidgeBaseline`.
        labels: (n,), or (n, k), each of which is fitted for itself.
        alphas: (l,) strengths of the L2 penalty, relative to the mean eigenvalue of the scaled features.

    Returns:
        Weights (d, l) or (d, l, k), for raw features, and intercepts (l,) or (l, k).
    """
    mean, axes, variances = principal_axes(features, standardize)
    center = labels.mean(0)
    moment = np.zeros((len(mean), *labels.shape[1:]))
    for rows, chunk in chunks(features):
        moment += (chunk - mean).T @ (labels[rows] - center)
    projected = axes.T @ (moment / len(labels))
    found = []
    for alpha in alphas:
        shrunk = projected.T / (variances + alpha)
        found.append(axes @ shrunk.T)
    weights = np.stack(found, 1)
    return weights, center - np.tensordot(mean, weights, 1)


def principal_axes(features: Any, standardize: bool) -> Axes:
    """Computes principal axes of the scaled features by one eigendecomposition of size min(n, d).

    The last ones of many features, which take seconds, are kept, by a hash of all numbers: heads and baselines read the
    same residues. Memory: 8 d^2 bytes, 34 MB of 2,048 features.

    Args:
        features, standardize: as in `RidgeBaseline`.

    Returns:
        The features' mean (d,); axes (d, r), which turn raw features less their mean into uncorrelated coordinates; the
        variance of each coordinate, (r,), rising.
    """
    if features.shape[1] < MANY_FEATURES or features.dtype.itemsize > 4:
        return _compute_axes(features, standardize)
    digest = hashlib.blake2b(repr((features.shape, standardize)).encode())
    for start in range(0, len(features), HASHED_ROWS):
        digest.update(np.asarray(features[start : start + HASHED_ROWS], np.float32).tobytes())
    key = digest.digest()
    if key not in _kept:
        _kept.clear()
        _kept[key] = _compute_axes(features, standardize)
    return _kept[key]


def _compute_axes(features: Array, standardize: bool) -> Axes:
    num_rows, num_features = features.shape
    mean, scale = fit_scale(features, standardize)
    if num_rows < num_features:
        basis = (features - mean) * scale
        variances, vectors = np.linalg.eigh(basis @ basis.T / num_rows)
        kept = variances > NEGLIGIBLE * variances[-1]
        variances = variances[kept]
        lengths = np.sqrt(num_rows * variances)
        axes = basis.T @ (vectors[:, kept] / lengths)
    else:
        gram = np.zeros((num_features, num_features))
        for _, chunk in chunks(features):
            scaled = (chunk - mean) * scale
            gram += scaled.T @ scaled  # the same array twice: numpy computes one triangle only
        variances, axes = np.linalg.eigh(gram / num_rows)
    return mean, axes * scale[:, None], np.maximum(variances, 0.0)


def chunks(features: Any) -> Iterator[tuple[slice, FloatArray]]:
    """Yields which rows, and these as float64, in pieces of `CHUNK_BYTES`; refuses what is not finite."""
    size = max(1, CHUNK_BYTES // (8 * features.shape[1]))
    for start in range(0, len(features), size):
        chunk = np.asarray(features[start : start + size], np.float64)
        if not (np.isfinite(chunk.sum()) or np.isfinite(chunk).all()):
            row, column = np.argwhere(~np.isfinite(chunk))[0]
            value = chunk[row, column]
            raise DataError(f"features, row {start + row}, column {column}: {value} is not finite; fix or drop it.")
        yield slice(start, start + size), chunk


def _finite_targets(targets: Any, name: str, rows: Any) -> FloatArray:
    column = as_column(targets, name)
    problem = count_not_finite(column, name)
    if problem or len(column) == 0:
        raise DataError(f"{name}: {problem or 'no rows'}; finite numbers are needed, so drop or fix those rows.")
    if len(column) != len(rows):
        raise DataError(f"{name}: {len(column)} numbers for {len(rows)} rows; as many are needed.")
    return column
