"""How the binders stand in a ranking: average precision and enrichment, from row counts as the bootstrap has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._arrays import FloatArray, as_pair, divide
from .metrics import DEFAULT_THRESHOLD, MetricValue, why_undefined

ENRICHMENTS = {"enrichment_1pct": 1, "enrichment_5pct": 5}  # metric -> per cent of the rows that are looked at


@dataclass(frozen=True)
class RankedHits:
    """Rows from the highest prediction down; rows with one prediction are a tie, which no order of theirs may decide.

    Attributes:
        order: (n,) row numbers, highest prediction first.
        ends: (ties,) where in `order` each tie ends.
        is_hit: (n,) 1 for a binder, else 0, by row.
    """

    order: NDArray[np.intp]
    ends: NDArray[np.intp]
    is_hit: FloatArray

    @classmethod
    def of(cls, predicted: FloatArray, is_hit: NDArray[np.bool_]) -> RankedHits:
        _, inverse, counts = np.unique(-predicted, return_inverse=True, return_counts=True)
        return cls(np.argsort(inverse, kind="stable"), np.cumsum(counts) - 1, is_hit.astype(np.float64))

    def score(self, counts: FloatArray) -> dict[str, FloatArray]:
        """Every metric below on resamples in which each row comes as often as `counts` says; NaN without a binder.

        Args:
            counts: (resamples, n), whole numbers.

        Returns:
            Metric name -> (resamples,).
        """
        rows, hits = self.accumulate(counts)
        return {name: measure(rows, hits) for name, measure in _MEASURES.items()}

    def accumulate(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Rows, and binders, from the top to the end of each tie: (resamples, ties) each."""
        return self._down_to_each_tie(counts), self._down_to_each_tie(counts * self.is_hit)

    def _down_to_each_tie(self, weights: FloatArray) -> FloatArray:
        return np.cumsum(np.take(weights, self.order, axis=1), axis=1)[:, self.ends]


def _average_precision(rows: FloatArray, hits: FloatArray) -> FloatArray:
    precision = np.divide(hits, rows, out=np.zeros_like(hits), where=rows > 0)
    return divide(np.einsum("bt,bt->b", np.diff(hits, axis=1, prepend=0.0), precision), hits[:, -1])


def _enrichment(rows: FloatArray, hits: FloatArray, percent: int) -> FloatArray:
    top = np.ceil(percent * rows[:, -1] / 100)  # whole numbers are multiplied first: 1 % of 700 is 7
    tie = (rows < top[:, None]).sum(axis=1, keepdims=True)  # in which the top ends
    rows_to, hits_to = (np.take_along_axis(each, tie, axis=1)[:, 0] for each in (rows, hits))
    above = np.maximum(tie - 1, 0)
    rows_above, hits_above = (
        np.where(tie > 0, np.take_along_axis(each, above, axis=1), 0.0)[:, 0] for each in (rows, hits)
    )
    in_top = hits_above + (hits_to - hits_above) * (top - rows_above) / (rows_to - rows_above)
    return divide(in_top / top, hits[:, -1] / rows[:, -1])


_MEASURES: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "average_precision": _average_precision,
    **{name: partial(_enrichment, percent=percent) for name, percent in ENRICHMENTS.items()},
}


def average_precision(predictions: Any, references: Any, threshold: float = DEFAULT_THRESHOLD) -> MetricValue:
    """Area under precision and recall as steps: the sum over cuts of (gain in recall) times (precision at the cut).

    Cuts are the distinct predictions from the highest down, so that rows with one prediction come in together, as in
    scikit-learn's `average_precision_score`. Only the order of predictions counts: a constant scores the share of
    binders, a perfect order 1.

    Args:
        predictions, references: (n,) numbers.
        threshold: references at or above it are binders; predictions are ranked, not cut there.

    Returns:
        Value in (0, 1]. Undefined: no rows, a value that is not finite, or no binder.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    return _measure(_average_precision, predictions, references, threshold)


def enrichment(predictions: Any, references: Any, threshold: float = DEFAULT_THRESHOLD, *, percent: int) -> MetricValue:
    """Binders among the highest predictions, as a multiple of what drawing rows at random would find.

    (share of binders in the top) / (share of binders in all rows), where the top is `percent` % of the rows, rounded up
    to whole ones: 1 row of 60 at 1 %. Of rows with one prediction of which only some fit in, the expectation over all
    their orders counts: 2 binders among 4 such rows for 1 place are 0.5. A constant scores 1; the highest possible is
    the smaller of n / (rows of the top) and n / binders.

    Args:
        predictions, references, threshold: as for `average_precision`.
        percent: of the rows, above 0, at most 100.

    Returns:
        Value of 0 or more. Undefined, and errors: as for `average_precision`.
    """
    return _measure(partial(_enrichment, percent=percent), predictions, references, threshold)


def _measure(
    measure: Callable[[FloatArray, FloatArray], FloatArray], predictions: Any, references: Any, threshold: float
) -> MetricValue:
    predicted, measured = as_pair(predictions, references)
    is_hit = measured >= threshold
    reason = why_undefined(predicted, measured) or (None if is_hit.any() else f"no reference is >= {threshold:g}")
    if reason:
        return MetricValue(math.nan, reason)
    rows, hits = RankedHits.of(predicted, is_hit).accumulate(np.ones((1, len(measured))))
    return MetricValue(float(measure(rows, hits)[0]))
