"""Means and shares over generated rows with the interval of what was held out, and paired differences of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import DataError
from ...evaluation._arrays import FloatArray, as_column, as_pair
from ...evaluation.metrics import MetricValue
from ...evaluation.resampling import ResamplingUnits, check_options, check_units, resample
from ...evaluation.scores import PairedComparison, Score, compare_paired, make_score


@dataclass(frozen=True)
class Sampling:
    """How intervals are drawn.

    Attributes:
        units: rows that were held out together (an antigen, or its cluster), row by row as what is scored.
        confidence: between 0 and 1.
        num_resamples: 2 or more.
        seed: of the draws.
    """

    units: ResamplingUnits
    confidence: float = 0.95
    num_resamples: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        check_options(confidence=self.confidence, num_resamples=self.num_resamples, seed=self.seed)

    def select(self, rows: Any) -> Sampling:
        """The same for some of the rows: (n,) bool, or row numbers."""
        return Sampling(self.units.select(rows), self.confidence, self.num_resamples, self.seed)


def mean_score(values: Any, sampling: Sampling) -> Score:
    """The mean of rows, with the interval of further units.

    Rows without a value (NaN) are left out, and `n` does not count them. A share that is 0 or 1 in all rows has the
    exact binomial interval of as many tries as there are effective units: resamples of it would all be the same.

    Args:
        values: (n,) numbers, or bool for a share.
        sampling: its units are those of these n rows.

    Raises:
        DataError: units of another number of rows.

    Cost: 60 ns per drawn row.
    """
    is_share = np.asarray(values).dtype == bool
    column = as_column(values, "values")
    check_units(sampling.units, len(column))
    there = ~np.isnan(column)
    column, sampling = column[there], sampling.select(there)
    units, confidence = sampling.units, sampling.confidence
    if not len(column):
        return make_score(MetricValue(math.nan, "no row has a value"), column, 0, confidence, units)
    mean = MetricValue(float(column.mean()))
    if units.num_units > 1 and is_share and column.min() == column.max():
        score = make_score(mean, np.empty(0), len(column), confidence, units)
        reach = ((1 - confidence) / 2) ** (1 / units.num_effective)  # Clopper and Pearson's, of as many tries
        score["low"], score["high"] = (reach, 1.0) if mean.value == 1 else (0.0, 1 - reach)
        return score
    drawn = check_units(units, len(column))
    samples = resample(
        lambda counts: counts @ column / counts.sum(axis=1), len(column), sampling.num_resamples, sampling.seed, drawn
    )
    return make_score(mean, samples, len(column), confidence, units)


def compare_means(before: Any, after: Any, sampling: Sampling) -> PairedComparison:
    """Whether the mean of `after` is above that of `before` on the same rows; more is better.

    Rows where either has no value (NaN) are left out of both.

    Args:
        before, after: (n,) numbers.
        sampling: its units are those of these n rows.

    Raises:
        DataError: other numbers of rows.

    Cost: as `compare_paired`.
    """
    earlier, later = as_pair(before, after)
    check_units(sampling.units, len(earlier))
    there = ~(np.isnan(earlier) | np.isnan(later))
    return _compare(np.ones(int(there.sum())), earlier[there], later[there], "accuracy", sampling.select(there))


def compare_losses(num_tokens: Any, before: Any, after: Any, sampling: Sampling) -> PairedComparison:
    """Whether the loss per token, nats, is lower in `after` than in `before`; `improvement` is by how much.

    Args:
        num_tokens: (n,) predicted tokens of each row.
        before, after: (n,) summed loss of each row, nats.
        sampling: its units are those of these n rows.

    Raises:
        DataError: other numbers of rows, or a loss that is not finite.
    """
    numbers = as_column(num_tokens, "num_tokens")
    earlier, later = as_pair(before, numbers)[0], as_pair(after, numbers)[0]
    for name, column in (("before", earlier), ("after", later), ("num_tokens", numbers)):
        if not np.isfinite(column).all():
            row = int(np.flatnonzero(~np.isfinite(column))[0])
            raise DataError(f"{name}, row {row}: {column[row]} is no loss that can be compared; finite ones are.")
    return _compare(numbers, earlier, later, "token_loss", sampling)


def _compare(
    numbers: FloatArray, before: FloatArray, after: FloatArray, metric: str, sampling: Sampling
) -> PairedComparison:
    if not len(numbers):
        facts = sampling.units.facts()
        return PairedComparison(
            metric, None, None, None, None, None, 0, sampling.confidence, 0, 0, "no row has a value in both", **facts
        )
    compared = compare_paired(
        numbers,
        before,
        after,
        metric,
        confidence=sampling.confidence,
        num_resamples=sampling.num_resamples,
        seed=sampling.seed,
        units=sampling.units,
    )
    # It takes units of one row each for rows, which it trusts however few they are; here they are antigens.
    return replace(compared, **sampling.units.facts())
