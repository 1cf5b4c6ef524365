"""One number per row beside its label, and its correlation within groups of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from .arrays import Array, FloatArray, as_groups, as_pair, count_not_finite, divide, places_of
from .ranks import Once, Ranking, rank
from .rows import DEFAULT_THRESHOLD, THRESHOLD_METRICS, MetricValue, Rows, Summed

# Rows a group must have: Spearman of two is 1 or -1, whatever the model. As of S. Luo et al., Rotamer Density Estimator
# (ICLR 2023), whose correlations per structure leave out smaller ones.
MIN_GROUP_ROWS = 10
RELATIVE_ZERO = 1e-12  # a variance this far below its own terms is rounding: the resample is constant
VARYING = {  # sides that must not be constant
    "spearman": ("predictions", "references"),
    "pearson": ("predictions", "references"),
    "r2": ("references",),
}

GroupScore = dict[str, Any]  # `value`, None where `undefined` says why, and `n` rows


class Regression(Rows):
    """One number per row beside its label. A method per metric takes counts, (resamples, n), whole numbers.

    Args:
        predicted, measured: (n,) float64.
        threshold: rows at or above it are binders; None: `DEFAULT_THRESHOLD`.
    """

    def __init__(
        self,
        predicted: FloatArray,
        measured: FloatArray,
        threshold: float | None = None,
    ):
        super().__init__(len(measured))
        self.predicted = predicted
        self.measured = measured
        self.threshold = DEFAULT_THRESHOLD if threshold is None else threshold

    def why_undefined(self, name: str) -> str | None:
        sides = {"predictions": self.predicted, "references": self.measured}
        varying = VARYING.get(name, ())
        num_values = len(self.measured)
        if num_values == 0:
            return "no rows"
        for side, values in sides.items():
            if problem := count_not_finite(values, side):
                return problem
        if varying and num_values < 2:
            return "1 row; at least 2 are needed"
        for side in varying:
            if sides[side].min() == sides[side].max():
                return f"all {num_values:,} {side} are equal ({sides[side][0]:g})"
        cut = "predictions" if name == "precision" else "references"
        if name in THRESHOLD_METRICS and not (sides[cut] >= self.threshold).any():
            return f"no {cut.removesuffix('s')} is >= {self.threshold:g}"
        return None

    def why_constant(self) -> str | None:
        if problem := count_not_finite(self.predicted, "predictions"):
            return problem
        num = len(self.predicted)
        if num < 2 or self.predicted.min() < self.predicted.max():
            return None
        return f"all {num:,} predictions are {self.predicted[0]:g}; Spearman is undefined"

    @cached_property
    def label_ranks(self) -> Once:
        """Of `rank`; regressions of the same labels share it."""
        return Once(rank(self.measured))

    def share_labels(self, other: Rows) -> None:
        if isinstance(other, Regression):
            self.label_ranks = other.label_ranks

    @cached_property
    def _ranks(self) -> Callable[[FloatArray], tuple[FloatArray, FloatArray]]:
        return rank(self.predicted)

    def spearman(self, counts: FloatArray) -> FloatArray:
        left, left_squares = self._ranks(counts)
        right, right_squares = self.label_ranks(counts)
        products = np.einsum("bn,bn,bn->b", counts, left, right)
        return np.clip(divide(products, np.sqrt(left_squares * right_squares)), -1.0, 1.0)

    def _by_row(self, values: FloatArray) -> FloatArray:
        """Sums values, (values, ...), per row, (n, ...)."""
        return values

    @cached_property
    def means(self) -> dict[str, Summed]:
        error = self.predicted - self.measured
        numbers = self._by_row(np.ones(len(self.measured)))
        squares = Summed(self._by_row(error**2), numbers, np.sqrt)
        return {"rmse": squares, "mae": Summed(self._by_row(np.abs(error)), numbers)}

    @cached_property
    def _moments(self) -> Once:
        """Counts to covariance and both variances of predictions and labels."""
        # Around their means: squares of numbers far from 0 would lose what varies.
        left = self.predicted - self.predicted.mean()
        right = self.measured - self.measured.mean()
        columns = [left, right, left**2, right**2, left * right, np.ones(len(left))]
        terms = self._by_row(np.stack(columns, axis=1))

        def sum_up(counts: FloatArray) -> tuple[FloatArray, ...]:
            left, right, left_sq, right_sq, product, num = (counts @ terms).T
            return (
                product - left * right / num,
                _centred(left_sq, left, num),
                _centred(right_sq, right, num),
            )

        return Once(sum_up)

    def pearson(self, counts: FloatArray) -> FloatArray:
        covariance, left, right = self._moments(counts)
        return np.clip(divide(covariance, np.sqrt(left * right)), -1.0, 1.0)

    def r2(self, counts: FloatArray) -> FloatArray:
        """Computes the share of the labels' variance that is explained; 0 is what their own mean scores."""
        return 1.0 - divide(counts @ self.means["rmse"].sums, self._moments(counts)[2])

    @cached_property
    def _hits(self) -> Once:
        called = self.predicted >= self.threshold
        true = self.measured >= self.threshold
        terms = np.stack([called & true, called, true], axis=1).astype(np.float64)
        return Once(lambda counts: (counts @ terms).T)

    def recall(self, counts: FloatArray) -> FloatArray:
        """Computes the share of the rows measured at or above the threshold that were predicted there."""
        hits, _, true = self._hits(counts)
        return divide(hits, true)

    def precision(self, counts: FloatArray) -> FloatArray:
        """Computes the share of the rows predicted at or above the threshold that were measured there."""
        hits, called, _ = self._hits(counts)
        return divide(hits, called)

    def f1(self, counts: FloatArray) -> FloatArray:
        """Computes the harmonic mean of both; 0 where binders exist and none is predicted."""
        hits, called, true = self._hits(counts)
        return np.where(true > 0, divide(2 * hits, true + called), math.nan)

    @cached_property
    def _ranking(self) -> Ranking:
        return Ranking(self.predicted, self.measured >= self.threshold)

    def average_precision(self, counts: FloatArray) -> FloatArray:
        """Computes that of binders; see `Ranking`."""
        return self._ranking.average_precision(counts)


def per_group_spearman(predictions: Any, references: Any, groups: Sequence[Any] | Array) -> dict[str, GroupScore]:
    """Correlates within every group of 10 rows and more, which takes away what a model gains by telling groups apart.

    Args:
        predictions, references: (n,) numbers.
        groups: (n,) names (antibody, antigen, assay, ...); compared as text.

    Returns:
        Keyed by group name in sorted order. About 0.1 ms per group.
    """
    predicted, measured = as_pair(predictions, references)
    rows_of = places_of(as_groups(groups, len(measured)).tolist())
    found: dict[str, GroupScore] = {}
    for name, rows in sorted(rows_of.items()):
        few = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}; at least {MIN_GROUP_ROWS} are needed"
        result = MetricValue(math.nan, few)
        if len(rows) >= MIN_GROUP_ROWS:
            result = Regression(predicted[rows], measured[rows]).value("spearman")
        found[name] = {
            "value": result.known,
            "n": len(rows),
            "undefined": result.undefined,
        }
    return found


def defined_values(groups: Mapping[str, GroupScore]) -> FloatArray:
    """Returns values of the groups that have one, (groups,)."""
    return np.array(
        [one["value"] for one in groups.values() if one["value"] is not None],
        np.float64,
    )


def mean_of_groups(groups: Mapping[str, GroupScore]) -> MetricValue:
    """Averages over the groups that have a value, each weighing the same, whatever its size."""
    if not groups:
        return MetricValue(math.nan, "no rows")
    values = defined_values(groups)
    if not len(values):
        first = next(iter(groups.values()))["undefined"]
        return MetricValue(
            math.nan,
            f"none of the {len(groups):,} groups has a value (first group: {first})",
        )
    return MetricValue(float(np.mean(values)))


def at_limits(rows: Regression, sides: FloatArray) -> Regression:
    """Returns the same rows, but predicted at the label where that is a limit and the prediction lies beyond it.

    Args:
        sides: (n,) of -1 (the truth is at or below the label), 1 (at or above), 0 (exact).
    """
    is_beyond = sides * (rows.predicted - rows.measured) > 0
    return Regression(np.where(is_beyond, rows.measured, rows.predicted), rows.measured)


def _centred(squares: FloatArray, total: FloatArray, num_rows: FloatArray) -> FloatArray:
    """Computes the sum of squared deviations from the resample's own mean; exactly 0 where only rounding is left."""
    centred = squares - total**2 / num_rows
    return np.where(centred > RELATIVE_ZERO * squares, centred, 0.0)
