"""Metrics of a regression in plain numpy, float64. Each says why where it has no value; none turns that into 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ._arrays import FloatArray, as_groups, as_pair, count_not_finite

DEFAULT_THRESHOLD = 9.0  # pKd of 1 nM: what drug discovery calls a strong binder
# Rows a group must have: Spearman of two is 1 or -1, whatever the model. As of S. Luo et al., Rotamer Density Estimator
# (ICLR 2023), whose correlations per structure leave out smaller ones.
MIN_GROUP_ROWS = 10


class MetricValue(NamedTuple):
    """A number, or NaN and the reason why there is none."""

    value: float
    undefined: str | None = None


def average_ranks(values: FloatArray) -> FloatArray:
    """Returns ranks from 1 to n, (n,) float64; tied values share the mean of their ranks. One sort."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def spearman(predictions: Any, references: Any) -> MetricValue:
    """Rank correlation: Pearson of the average ranks, so ties are treated as in `scipy.stats.spearmanr`.

    Args:
        predictions, references: (n,) numbers.

    Returns:
        Value in [-1, 1]. Undefined: fewer than 2 rows, a value that is not finite, either side constant.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    predicted, measured = as_pair(predictions, references)
    reason = why_undefined(predicted, measured, num_needed=2, varying=("predictions", "references"))
    return _undefined(reason) if reason else _correlation(average_ranks(predicted), average_ranks(measured))


def pearson(predictions: Any, references: Any) -> MetricValue:
    """Linear correlation; arguments, returns and errors as for `spearman`."""
    predicted, measured = as_pair(predictions, references)
    reason = why_undefined(predicted, measured, num_needed=2, varying=("predictions", "references"))
    return _undefined(reason) if reason else _correlation(predicted, measured)


def rmse(predictions: Any, references: Any) -> MetricValue:
    """Root mean squared error, in the unit of the labels. Undefined: no rows, or a value that is not finite."""
    predicted, measured = as_pair(predictions, references)
    reason = why_undefined(predicted, measured)
    return _undefined(reason) if reason else MetricValue(float(np.sqrt(np.mean((predicted - measured) ** 2))))


def mae(predictions: Any, references: Any) -> MetricValue:
    """Mean absolute error, in the unit of the labels. Undefined: no rows, or a value that is not finite."""
    predicted, measured = as_pair(predictions, references)
    reason = why_undefined(predicted, measured)
    return _undefined(reason) if reason else MetricValue(float(np.mean(np.abs(predicted - measured))))


def r2(predictions: Any, references: Any) -> MetricValue:
    """Share of the references' variance that is explained; 0 is what their own mean scores, below it is worse.

    Undefined: fewer than 2 rows, a value that is not finite, constant references. Constant predictions are fine.
    """
    predicted, measured = as_pair(predictions, references)
    reason = why_undefined(predicted, measured, num_needed=2, varying=("references",))
    if reason:
        return _undefined(reason)
    residual = float(np.sum((measured - predicted) ** 2))
    return MetricValue(1.0 - residual / float(np.sum((measured - measured.mean()) ** 2)))


@dataclass(frozen=True)
class ThresholdCounts:
    """How many of `n` rows are at or above a threshold: in both columns, predicted, measured."""

    n: int
    num_hits: int
    num_predicted: int
    num_measured: int
    threshold: float
    problem: str | None = None

    @property
    def base_rate(self) -> float:
        """Share of rows measured at or above the threshold: the precision of calling every row a binder."""
        return self.num_measured / self.n if self.n and not self.problem else math.nan

    @property
    def predicted_rate(self) -> float:
        """Share of rows predicted at or above the threshold: the recall of calling that many rows at random."""
        return self.num_predicted / self.n if self.n and not self.problem else math.nan

    def recall(self) -> MetricValue:
        """Share of the measured rows that were predicted. Undefined: no reference reaches the threshold."""
        return self._ratio(self.num_hits, self.num_measured, "reference")

    def precision(self) -> MetricValue:
        """Share of the predicted rows that were measured. Undefined: no prediction reaches the threshold."""
        return self._ratio(self.num_hits, self.num_predicted, "prediction")

    def f1(self) -> MetricValue:
        """Harmonic mean of both; 0 where binders exist and none is predicted. Undefined as recall is."""
        if self.num_measured == 0:
            return self.recall()
        return self._ratio(2 * self.num_hits, self.num_measured + self.num_predicted, "reference")

    def _ratio(self, part: int, whole: int, kind: str) -> MetricValue:
        if self.problem:
            return _undefined(self.problem)
        return MetricValue(part / whole) if whole else _undefined(f"no {kind} is >= {self.threshold:g}")


def threshold_counts(predictions: Any, references: Any, threshold: float = DEFAULT_THRESHOLD) -> ThresholdCounts:
    """Counts the rows at or above `threshold` (in the unit of the labels; `pKd >= 9` by default).

    Returns:
        Counts whose `recall()`, `precision()` and `f1()` give the metrics, and the rates to read them beside.
    """
    predicted, measured = as_pair(predictions, references)
    called, true = predicted >= threshold, measured >= threshold
    return ThresholdCounts(
        n=len(measured),
        num_hits=int(np.count_nonzero(called & true)),
        num_predicted=int(np.count_nonzero(called)),
        num_measured=int(np.count_nonzero(true)),
        threshold=float(threshold),
        problem=why_undefined(predicted, measured),
    )


@dataclass(frozen=True)
class GroupedValue:
    """One metric per group. `mean` weighs every group that has a value the same, whatever its size."""

    values: dict[str, MetricValue]
    sizes: dict[str, int]

    @property
    def defined(self) -> list[float]:
        return [result.value for result in self.values.values() if result.undefined is None]

    @property
    def mean(self) -> MetricValue:
        if not self.values:
            return _undefined("no rows")
        if not self.defined:
            reason = next(iter(self.values.values())).undefined
            return _undefined(f"none of the {len(self.values):,} groups has a value (first group: {reason})")
        return MetricValue(float(np.mean(self.defined)))


def per_group(
    predictions: Any,
    references: Any,
    groups: Sequence[Any] | NDArray[Any],
    metric: Callable[[Any, Any], MetricValue] = spearman,
    min_rows: int = MIN_GROUP_ROWS,
) -> GroupedValue:
    """Score every group by itself, which takes away what a model gains by telling the groups apart.

    Args:
        predictions, references: (n,) numbers.
        groups: (n,) names (antibody, antigen, assay, ...); compared as text.
        metric: what to compute inside a group.
        min_rows: a smaller group has no value.

    Returns:
        Values and sizes, keyed by group name in sorted order. About 60 microseconds per group.
    """
    predicted, measured = as_pair(predictions, references)
    names, inverse, counts = np.unique(as_groups(groups, len(measured)), return_inverse=True, return_counts=True)
    rows_by_group = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    values: dict[str, MetricValue] = {}
    for name, rows in zip(names.tolist(), rows_by_group):
        few = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}; at least {min_rows} are needed"
        values[name] = _undefined(few) if len(rows) < min_rows else metric(predicted[rows], measured[rows])
    return GroupedValue(values, dict(zip(names.tolist(), counts.tolist())))


def _undefined(reason: str) -> MetricValue:
    return MetricValue(math.nan, reason)


def why_undefined(
    predicted: FloatArray, measured: FloatArray, num_needed: int = 1, varying: tuple[str, ...] = ()
) -> str | None:
    """Name the first thing that leaves a metric without a value, None where nothing does."""
    if len(measured) == 0:
        return "no rows"
    for values, name in ((predicted, "predictions"), (measured, "references")):
        problem = count_not_finite(values, name)
        if problem:
            return problem
    if len(measured) < num_needed:
        return f"{len(measured)} row; at least {num_needed} are needed"
    for values, name in ((predicted, "predictions"), (measured, "references")):
        if name in varying and values.min() == values.max():
            return f"all {len(values):,} {name} are equal ({values[0]:g})"
    return None


def _correlation(left: FloatArray, right: FloatArray) -> MetricValue:
    """Pearson correlation of two columns that are finite and not constant."""
    left, right = left - left.mean(), right - right.mean()
    # Largest deviation 1 on both sides: squares of very small or large labels would leave the range of float64.
    largest = float(np.abs(left).max()), float(np.abs(right).max())
    if min(largest) == 0.0 or not all(map(math.isfinite, largest)):
        return _undefined("the values' spread is beyond what float64 can hold")
    left, right = left / largest[0], right / largest[1]
    covariance = np.dot(left, right) / np.sqrt(np.dot(left, left) * np.dot(right, right))
    return MetricValue(float(np.clip(covariance, -1.0, 1.0)))
