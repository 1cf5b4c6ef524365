"""What a model has to beat: the mean of the training labels, of all or by group, and ridge regression on features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, DataError
from ._arrays import FloatArray, as_column, as_groups, count_not_finite

# Relative to the mean eigenvalue of the standardised features (which is 1): from next to none to next to constant.
DEFAULT_LAMBDAS = tuple(float(value) for value in np.logspace(-6, 4, 41))
CHUNK_BYTES = 48 * 2**20
CONSTANT_SPREAD = 1e-10  # a standard deviation this far below the feature's own size is rounding, not signal


class ConstantBaseline:
    """Predicts the mean of the training labels for every row: the smallest RMSE without looking at the input."""

    mean: float | None = None

    def fit(self, targets: Any) -> ConstantBaseline:
        """Takes the mean of `targets`, (n,) numbers. Raises `DataError` where there are none or one is not finite."""
        self.mean = float(_finite_targets(targets, "targets").mean())
        return self

    def predict(self, num_rows: int) -> FloatArray:
        """Returns the mean `num_rows` times, (num_rows,) float64. Raises `ArgumentError` before `fit`."""
        if self.mean is None:
            raise ArgumentError("ConstantBaseline.predict before fit: call fit(train_targets) first.")
        return np.full(num_rows, self.mean)

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able."""
        return {"kind": "constant", "mean": self.mean}


class GroupMeanBaseline:
    """Predicts the mean training label of a row's group (antibody, assay, ...), of new groups the mean of all."""

    mean: float | None = None
    means: dict[str, float]

    def fit(self, targets: Any, groups: Sequence[Any] | NDArray[Any]) -> GroupMeanBaseline:
        """Takes the means of `targets`, (n,) numbers, within `groups`, (n,) names; raises `DataError` as they do."""
        column = _finite_targets(targets, "targets")
        names, index, counts = np.unique(as_groups(groups, len(column)), return_inverse=True, return_counts=True)
        self.mean = float(column.mean())
        self.means = dict(zip(names.tolist(), (np.bincount(index, weights=column) / counts).tolist()))
        return self

    def predict(self, groups: Sequence[Any] | NDArray[Any]) -> FloatArray:
        """Returns the means of the rows' groups, (n,) float64. Raises `ArgumentError` before `fit`."""
        if self.mean is None:
            raise ArgumentError("GroupMeanBaseline.predict before fit: call fit(train_targets, train_groups) first.")
        return np.array([self.means.get(name, self.mean) for name in as_groups(groups, len(groups)).tolist()])

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able."""
        return {"kind": "group means", "mean": self.mean, "num_groups": len(self.means)}


@dataclass(frozen=True)
class _Standardizer:
    """Mean and inverse scale of each feature; a feature that does not vary gets 0 and so no weight."""

    mean: FloatArray
    inverse_spread: FloatArray

    def apply(self, chunk: Any) -> FloatArray:
        scaled = np.array(chunk, dtype=np.float64)
        scaled -= self.mean
        scaled *= self.inverse_spread
        return scaled


class RidgeBaseline:
    """Linear regression on centred features, its penalty chosen by the validation RMSE; exact, no iterations.

    The features are read in chunks and summed in float64, so they may be float16 or float32 and memory-mapped. With
    fewer rows than features the rows' inner products are decomposed instead, which gives the same weights for less.

    Cost: n d^2 multiply-adds and one eigendecomposition of size min(n, d): 110,000 x 1,400 float32 in about 7 s on two
    cores, some 0.3 GB beside the features.

    Args:
        lambdas: penalties to choose from, relative to the mean eigenvalue of the scaled features.
        standardize: divide each feature by its own spread, for features in different units such as embeddings. False
            divides all by one number, for counts of residues: standardised, a residue that one training row has would
            weigh as much as one that half of them have (beta-lactamase: Spearman 0.714 instead of 0.732).

    Attributes after `fit`:
        weights: (d,) float64, for raw features; intercept: float.
        best_lambda: the chosen penalty, in units of the mean eigenvalue of the scaled features' covariance.
        validation_rmse: {lambda: RMSE} over the grid.
        at_grid_edge: the best penalty is the first or last of the grid. At the small end that means next to none was
            needed; at the large end, that the features are worth little more than a constant.
    """

    def __init__(self, lambdas: Sequence[float] = DEFAULT_LAMBDAS, *, standardize: bool = True) -> None:
        """Raises `ArgumentError` where `lambdas` is empty or one of them is not positive and finite."""
        grid = np.unique(np.asarray(lambdas, dtype=np.float64))
        if len(grid) == 0 or not np.all(np.isfinite(grid)) or grid[0] <= 0:
            raise ArgumentError(f"lambdas={list(lambdas)!r}: one or more positive, finite numbers are needed.")
        self.lambdas: FloatArray = grid
        self.standardize = standardize
        self.weights: FloatArray | None = None
        self.intercept = 0.0
        self.best_lambda: float | None = None
        self.validation_rmse: dict[float, float] = {}
        self.at_grid_edge = False

    def fit(self, features: Any, targets: Any, validation_features: Any, validation_targets: Any) -> RidgeBaseline:
        """Fit every penalty of the grid at once and keep the one with the smallest validation RMSE.

        Args:
            features: (n, d) array or memory map, any float dtype.
            targets: (n,) numbers.
            validation_features, validation_targets: (m, d) and (m,), rows that training does not hold.

        Raises:
            DataError: shapes do not fit, there are no rows, or a value is not finite (named by row and column).
        """
        train = _check_features(features, "features", None)
        held_out = _check_features(validation_features, "validation_features", train.shape[1])
        train_targets = _matching_targets(targets, train, "targets")
        held_out_targets = _matching_targets(validation_targets, held_out, "validation_targets")

        scale = _fit_standardizer(train, self.standardize)
        target_mean = float(train_targets.mean())
        solve = _solve_dual if train.shape[0] < train.shape[1] else _solve_primal
        candidates = solve(train, train_targets - target_mean, scale, self.lambdas)

        errors = _squared_errors(held_out, held_out_targets - target_mean, scale, candidates)
        rmse = np.sqrt(errors / len(held_out_targets))
        best = len(rmse) - 1 - int(np.argmin(rmse[::-1]))  # of equals the strongest penalty
        self.validation_rmse = dict(zip(self.lambdas.tolist(), rmse.tolist()))
        self.best_lambda = float(self.lambdas[best])
        self.at_grid_edge = len(self.lambdas) > 1 and best in (0, len(self.lambdas) - 1)
        self.weights = candidates[:, best] * scale.inverse_spread
        self.intercept = target_mean - float(scale.mean @ self.weights)
        return self

    def predict(self, features: Any) -> FloatArray:
        """Returns predictions, (n,) float64, for (n, d) features in the unit of the training targets.

        Raises:
            ArgumentError: before `fit`.
            DataError: another number of features than in `fit`, or a value that is not finite.
        """
        if self.weights is None:
            raise ArgumentError("RidgeBaseline.predict before fit: call fit(...) first.")
        rows = _check_features(features, "features", len(self.weights), allow_empty=True)
        predicted = np.empty(rows.shape[0])
        for start, chunk in _chunks(rows):
            _check_finite(chunk, start, "features")
            predicted[start : start + len(chunk)] = chunk.astype(np.float64) @ self.weights
        return predicted + self.intercept

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able, without the weights."""
        rmse = None if self.best_lambda is None else self.validation_rmse[self.best_lambda]
        return {
            "kind": "ridge",
            "num_features": None if self.weights is None else len(self.weights),
            "best_lambda": self.best_lambda,
            "validation_rmse": rmse,
            "at_grid_edge": self.at_grid_edge,
        }


def _fit_standardizer(features: Any, each_by_its_own: bool) -> _Standardizer:
    """Two passes: the mean first, then the spread around it, which is exact also where the mean is large."""
    num_rows = features.shape[0]
    total, largest = np.zeros(features.shape[1]), np.zeros(features.shape[1])
    for start, chunk in _chunks(features):
        _check_finite(chunk, start, "features")
        total += chunk.sum(axis=0, dtype=np.float64)
        np.maximum(largest, np.abs(chunk).max(axis=0), out=largest)
    mean = total / num_rows
    squares = np.zeros(features.shape[1])
    for _, chunk in _chunks(features):
        centred = chunk - mean
        squares += np.einsum("nd,nd->d", centred, centred)
    spread = np.sqrt(squares / num_rows)
    varies = spread > CONSTANT_SPREAD * largest
    if not each_by_its_own and varies.any():
        spread = np.full_like(spread, np.sqrt(np.mean(spread[varies] ** 2)))
    return _Standardizer(mean, np.divide(1.0, spread, out=np.zeros_like(spread), where=varies))


def _solve_primal(features: Any, targets: FloatArray, scale: _Standardizer, lambdas: FloatArray) -> FloatArray:
    """Returns weights on standardised features, (d, number of lambdas), from the d x d correlation matrix."""
    num_rows, num_features = features.shape
    gram, moment = np.zeros((num_features, num_features)), np.zeros(num_features)
    for start, chunk in _chunks(features):
        scaled = scale.apply(chunk)
        gram += scaled.T @ scaled  # the same array twice: numpy computes one triangle only
        moment += scaled.T @ targets[start : start + len(scaled)]
    eigenvalues, vectors = np.linalg.eigh(gram / num_rows)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    projected = vectors.T @ (moment / num_rows)
    return vectors @ (projected[:, None] / (eigenvalues[:, None] + lambdas[None, :]))


def _solve_dual(features: Any, targets: FloatArray, scale: _Standardizer, lambdas: FloatArray) -> FloatArray:
    """Returns the same weights from the n x n inner products of the rows; holds all rows, fewer than features."""
    scaled = scale.apply(features)
    num_rows = scaled.shape[0]
    eigenvalues, vectors = np.linalg.eigh(scaled @ scaled.T / num_rows)
    eigenvalues = np.maximum(eigenvalues, 0.0)
    projected = vectors.T @ targets / num_rows
    return scaled.T @ (vectors @ (projected[:, None] / (eigenvalues[:, None] + lambdas[None, :])))


def _squared_errors(features: Any, targets: FloatArray, scale: _Standardizer, candidates: FloatArray) -> FloatArray:
    """Sum of squared errors of each candidate, (number of lambdas,)."""
    errors = np.zeros(candidates.shape[1])
    for start, chunk in _chunks(features):
        _check_finite(chunk, start, "validation_features")
        residual = scale.apply(chunk) @ candidates - targets[start : start + len(chunk), None]
        errors += np.einsum("nl,nl->l", residual, residual)
    return errors


def _chunks(features: Any) -> Iterator[tuple[int, Any]]:
    """Yields (first row, rows) pieces that take `CHUNK_BYTES` as float64."""
    size = max(1, CHUNK_BYTES // (8 * max(features.shape[1], 1)))
    for start in range(0, features.shape[0], size):
        yield start, np.asarray(features[start : start + size])


def _check_features(features: Any, name: str, num_features: int | None, allow_empty: bool = False) -> Any:
    array = features if isinstance(features, np.ndarray) else np.asarray(features)
    if array.ndim != 2 or array.shape[1] == 0 or (array.shape[0] == 0 and not allow_empty):
        raise DataError(f"{name}: shape {array.shape} given; rows x features, none of them 0, is needed.")
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_) or np.iscomplexobj(array):
        raise DataError(f"{name}: dtype {array.dtype} given; real numbers are needed.")
    if num_features is not None and array.shape[1] != num_features:
        raise DataError(f"{name}: {array.shape[1]} features given; {num_features}, as in fit's features, are needed.")
    return array


def _check_finite(chunk: Any, first_row: int, name: str) -> None:
    # One sum per chunk: only where it is not finite is the culprit looked for. Opposite infinities sum to NaN.
    with np.errstate(invalid="ignore", over="ignore"):
        if np.isfinite(chunk.sum(dtype=np.float64)):
            return
    bad = np.argwhere(~np.isfinite(chunk))
    if len(bad):
        row, column = bad[0]
        value = chunk[row, column]
        raise DataError(f"{name}, row {first_row + row}, column {column}: {value} is not finite; mend or drop the row.")


def _finite_targets(targets: Any, name: str) -> FloatArray:
    column = as_column(targets, name)
    problem = count_not_finite(column, name)
    if problem or len(column) == 0:
        raise DataError(f"{name}: {problem or 'no rows'}; finite numbers are needed, so drop or mend those rows.")
    return column


def _matching_targets(targets: Any, features: Any, name: str) -> FloatArray:
    column = _finite_targets(targets, name)
    if len(column) != features.shape[0]:
        raise DataError(f"{name}: {len(column)} rows for {features.shape[0]} rows of features; as many are needed.")
    return column
