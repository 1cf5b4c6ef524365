"""Metrics of classes: of rows, of the residues of proteins, and of labels of which a row has several or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...labels import BoolArray
from .arrays import Array, FloatArray, IntArray, count_not_finite, divide
from .ranks import Once, Ranking, sort_ties
from .rows import Counted, Rows, Summed

CLASS_METRICS = (
    "accuracy",
    "balanced_accuracy",
    "mcc",
    "macro_f1",
    "log_loss",
    "calibration_error",
)
TWO_CLASS_METRICS = ("auroc", "average_precision")  # of the second class
MULTILABEL_METRICS = ("f1_max", "fmax_protein", "average_precision", "log_loss")
LEAST = 1e-15  # a probability below it counts as it: a model that was sure and wrong costs 34.5 nats
NUM_BINS = 15
NUM_CUTS = 256


class Classification(Rows):
    """The probabilities of one class among several, beside the true one, of rows or of the residues of rows.

    A metric is a function of sums over rows: of each class how often it is true, predicted and both, so that residues
    are drawn with their protein, and 1,195 classes cost no more than a row's three numbers.

    Args:
        probabilities: (values, C), any float dtype.
        labels: (values,) int64, 0 to C - 1.
        classes: C names, for sentences.
        row: (values,) int64, the row that each value is of.
        num_rows: of which some may hold no value.

    Cost: 5,000 rows of 1,195 classes and 1,000 resamples of all metrics: 1 s and 0.2 GB.
    """

    def __init__(
        self,
        probabilities: Array,
        labels: IntArray,
        classes: Sequence[str],
        row: IntArray,
        num_rows: int,
    ):
        super().__init__(num_rows)
        self._row = row
        self._labels = labels
        self._classes = classes
        self._problem = count_not_finite(probabilities, "predictions", row)
        self.predicted = probabilities.argmax(axis=1)
        rows = np.arange(len(labels))
        self._top = probabilities[rows, self.predicted]
        true = probabilities[rows, labels]
        self._losses = -np.log(np.maximum(true.astype(np.float64), LEAST))
        self._second = probabilities[:, -1].astype(np.float64)

    def why_undefined(self, name: str) -> str | None:
        if self.num_rows == 0:
            return "no rows"
        if not len(self._labels):
            return f"the {self.num_rows:,} rows hold no known class"
        if self._problem:
            return self._problem
        if name in ("mcc", "auroc") and (problem := self._all_one(self._labels, "labels")):
            return problem
        if name == "average_precision" and not self._labels.any():
            return f"no label is {self._classes[1]}"
        return self.why_constant() if name == "mcc" else None

    def why_constant(self) -> str | None:
        """Says that all predictions are one class; None where they are several, or there are none."""
        return self._all_one(self.predicted, "predictions")

    def _all_one(self, values: IntArray, side: str) -> str | None:
        if not len(values) or (values != values[0]).any():
            return None
        return f"all {len(values):,} {side} are {self._classes[values[0]]}"

    def _sum(self, values: FloatArray) -> FloatArray:
        """Sums values per row."""
        return np.bincount(self._row, values, self.num_rows).astype(np.float64)

    @cached_property
    def means(self) -> dict[str, Summed]:
        numbers = self._sum(np.ones(len(self._row)))
        right = (self.predicted == self._labels).astype(np.float64)
        right[~np.isfinite(self._top)] = np.nan
        return {
            "accuracy": Summed(self._sum(right), numbers),
            "log_loss": Summed(self._sum(self._losses), numbers),
        }

    @cached_property
    def _tallies(self) -> Once:
        """Counts to how often each class is true, predicted, and both, (resamples, classes) each."""
        from scipy.sparse import (
            csr_matrix,
        )  # here, since scipy takes 0.2 s that numbers do not need

        both = np.append(self._labels, self.predicted)
        found, codes = np.unique(both, return_inverse=True)
        num = len(found)
        true, called = np.split(codes, 2)
        is_right = true == called
        where = np.concatenate([true, num + called, 2 * num + true[is_right]])
        row = np.concatenate([self._row, self._row, self._row[is_right]])
        ones = np.ones(len(row))
        table = csr_matrix((ones, (where, row)), shape=(3 * num, self.num_rows))
        return Once(lambda counts: np.split((table @ counts.T).T, 3, axis=1))

    def balanced_accuracy(self, counts: FloatArray) -> FloatArray:
        """Averages, over the classes that occur, the share of their rows that is predicted right."""
        true, _, right = self._tallies(counts)
        return _mean(divide(right, true), true > 0)

    def macro_f1(self, counts: FloatArray) -> FloatArray:
        """Averages F1 over the classes that occur; one that is predicted and never true lowers that of the others."""
        true, called, right = self._tallies(counts)
        return _mean(divide(2 * right, true + called), true > 0)

    def mcc(self, counts: FloatArray) -> FloatArray:
        """Computes Matthews correlation of any number of classes: 1 where all is right, 0 by chance and of one class.

        Source: J. Gorodkin, Comparing two K-category assignments by a K-category correlation coefficient,
        Computational Biology and Chemistry 28 (2004), 367.
        """
        true, called, right = self._tallies(counts)
        num = true.sum(axis=1)
        covariance = num * right.sum(axis=1) - _products(true, called)
        of_called = num**2 - _products(called, called)
        of_true = num**2 - _products(true, true)
        return np.nan_to_num(divide(covariance, np.sqrt(of_called * of_true)))

    @cached_property
    def _gaps(self) -> FloatArray:
        """Of each row, in each bin of confidence, by how much right answers exceed it, (rows, bins)."""
        order, ends = sort_ties(self._top)
        sizes = np.diff(ends, prepend=-1)
        middle = np.repeat(ends - (sizes - 1) / 2, sizes)  # equal confidences are in one bin
        bins = np.empty(len(order), np.int64)
        bins[order] = (middle / len(order) * NUM_BINS).astype(np.int64)
        gap = (self.predicted == self._labels) - self._top.astype(np.float64)
        sums = np.bincount(self._row * NUM_BINS + bins, gap, self.num_rows * NUM_BINS)
        return sums.reshape(self.num_rows, NUM_BINS).astype(np.float64)

    def calibration_error(self, counts: FloatArray) -> FloatArray:
        """Averages the gap between the probability of the predicted class and the share that is right, over 15 bins.

        Bins hold equally many values of all rows, ordered by that probability (adaptive expected calibration error).
        """
        return divide(
            np.abs(counts @ self._gaps).sum(axis=1),
            counts @ self.means["accuracy"].numbers,
        )

    def metric(self, name: str) -> Counted:
        """Returns the metric as a function of counts; of the second of two classes see `Ranking`."""
        if name in TWO_CLASS_METRICS:
            return getattr(self._ranking, name)
        return super().metric(name)

    @cached_property
    def _ranking(self) -> Ranking:
        return Ranking(self._second, self._labels == 1)


class Multilabel(Rows):
    """The probability of each of several labels, which a row may all have or none.

    Args:
        probabilities: (n, k), any float dtype.
        labels: (n, k) of 0, 1, and NaN where it is not known, which counts nowhere.

    Cost: with 5,000 rows and 1,000 resamples 0.1 s of each label for `average_precision`, 1 s for the others.
    """

    def __init__(self, probabilities: Array, labels: FloatArray):
        super().__init__(len(labels))
        self._probabilities = probabilities
        self._known = np.isfinite(labels)
        self._has = labels == 1
        self._problem = count_not_finite(probabilities, "predictions")

    def why_undefined(self, name: str) -> str | None:
        if self.num_rows == 0:
            return "no rows"
        if not self._known.any():
            return f"the {self.num_rows:,} rows hold no known label"
        if self._problem:
            return self._problem
        if name == "log_loss" or self._has.any():
            return None
        return "no row has any of the labels"

    @cached_property
    def means(self) -> dict[str, Summed]:
        of_truth = np.where(self._has, self._probabilities, 1 - self._probabilities).astype(np.float64)
        losses = -np.log(np.maximum(of_truth, LEAST))
        summed = np.where(self._known, losses, 0).sum(axis=1)
        return {"log_loss": Summed(summed, self._known.sum(axis=1, dtype=float))}

    @cached_property
    def _at_ranks(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """`_reach` at thresholds that few, more and more pairs of row and label reach."""
        values = self._probabilities[self._known]
        ranks = np.geomspace(1, len(values), NUM_CUTS).astype(np.int64)
        return self._reach(np.unique(np.sort(values)[-np.unique(ranks)]))

    def _reach(self, cuts: Array) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Counts for each row labels that each threshold predicts, those of them it has, (n, cuts), and all it has."""
        row, _ = np.nonzero(self._known)
        values = self._probabilities[self._known]
        num_reached = np.searchsorted(cuts.astype(values.dtype), values, side="right")  # float32's 0.7 is below 0.7
        size = (self.num_rows, len(cuts) + 1)
        place = row * size[1] + num_reached

        def reached(place: IntArray) -> FloatArray:
            table = np.bincount(place, minlength=math.prod(size)).reshape(size)
            up_to = np.cumsum(table[:, ::-1], axis=1, dtype=np.float64)
            return up_to[:, :-1]

        return (
            reached(place),
            reached(place[self._has[self._known]]),
            self._has.sum(axis=1, dtype=np.float64),
        )

    def f1_max(self, counts: FloatArray) -> FloatArray:
        """Computes F1 of all pairs of row and label (micro), at the one threshold of all labels where it is highest.

        At most 256 thresholds are tried: all where there are few pairs, else such that steps in how many pairs are
        predicted are of a few percent.
        """
        called, right, has = [counts @ each for each in self._at_ranks]
        best = (2 * right / np.maximum(called + has[:, None], 1)).max(axis=1)
        return np.where(has > 0, best, np.nan)

    @cached_property
    def _of_rows(self) -> list[Array]:
        """Of each row that has a label, at 101 thresholds precision, whether any is predicted, recall, and 1."""
        called, right, has = self._reach(np.arange(101) / 100)
        has = has[:, None]
        return [right / np.maximum(called, 1), (called > 0) & (has > 0), right / np.maximum(has, 1), has > 0]

    def fmax_protein(self, counts: FloatArray) -> FloatArray:
        """Computes Fmax as CAFA does: the highest harmonic mean of precision, averaged over the rows with a prediction
        at a threshold, and recall, over all. Rows without a label are left out. Source: doi:10.1038/nmeth.2340."""
        precision, called, recall, has = [counts @ each for each in self._of_rows]
        precision = precision / np.maximum(called, 1)
        recall = recall / np.maximum(has, 1)
        best = (2 * precision * recall / np.maximum(precision + recall, LEAST)).max(axis=1)
        return np.where(has[:, 0] > 0, best, np.nan)

    @cached_property
    def _rankings(self) -> list[Ranking]:
        """Of each label that a row has, over the rows where it is known."""
        found = []
        for j in np.flatnonzero(self._has.any(axis=0)):
            rows = np.flatnonzero(self._known[:, j])
            scores = self._probabilities[rows, j].astype(np.float64)
            found.append(Ranking(scores, self._has[rows, j], rows))
        return found

    def average_precision(self, counts: FloatArray) -> FloatArray:
        """Averages over the labels that some row has (macro); see `Ranking`."""
        values = np.stack([ranking.average_precision(counts) for ranking in self._rankings], axis=1)
        return _mean(values, np.isfinite(values))


def _products(one: FloatArray, other: FloatArray) -> FloatArray:
    """Sums products over the second axis."""
    return np.einsum("bk,bk->b", one, other)


def _mean(values: FloatArray, exists: BoolArray) -> FloatArray:
    """Averages over the second axis what exists."""
    return divide(np.where(exists, values, 0.0).sum(axis=1), exists.sum(axis=1))


def find_shares(labels: FloatArray, num_classes: int | None = None, more: float = 0.0) -> FloatArray:
    """Computes how frequent each of `num_classes` is, or each column's mean, (outputs,), without NaN.

    `more` is how many times each class, or both 0 and 1, count as seen beside what was.
    """
    known = np.isfinite(labels)
    if num_classes:
        counts = np.bincount(labels[known].astype(np.int64), minlength=num_classes) + more
        return counts / max(1, counts.sum())
    summed = np.where(known, labels, 0.0).sum(axis=0)
    return divide(summed + more, known.sum(axis=0) + 2 * more)
