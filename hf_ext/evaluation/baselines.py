"""What a model has to beat: the mean of the training labels, of all or by group, and ridge regression on features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, DataError
from ._arrays import FloatArray, as_column, as_groups, count_not_finite

# Relative to the mean eigenvalue of the standardised features (which is 1): from next to none to next to constant.
DEFAULT_LAMBDAS = tuple(float(value) for value in np.logspace(-6, 4, 41))
CHUNK_BYTES = 48 * 2**20
CONSTANT_SPREAD = 1e-10  # a standard deviation this far below the feature's own size is rounding, not signal


def predict_group_means(
    targets: Any, groups: Sequence[Any] | NDArray[Any], asked: Sequence[Any] | NDArray[Any]
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
    column = _finite_targets(targets, "targets")
    names, index, counts = np.unique(as_groups(groups, len(column)), return_inverse=True, return_counts=True)
    means = dict(zip(names.tolist(), (np.bincount(index, weights=column) / counts).tolist()))
    mean = float(column.mean())
    return np.array([means.get(name, mean) for name in as_groups(asked, len(asked)).tolist()]), len(means)


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
        labels = _finite_targets(targets, "targets", train)
        held_out_labels = _finite_targets(validation_targets, "validation_targets", held_out)
        mean, scale = _fit_scale(train, self.standardize)
        level = float(labels.mean())
        candidates = _solve(train, labels - level, mean, scale, self.lambdas)
        errors = np.zeros(len(self.lambdas))
        for rows, chunk in _chunks(held_out, "validation_features"):
            residual = ((chunk - mean) * scale) @ candidates - (held_out_labels[rows] - level)[:, None]
            errors += np.einsum("nl,nl->l", residual, residual)
        rmse = np.sqrt(errors / len(held_out_labels))
        best = len(rmse) - 1 - int(np.argmin(rmse[::-1]))  # of equals the strongest penalty
        self.validation_rmse = dict(zip(self.lambdas.tolist(), rmse.tolist()))
        self.best_lambda = float(self.lambdas[best])
        self.at_grid_edge = len(self.lambdas) > 1 and best in (0, len(self.lambdas) - 1)
        self.weights = candidates[:, best] * scale
        self.intercept = level - float(mean @ self.weights)
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
        for place, chunk in _chunks(rows, "features"):
            predicted[place] = chunk @ self.weights
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


def _fit_scale(features: Any, each_by_its_own: bool) -> tuple[FloatArray, FloatArray]:
    """Mean and inverse spread of each feature; one that does not vary gets 0 and so no weight.

    Two passes: the mean first, then the spread around it, which is exact also where the mean is large.
    """
    num_rows, num_features = features.shape
    total, largest, squares = np.zeros((3, num_features))
    for _, chunk in _chunks(features, "features"):
        total += chunk.sum(axis=0)
        np.maximum(largest, np.abs(chunk).max(axis=0), out=largest)
    mean = total / num_rows
    for _, chunk in _chunks(features):
        centred = chunk - mean
        squares += np.einsum("nd,nd->d", centred, centred)
    spread = np.sqrt(squares / num_rows)
    varies = spread > CONSTANT_SPREAD * largest
    if not each_by_its_own and varies.any():
        spread = np.full_like(spread, np.sqrt(np.mean(spread[varies] ** 2)))
    return mean, np.divide(1.0, spread, out=np.zeros_like(spread), where=varies)


def _solve(features: Any, labels: FloatArray, mean: FloatArray, scale: FloatArray, lambdas: FloatArray) -> FloatArray:
    """Returns weights on scaled features, (d, number of lambdas), by one eigendecomposition for all penalties.

    With fewer rows than features that of the rows' inner products, (n, n), else of the features', (d, d).
    """
    num_rows, num_features = features.shape
    if num_rows < num_features:
        basis = (features - mean) * scale
        gram, moment = basis @ basis.T, labels
    else:
        gram, moment = np.zeros((num_features, num_features)), np.zeros(num_features)
        for rows, chunk in _chunks(features):
            scaled = (chunk - mean) * scale
            gram += scaled.T @ scaled  # the same array twice: numpy computes one triangle only
            moment += scaled.T @ labels[rows]
    eigenvalues, vectors = np.linalg.eigh(gram / num_rows)
    projected = vectors.T @ (moment / num_rows)
    weights = vectors @ (projected[:, None] / (np.maximum(eigenvalues, 0.0)[:, None] + lambdas[None, :]))
    return basis.T @ weights if num_rows < num_features else weights


def _chunks(features: Any, name: str = "") -> Iterator[tuple[slice, FloatArray]]:
    """Yields which rows, and these as float64, in pieces of `CHUNK_BYTES`; with a name refuses what is not finite."""
    size = max(1, CHUNK_BYTES // (8 * max(features.shape[1], 1)))
    for start in range(0, features.shape[0], size):
        chunk = np.asarray(features[start : start + size], np.float64)
        # One sum per chunk: only where it is not finite is the culprit looked for. Opposite infinities sum to NaN.
        with np.errstate(invalid="ignore", over="ignore"):
            is_sound = not name or bool(np.isfinite(chunk.sum()))
        if not is_sound and len(bad := np.argwhere(~np.isfinite(chunk))):
            row, column = bad[0]
            raise DataError(
                f"{name}, row {start + row}, column {column}: {chunk[row, column]} is not finite; mend or drop the row."
            )
        yield slice(start, start + size), chunk


def _check_features(features: Any, name: str, num_features: int | None, allow_empty: bool = False) -> Any:
    array = features if isinstance(features, np.ndarray) else np.asarray(features)
    if array.ndim != 2 or array.shape[1] == 0 or (array.shape[0] == 0 and not allow_empty):
        raise DataError(f"{name}: shape {array.shape} given; rows x features, none of them 0, is needed.")
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_) or np.iscomplexobj(array):
        raise DataError(f"{name}: dtype {array.dtype} given; real numbers are needed.")
    if num_features is not None and array.shape[1] != num_features:
        raise DataError(f"{name}: {array.shape[1]} features given; {num_features}, as in fit's features, are needed.")
    return array


def _finite_targets(targets: Any, name: str, features: Any = None) -> FloatArray:
    column = as_column(targets, name)
    problem = count_not_finite(column, name)
    if problem or len(column) == 0:
        raise DataError(f"{name}: {problem or 'no rows'}; finite numbers are needed, so drop or mend those rows.")
    if features is not None and len(column) != features.shape[0]:
        raise DataError(f"{name}: {len(column)} rows for {features.shape[0]} rows of features; as many are needed.")
    return column
