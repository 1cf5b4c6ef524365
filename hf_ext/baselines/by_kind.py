"""What a model of other labels than one number per row has to beat: constants, near rows, windows of residues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from ..data import LETTERS, draw_rows
from ..evaluation import FloatArray, metrics_of, rows_for
from ..labels import UNKNOWN, Array, Float32Array, IntArray, LabelKind
from .logistic import LogisticBaseline
from .ridge import RidgeBaseline, fit_scale

NEIGHBOURS = (1, 3, 10)
MAX_PAIRS = 100_000_000  # of a training and a validation row: a sample of more training rows is kept
BLOCK_ROWS = 512  # that are compared with all training rows at once
WINDOW = 15  # residues, the one that is predicted in the middle
MAX_RESIDUES = 50_000  # that are fitted
PROTEINS_AT_ONCE = 256  # whose residues are predicted together
Residues = Sequence[Any]  # of each protein an array, one entry per residue


def predict_constant(kind: LabelKind, labels: Any, sizes: int | Sequence[int]) -> Any:
    """Predicts the same everywhere: how frequent classes or labels are in training, or the mean of numbers.

    Args:
        labels: of the training rows, as `rows_for` takes them.
        sizes: how many rows to predict; of residues the length of each protein.

    Returns:
        (rows, outputs), or (rows,) of one number; of residues a list of such, one per protein.
    """
    truth = kind.flatten(labels)
    truth = np.where(truth == UNKNOWN, np.nan, truth)
    value = metrics_of(kind).constant(truth)

    def repeat(size: int) -> Any:
        return np.broadcast_to(value, (size, *np.shape(value)))

    return repeat(sizes) if isinstance(sizes, int) else [repeat(size) for size in sizes]


class ColumnRidges:
    """A `RidgeBaseline` of each of several numbers, fitted on the rows that have it; labels are (n, k)."""

    def __init__(self, kind: LabelKind, *, standardize: bool = True):
        self.kind = kind
        self.ridges = [RidgeBaseline(standardize=standardize) for _ in kind.names]

    def fit(
        self,
        features: Any,
        labels: Any,
        validation_features: Any,
        validation_labels: Any,
    ) -> ColumnRidges:
        """Fits as `RidgeBaseline.fit` does."""
        for ridge, train, held_out in zip(self.ridges, np.transpose(labels), np.transpose(validation_labels)):
            known = np.isfinite(train)
            asked = np.isfinite(held_out)
            ridge.fit(
                features[known],
                train[known],
                validation_features[asked],
                held_out[asked],
            )
        return self

    def predict(self, features: Any) -> FloatArray:
        """Predicts (n, k), in the units of the labels."""
        return np.stack([ridge.predict(features) for ridge in self.ridges], axis=1)

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able."""
        return {
            "kind": "ridge",
            "columns": {n: each.summary() for n, each in zip(self.kind.names, self.ridges)},
        }


def make_linear(kind: LabelKind, *, standardize: bool = True) -> RidgeBaseline | ColumnRidges | LogisticBaseline:
    """Returns the linear model of a kind of label, for features of rows."""
    if kind.linear_name == "logistic regression":
        return LogisticBaseline(kind, standardize=standardize)
    return ColumnRidges(kind, standardize=standardize) if kind.output_shape else RidgeBaseline(standardize=standardize)


class NearestBaseline:
    """The labels of the training rows whose centred features have the highest cosine; validation chooses how many.

    Numbers are their mean. Probabilities are shares among them and one row more that stands for all of training: none
    is 0 only because few rows are near.

    Cost: 5,000 rows beside 12,000 of 2,048 features in 10 s on one core; of validation rows thrice, beside `MAX_PAIRS`
    over their number of training rows at most.

    Args:
        kind: not of residues.
    """

    def __init__(self, kind: LabelKind):
        self.kind = kind

    def fit(
        self,
        features: Any,
        labels: Any,
        validation_features: Any,
        validation_labels: Any,
    ) -> NearestBaseline:
        """Keeps the training rows; arguments as of `LogisticBaseline.fit`, or with labels (n,) and (n, k) numbers."""
        rows = draw_rows(len(features), 0, max(1, MAX_PAIRS // max(1, len(validation_features))))
        features = features[rows]
        truth = np.asarray(labels, np.float64)[rows]
        self._mean = np.asarray(features, np.float64).mean(axis=0)
        self._rows = self._directions(features)
        self._values, self._value_of = self.kind.code(truth)
        constant = predict_constant(self.kind, truth, 1)
        self._constant = np.reshape(constant, (1, -1))
        metric = metrics_of(self.kind).chooses
        losses = []
        for num in NEIGHBOURS:
            predicted = self._predict(validation_features, num)
            loss = rows_for(self.kind, predicted, validation_labels).value(metric)
            losses.append(np.nan_to_num(loss.value, nan=np.inf))
        self.num_neighbours = NEIGHBOURS[np.argmin(losses)]
        return self

    def predict(self, features: Any) -> FloatArray:
        """Predicts (n, outputs) probabilities, or (n,) or (n, k) numbers; after `fit`."""
        return self._predict(features, self.num_neighbours)

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able; after `fit`."""
        return {
            "kind": "nearest rows",
            "num_rows": len(self._rows),
            "num_neighbours": self.num_neighbours,
        }

    @staticmethod
    def count_products(sizes: Sequence[int], width: int) -> int:
        """Counts multiply-adds of a fit and a prediction; `sizes`: rows of training, of validation and to predict."""
        num_rows, num_validation, num_asked = sizes
        kept = min(num_rows, MAX_PAIRS // max(1, num_validation))
        return kept * width * (len(NEIGHBOURS) * num_validation + num_asked)

    def _directions(self, features: Any) -> Float32Array:
        centred = (features - self._mean).astype(np.float32)
        lengths = np.linalg.norm(centred, axis=1, keepdims=True)
        return centred / np.maximum(lengths, 1e-12)

    def _predict(self, features: Any, num: int) -> FloatArray:
        num = min(num, len(self._rows))
        found = [np.empty((0, self._constant.shape[1]))]
        for start in range(0, len(features), BLOCK_ROWS):
            cosines = self._directions(features[start : start + BLOCK_ROWS]) @ self._rows.T
            nearest = np.argpartition(-cosines, num - 1, axis=1)[:, :num]
            values = self._values[self._value_of[nearest]]
            known = np.isfinite(values)
            total = np.where(known, values, 0.0).sum(axis=1)
            number = known.sum(axis=1)
            alone = np.maximum(number == 0, self.kind.prior_rows)
            found.append((total + alone * self._constant) / (number + alone))
        return self.kind.shape_outputs(np.concatenate(found))


class KernelBaseline:
    """A kernel ridge regression of one number on standardised features: a linear one on `KernelMap`.

    Cost: that of a ridge of 512 features.
    """

    def fit(
        self,
        features: Array,
        targets: FloatArray,
        validation_features: Array,
        validation_targets: FloatArray,
    ) -> KernelBaseline:
        """Fits as `RidgeBaseline.fit` does."""
        import torch  # here, since scores need none of it

        from ..models import NUM_LANDMARKS, KernelMap

        self._mean, self._scale = fit_scale(features, True)
        landmarks = draw_rows(len(features), 0, NUM_LANDMARKS)
        self._map = KernelMap.fit(torch.from_numpy(self._standardize(features[landmarks])))
        self._ridge = RidgeBaseline(standardize=False)
        self._ridge.fit(self._encode(features), targets, self._encode(validation_features), validation_targets)
        return self

    def predict(self, features: Array) -> FloatArray:
        """Predicts (n,); after `fit`."""
        return self._ridge.predict(self._encode(features))

    def summary(self) -> dict[str, Any]:
        """Returns what was fitted, JSON-able; after `fit`."""
        return {**self._ridge.summary(), "kind": "kernel ridge"}

    def _standardize(self, features: Array) -> Float32Array:
        return ((features - self._mean) * self._scale).astype(np.float32)

    def _encode(self, features: Array) -> Float32Array:
        import torch

        parts = [features[i : i + BLOCK_ROWS] for i in range(0, len(features), BLOCK_ROWS)]
        return np.concatenate([self._map(torch.from_numpy(self._standardize(part))).numpy() for part in parts])


def predict_residues(
    kind: LabelKind,
    known: Sequence[tuple[Sequence[str], Residues]],
    encode: Any,
    asked: Sequence[str],
    standardize: bool,
) -> tuple[list[Array], dict[str, Any]]:
    """Predicts labels of residues by a linear model of features of each, of which at most 50,000 of a split are fitted.

    Args:
        kind: of residues.
        known: sequences of training and of validation, and their labels.
        encode: makes features, (residues, d), of sequences and of numbers among their residues; None: all.
        asked: sequences to predict.
        standardize: as in `RidgeBaseline`.

    Returns:
        Of each of `asked` (length, C) probabilities, or (length,) numbers; and what was fitted, JSON-able.

    Cost: of `window_features` seconds; 0.1 s per 10,000 residues predicted.
    """
    linear = make_linear(kind, standardize=standardize)
    given = []
    for sequences, labels in known:
        truth = kind.flatten(labels)
        chosen = np.flatnonzero(np.isfinite(truth) & (truth != UNKNOWN))
        chosen = chosen[draw_rows(len(chosen), 0, MAX_RESIDUES)]
        given += [encode(sequences, chosen), truth[chosen]]
    linear.fit(*given)
    found: list[Array] = []
    for start in range(0, len(asked), PROTEINS_AT_ONCE):
        sequences = asked[start : start + PROTEINS_AT_ONCE]
        predicted = linear.predict(encode(sequences, None))
        ends = np.cumsum([len(sequence) for sequence in sequences])
        found += np.split(predicted, ends[:-1])
    return found, linear.summary()


def window_features(sequences: Sequence[str], residues: IntArray | None) -> NDArray[np.uint8]:
    """Encodes the letters around residues one-hot, 0 beyond the ends: (residues, 15 * 26).

    Args:
        sequences: of A-Z.
        residues: numbers among all residues in their order; None: all.
    """
    half = WINDOW // 2
    gap = half * "["  # the character after Z
    text = gap.join(["", *sequences, ""])
    codes = np.frombuffer(text.encode(), np.uint8) - ord("A")
    begins = np.flatnonzero(codes < LETTERS) - half
    if residues is not None:
        begins = begins[residues]
    windows = sliding_window_view(codes, WINDOW)[begins]
    one_hot = np.eye(LETTERS + 1, LETTERS, dtype=np.uint8)
    return one_hot[windows].reshape(len(windows), WINDOW * LETTERS)
