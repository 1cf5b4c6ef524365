"""Percentile bootstrap of all metrics at once, from row counts instead of copied rows: no resample is ever sorted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ._arrays import FloatArray, divide
from .resampling import ResamplingUnits, check_units
from .top_ranked import RankedHits

# 50 million drawn rows take about 3 s on two cores; beyond that the number of resamples is lowered, but not below the
# floor, under which the ends of a 95 % interval rest on fewer than five resamples each.
MAX_DRAWS = 50_000_000
MIN_RESAMPLES = 200
CHUNK_DRAWS = 400_000  # keeps the dozen (chunk, n) arrays of a step in the CPU's cache
RELATIVE_ZERO = 1e-12  # a variance this far below its own terms is rounding: the resample is constant


def affordable_resamples(num_rows: int, num_resamples: int) -> int:
    """Returns how many of `num_resamples` are drawn for `num_rows` rows: all of them up to 50,000 rows at 1,000."""
    return min(num_resamples, max(MIN_RESAMPLES, MAX_DRAWS // max(num_rows, 1)))


def bootstrap_metrics(
    predicted: FloatArray,
    measured: FloatArray,
    *,
    threshold: float | None,
    num_resamples: int,
    seed: int,
    units: ResamplingUnits | None = None,
) -> dict[str, FloatArray]:
    """Returns every metric on every resample of the rows, or of their units.

    Args:
        predicted, measured: (n,) float64, finite, n >= 1.
        threshold: of binders, in the unit of the labels; None leaves out the metrics that need one.
        num_resamples: how many times n rows, or as many units as there are, are drawn with replacement.
        seed: of the numpy generator; the same seed gives the same draws.
        units: rows that are drawn together; None: each by itself.

    Returns:
        Metric name -> (num_resamples,) float64, NaN where the metric has no value on that resample. Takes about 60 ns
        per drawn row and holds some 50 MB.
    """
    generator = np.random.default_rng(seed)
    num_rows, units = len(measured), check_units(units, len(measured))
    terms = moment_terms(predicted, measured)
    ranked = RankedColumn.of(predicted), RankedColumn.of(measured)
    binders = None if threshold is None else BinderMetrics.of(predicted, measured, threshold)
    chunk = max(1, CHUNK_DRAWS // num_rows)
    parts: list[dict[str, FloatArray]] = []
    for start in range(0, num_resamples, chunk):
        counts = draw_counts(generator, num_rows, min(chunk, num_resamples - start), units)
        part = metrics_from_moments(counts @ terms, counts.sum(axis=1))
        part["spearman"] = _spearman_from_counts(counts, *ranked)
        if binders is not None:
            part |= binders.score_hits(counts) | binders.ranked.score(counts)
        parts.append(part)
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def bootstrap_mean(values: FloatArray, *, num_resamples: int, seed: int) -> FloatArray:
    """Returns the mean of `values`, (n,), on every resample of them, as (num_resamples,) float64."""
    generator = np.random.default_rng(seed)
    chunk = max(1, CHUNK_DRAWS // len(values))
    sizes = [min(chunk, num_resamples - start) for start in range(0, num_resamples, chunk)]
    return np.concatenate([draw_counts(generator, len(values), size) @ values for size in sizes]) / len(values)


def percentile_interval(
    samples: FloatArray, confidence: float, units: ResamplingUnits | None = None
) -> tuple[float | None, float | None]:
    """Returns the two percentiles that leave out (1 - confidence) / 2 each, less where few `units` were drawn.

    None, None with fewer than 2 values, or 1 unit.
    """
    defined = samples[np.isfinite(samples)]
    if len(defined) < 2 or (units is not None and units.num_units < 2):
        return None, None
    shares = [(1 - confidence) / 2, (1 + confidence) / 2]
    if units is not None:
        tail = _tail_of_few(shares[0], units)
        shares = [tail, 1 - tail]
    low, high = np.quantile(defined, shares)
    return float(low), float(high)


def _tail_of_few(tail: float, units: ResamplingUnits) -> float:
    """The share to leave out at either end, so that percentiles from few units hold what they say.

    A resample of G units varies by (G - 1) / G less than G new units would, and its spread is itself a guess from G
    numbers, or from fewer where some units hold most rows: sqrt(G / (G - 1)) times the quantile of t, with effective
    units - 1 degrees of freedom, takes the place of the normal one. `benchmarks/interval_coverage.py` measures it.
    Source: T. C. Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69 (2015), 371,
    the expanded percentile interval.
    """
    from scipy.special import ndtr  # here, since scipy takes 0.2 s that rows do not need

    inflation = math.sqrt(units.num_units / (units.num_units - 1))
    return float(ndtr(t_quantile(tail, units.num_effective) * inflation))


def t_quantile(share: float, num_units: float) -> float:
    """Quantile of Student's t with units - 1 degrees of freedom, at least 1."""
    from scipy.special import stdtrit

    return float(stdtrit(max(num_units - 1, 1.0), share))


@dataclass(frozen=True)
class RankedColumn:
    """A column sorted once: tie group of each row, and where each group ends in sorted order."""

    order: NDArray[np.intp]
    ends: NDArray[np.intp]
    group_of_row: NDArray[np.intp]

    @classmethod
    def of(cls, values: FloatArray) -> RankedColumn:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return cls(np.argsort(inverse, kind="stable"), np.cumsum(counts) - 1, inverse)

    def deviations(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Returns each row's average rank in each resample less the mean rank, and the sum of their squares."""
        num_rows = counts.sum(axis=1, keepdims=True)
        below_or_equal = np.cumsum(np.take(counts, self.order, axis=1), axis=1)
        if len(self.ends) < counts.shape[1]:
            below_or_equal = below_or_equal[:, self.ends]
        sizes = np.diff(below_or_equal, axis=1, prepend=0.0)
        centred = below_or_equal - (sizes - 1) / 2 - (num_rows + 1) / 2
        return np.take(centred, self.group_of_row, axis=1), np.einsum("bg,bg,bg->b", sizes, centred, centred)


def draw_counts(
    generator: np.random.Generator, num_rows: int, num_resamples: int, units: ResamplingUnits | None = None
) -> FloatArray:
    """Draws `num_rows` rows with replacement, `num_resamples` times; returns how often each came, (resamples, n).

    With `units` as many units as there are are drawn, each with all its rows, so that the number of rows varies.
    """
    size = num_rows if units is None else units.num_units
    drawn = generator.integers(0, size, size=(num_resamples, size))
    drawn += np.arange(num_resamples)[:, None] * size
    counts = np.bincount(drawn.reshape(-1), minlength=num_resamples * size)
    counts_of_units = counts.reshape(num_resamples, size).astype(np.float64)
    return counts_of_units if units is None else np.take(counts_of_units, units.unit_of_row, axis=1)


def _spearman_from_counts(counts: FloatArray, left: RankedColumn, right: RankedColumn) -> FloatArray:
    left_ranks, left_squares = left.deviations(counts)
    right_ranks, right_squares = right.deviations(counts)
    products = np.einsum("bn,bn,bn->b", counts, left_ranks, right_ranks)
    return divide(products, np.sqrt(left_squares) * np.sqrt(right_squares))


def moment_terms(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    """Returns what each row adds to the sums below, (n, 7)."""
    left, right = predicted - predicted.mean(), measured - measured.mean()
    error = predicted - measured
    return np.stack([left, right, left**2, right**2, left * right, error**2, np.abs(error)], axis=1)


def metrics_from_moments(sums: FloatArray, num_rows: FloatArray) -> dict[str, FloatArray]:
    """Returns the plain metrics but Spearman from sums of `moment_terms`, (resamples, 7), over (resamples,) rows."""
    left, right, left_sq, right_sq, product, error_sq, error_abs = sums.T
    left_var, right_var = _centred(left_sq, left, num_rows), _centred(right_sq, right, num_rows)
    covariance = product - left * right / num_rows
    return {
        "pearson": np.clip(divide(covariance, np.sqrt(left_var) * np.sqrt(right_var)), -1.0, 1.0),
        "rmse": np.sqrt(error_sq / num_rows),
        "mae": error_abs / num_rows,
        "r2": 1.0 - divide(error_sq, right_var),
    }


@dataclass(frozen=True)
class BinderMetrics:
    """What the metrics of rows at or above a threshold are computed from.

    Attributes:
        terms: (n, 3), 1 or 0: predicted and measured there; predicted; measured.
        ranked: the rows from the highest prediction down.
    """

    terms: FloatArray
    ranked: RankedHits

    @classmethod
    def of(cls, predicted: FloatArray, measured: FloatArray, threshold: float) -> BinderMetrics:
        called, true = predicted >= threshold, measured >= threshold
        terms = np.stack([called & true, called, true], axis=1).astype(np.float64)
        return cls(terms, RankedHits.of(predicted, true))

    def score_hits(self, counts: FloatArray) -> dict[str, FloatArray]:
        """Of predictions cut at the threshold, on resamples in which each row comes as often as `counts` says."""
        hits, called, true = (counts @ self.terms).T
        return {
            "recall": divide(hits, true),
            "precision": divide(hits, called),
            "f1": np.where(true > 0, divide(2 * hits, true + called), math.nan),
        }


def _centred(squares: FloatArray, total: FloatArray, num_rows: FloatArray) -> FloatArray:
    """Sum of squared deviations from the resample's own mean; exactly 0 where only rounding is left."""
    centred = squares - total**2 / num_rows
    return np.where(centred > RELATIVE_ZERO * squares, centred, 0.0)
