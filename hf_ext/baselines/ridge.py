"""What a model has to beat: means by group and ridge regressions; and what these read off sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..evaluation import FloatArray, as_column, as_groups, count_not_finite

# Relative to the mean eigenvalue of the standardised features (which is 1): from next to none to next to constant.
DEFAULT_ALPHAS = tuple(float(value) for value in np.logspace(-6, 4, 41))
CHUNK_BYTES = 48 * 2**20
CONSTANT_STD = 1e-10  # a standard deviation this far below the feature's own size is rounding, not signal
NEGLIGIBLE = 1e-10  # of the largest variance, where there are fewer rows than features: rounding

K = 3
MAX_FEATURES = 2048  # ridge decomposes a matrix of this size at most: seconds, not minutes
CHUNK_RESIDUES = 500_000
PREDICTED_ROWS = 10_240  # whose features are held at once; whole blocks of `NearestBaseline`
LETTERS = 26  # A-Z

Columns = Sequence[Sequence[str]]  # of sequences: by column, then by row


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
    column = _finite_targets(targets, "targets", groups)
    names, index, counts = np.unique(as_groups(groups, len(column)), return_inverse=True, return_counts=True)
    means = dict(zip(names.tolist(), (np.bincount(index, weights=column) / counts).tolist()))
    mean = float(column.mean())
    return np.array([means.get(name, mean) for name in as_groups(asked, len(asked)).tolist()]), len(means)


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

    def __init__(self, alphas: Sequence[float] = DEFAULT_ALPHAS, *, standardize: bool = True) -> None:
        self.alphas: FloatArray = np.unique(np.asarray(alphas, dtype=np.float64))
        self.standardize = standardize

    def fit(self, features: Any, targets: Any, validation_features: Any, validation_targets: Any) -> RidgeBaseline:
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
        chosen = {"best_lambda": self.best_alpha, "validation_rmse": self.validation_rmse}
        return {"kind": "ridge", "num_features": len(self.weights), **chosen}


def fit_scale(features: Any, each_by_its_own: bool) -> tuple[FloatArray, FloatArray]:
    """Computes mean and inverse standard deviation of each feature; one that does not vary gets 0 and so no weight.

    Two passes: the mean first, then the squares around it, which is exact also where the mean is large.
    """
    num_rows, num_features = features.shape
    total, largest, squares = np.zeros((3, num_features))
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
        std = np.full_like(std, np.sqrt(np.mean(std[varies] ** 2)))
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
    shrunk = [projected.T / (variances + alpha) for alpha in alphas]
    weights = np.stack([axes @ one.T for one in shrunk], 1)
    return weights, center - np.tensordot(mean, weights, 1)


def principal_axes(features: Any, standardize: bool) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Computes principal axes of the scaled features by one eigendecomposition of size min(n, d).

    Args:
        features, standardize: as in `RidgeBaseline`.

    Returns:
        The features' mean (d,); axes (d, r), which turn raw features less their mean into uncorrelated coordinates; the
        variance of each coordinate, (r,), rising.
    """
    num_rows, num_features = features.shape
    mean, scale = fit_scale(features, standardize)
    if num_rows < num_features:
        basis = (features - mean) * scale
        variances, vectors = np.linalg.eigh(basis @ basis.T / num_rows)
        kept = variances > NEGLIGIBLE * variances[-1]
        variances = variances[kept]
        axes = basis.T @ (vectors[:, kept] / np.sqrt(num_rows * variances))
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
        if not np.isfinite(chunk).all():
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


# --- features of sequences ------------------------------------------------------------------------------------------


class _Column(NamedTuple):
    """How one column is read: `length` of its aligned sequences, or None for k-mers; the codes that are features."""

    length: int | None
    codes: NDArray[np.int64]


class SequenceFeatures:
    """Counts of (position, residue) where all sequences of a column are equally long, of 3-mers where they are not.

    A column with one value in training is left out, as is every count that does not vary there. Each of the other
    columns keeps at most its equal share of 2,048 features, those that vary most in training. A missing sequence, "",
    has counts of 0, and is none of those whose lengths are compared.

    Args:
        train: one list of n sequences (upper-case letters) per column, of which at least one varies.
        others: the same columns of rows to be predicted later; only their lengths are looked at.

    Raises:
        DataError: a character other than A-Z.

    Attributes: `name`, "one-hot", "3-mer" or "one-hot and 3-mer"; `num_features`; `num_counts`, how many vary in all.

    Cost: goes with the distinct sequences: 2 s for 50,000 of 250 residues; `transform` returns 4 kB a row at most.
    """

    def __init__(self, train: Columns, others: Sequence[Columns] = ()) -> None:
        varying = [i for i, column in enumerate(train) if len(set(column)) > 1]
        self._columns: dict[int, _Column] = {}
        self.num_counts = 0
        for i in varying:
            aligned = {len(one) for rows in (train, *others) for one in rows[i]} - {0}
            length = aligned.pop() if len(aligned) == 1 else None
            variance = _variance(train[i], length)
            num_varying = int(np.count_nonzero(variance))
            self.num_counts += num_varying
            most = np.argsort(-variance, kind="stable")[: min(MAX_FEATURES // len(varying), num_varying)]
            self._columns[i] = _Column(length, np.sort(most))
        self.num_features = sum(len(column.codes) for column in self._columns.values())
        kinds = {"one-hot" if column.length else f"{K}-mer" for column in self._columns.values()}
        self.name = " and ".join(sorted(kinds, reverse=True))

    def transform(self, columns: Columns) -> NDArray[np.float16]:
        """Returns the features of rows, (n, num_features); arguments and `DataError` as above."""
        return np.concatenate([_select(columns[i], column) for i, column in self._columns.items()], axis=1)

    def predict(self, model: Any, columns: Columns) -> Any:
        """Predicts by `model` from features of rows, which are made for `PREDICTED_ROWS` at a time."""
        starts = range(0, max(1, len(columns[0])), PREDICTED_ROWS)
        parts = ([column[start : start + PREDICTED_ROWS] for column in columns] for start in starts)
        return np.concatenate([model.predict(self.transform(part)) for part in parts])


def _select(sequences: Sequence[str], column: _Column) -> NDArray[np.float16]:
    distinct, index = _distinct(sequences)
    found = np.empty((len(distinct), len(column.codes)), np.float16)  # whole numbers, exact up to 2,048
    for place, counts in _count(distinct, column.length):
        found[place] = counts[:, column.codes].toarray()
    return found if len(found) == len(sequences) else found[index]


def _variance(sequences: Sequence[str], length: int | None) -> FloatArray:
    """Computes the variance of every count over the rows, (codes,); exactly 0 where it is the same in all rows."""
    distinct, index = _distinct(sequences)
    weights = np.bincount(index).astype(np.float64)
    total = 0.0
    squares = 0.0
    for place, counts in _count(distinct, length):
        total = total + counts.T @ weights[place]
        squares = squares + counts.multiply(counts).T @ weights[place]
    num_rows = len(sequences)
    # Sums of whole numbers are exact, so that a count that never varies gives 0 and not a rounding error.
    return np.asarray(num_rows * squares - total**2) / num_rows**2


def _distinct(sequences: Sequence[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Returns distinct sequences in order of appearance, and which of them each row holds."""
    position: dict[str, int] = {}
    index = np.fromiter((position.setdefault(one, len(position)) for one in sequences), np.int64, len(sequences))
    return list(position), index


def _count(sequences: list[str], length: int | None) -> Iterator[tuple[slice, Any]]:
    """Yields which sequences, and counts of their codes, sparse float64, in pieces of about `CHUNK_RESIDUES`."""
    from scipy.sparse import csr_matrix  # here, since scipy takes 0.2 s that scores do not need

    size = max(1, CHUNK_RESIDUES // max(1, max(map(len, sequences), default=1)))
    for start in range(0, len(sequences), size):
        chunk = sequences[start : start + size]
        letters = np.frombuffer("".join(chunk).encode("latin-1", "replace"), np.uint8).astype(np.int64) - ord("A")
        if len(letters) and not 0 <= letters.min() <= letters.max() < LETTERS:
            wrong = next(one for one in chunk if not (one.isascii() and one.isalpha() and one.isupper()))
            raise DataError(f"Sequence {wrong!r}: only the letters A-Z are residues; upper-case it or drop the row.")
        lengths = np.array([len(one) for one in chunk])
        owner = np.repeat(np.arange(len(chunk)), lengths)
        position = np.arange(len(letters)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        if length is not None:
            num_codes = length * LETTERS
            codes = position * LETTERS + letters
            chosen = position < length
        else:
            num_codes = LETTERS**K
            chosen = position <= lengths[owner] - K
            codes = sum(np.roll(letters, -i) * LETTERS ** (K - 1 - i) for i in range(K))
        ones = np.ones(np.count_nonzero(chosen))
        counts = csr_matrix((ones, (owner[chosen], codes[chosen])), shape=(len(chunk), num_codes))
        yield slice(start, start + size), counts
