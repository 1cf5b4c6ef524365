"""What a bootstrap draws (rows, or all rows of an antibody, an antigen or a cluster together), and its intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np

from ..errors import DataError
from .metrics.arrays import Array, FloatArray, IntArray, as_groups
from .metrics.rows import Counted, Rows

MIN_GROUPS = 10  # effective ones: an interval from fewer is shown, but no claim rests on it
# 50 million drawn rows take about 3 s on two cores; beyond that the number of resamples is lowered, but not below the
# floor, under which the ends of a 95 % interval rest on fewer than five resamples each.
MAX_DRAWS = 50_000_000
MIN_RESAMPLES = 200
CHUNK_DRAWS = 400_000  # keeps the dozen (chunk, n) arrays of a step in the CPU's cache
ALIKE = 1e-9  # a relative standard error that is rounding


@dataclass(frozen=True, eq=False)
class ResamplingGroups:
    """Groups of rows that were held out together, and so are drawn together.

    Rows of one antibody share what a model gets wrong about it. Drawn one by one they count as many independent tests
    of the model, which they are not; drawn by antibody the interval speaks about further antibodies.

    Attributes:
        column: what tells the groups apart, as messages name it.
        group_of_row: (n,) int64, groups numbered from 0.
    """

    column: str
    group_of_row: IntArray

    @classmethod
    def of(cls, column: str, values: Sequence[Any] | Array) -> ResamplingGroups:
        """Builds groups of rows whose values, (n,), are equal as text; raises `DataError` where a row has none."""
        # Numbered by first appearance, so that groups of one row each are the rows in their order.
        number: dict[str, int] = {}
        names = as_groups(values, len(values)).tolist()
        groups = [number.setdefault(name, len(number)) for name in names]
        return cls(column, np.array(groups, np.int64))

    @cached_property
    def sizes(self) -> FloatArray:
        """Rows of each group, (groups,)."""
        return np.bincount(self.group_of_row).astype(np.float64)

    @property
    def num_groups(self) -> int:
        """How many groups there are; 0 of no rows."""
        return len(self.sizes)

    @property
    def num_effective(self) -> float:
        """How many groups of equal size would weigh as evenly (Kish): fewer where some hold most of the rows."""
        if self.num_groups:
            return float(self.sizes.sum() ** 2 / (self.sizes**2).sum())
        return 0.0

    @property
    def are_enough(self) -> bool:
        """Whether a claim may rest on an interval by these groups."""
        return self.num_effective >= MIN_GROUPS

    @property
    def are_rows(self) -> bool:
        """Whether every group is a single row."""
        return self.num_groups == len(self.group_of_row)

    def select(self, rows: Array) -> ResamplingGroups:
        """Returns the groups of some rows: (n,) bool, or row numbers."""
        return ResamplingGroups.of(self.column, self.group_of_row[rows])

    def describe(self) -> str:
        """Says "57 values of heavy"; and as how many of equal size they count, where that is clearly fewer."""
        uneven = f" (as uneven as {self.num_effective:.0f})" if self.num_effective < 0.75 * self.num_groups else ""
        return f"{self.num_groups:,} values of {self.column}{uneven}"

    def why_not_enough(self) -> str | None:
        """Returns the sentence for an interval that too few groups stand behind; None where there are enough."""
        if self.are_enough:
            return None
        if self.num_groups == 1:
            return f"All rows have the same {self.column}: no interval can be had from one."
        return f"An interval from only {self.describe()} is not to be trusted: {MIN_GROUPS} of like size are the least."


def check_groups(groups: ResamplingGroups | None, num_rows: int) -> ResamplingGroups | None:
    """Returns `groups`, None where each is one row: then rows are drawn, as if there were none.

    Raises:
        DataError: the groups are of another number of rows.
    """
    if groups is None:
        return None
    if len(groups.group_of_row) != num_rows:
        raise DataError(f"groups of {len(groups.group_of_row)} rows for {num_rows} rows: one group per row is needed.")
    return None if groups.are_rows else groups


def group_facts(groups: ResamplingGroups | None, num_rows: int) -> dict[str, Any]:
    """Returns `interval_by`, `num_units` and `num_effective_units` for results, JSON-able; None: groups are rows."""
    column, num, even = (
        (groups.column, groups.num_groups, groups.num_effective) if groups else (None, num_rows, num_rows)
    )
    return {"interval_by": column, "num_units": num, "num_effective_units": float(even)}


def resample(
    measure: Counted,
    num_rows: int,
    num_resamples: int,
    seed: int,
    groups: ResamplingGroups | None = None,
) -> FloatArray:
    """Draws rows with replacement, again and again, and measures each draw.

    Args:
        measure: of how often each row came, (some resamples, n).
        num_rows: 1 or more; as many are drawn each time.
        num_resamples: lowered for more than 50,000 rows at 1,000.
        seed: the same gives the same draws.
        groups: rows that are drawn together, of which there are fewer than rows; as many groups as there are are drawn,
            each with all its rows, so that the number of rows varies. None: each row by itself.

    Returns:
        (resamples,) or (measures, resamples).
    """
    generator = np.random.default_rng(seed)
    size = num_rows if groups is None else groups.num_groups
    num_resamples = min(num_resamples, max(MIN_RESAMPLES, MAX_DRAWS // num_rows))
    chunk = max(1, CHUNK_DRAWS // num_rows)

    def draw(num: int) -> FloatArray:
        drawn = generator.integers(0, size, size=(num, size))
        drawn += np.arange(num)[:, None] * size
        flat = np.bincount(drawn.reshape(-1), minlength=num * size)
        counts = flat.reshape(num, size).astype(np.float64)
        if groups is None:
            return counts
        return np.take(counts, groups.group_of_row, axis=1)

    # Nothing holds a piece while the next is drawn, which goes where it was.
    sizes = (min(chunk, num_resamples - start) for start in range(0, num_resamples, chunk))
    return np.concatenate([measure(draw(num)) for num in sizes], axis=-1)


def resample_metrics(
    sides: Sequence[Rows],
    metrics: Sequence[str],
    num_resamples: int = 1000,
    seed: int = 0,
    groups: ResamplingGroups | None = None,
) -> list[dict[str, FloatArray]]:
    """Measures metrics of several predictions of the same rows on one set of draws, as `resample` makes them.

    A metric that rows have no value in is left out. What was measured before stays with the rows, and is not again.

    Returns:
        Of each side, by metric: (resamples,).
    """
    groups = check_groups(groups, sides[0].num_rows)
    found = [rows.drawn.setdefault((num_resamples, seed, groups), {}) for rows in sides]
    new: list[tuple[dict[str, FloatArray], str]] = []
    measures: list[Counted] = []
    for rows, known in zip(sides, found):
        rows.share_labels(sides[0])
        for name in metrics:
            if name not in known and rows.why_undefined(name) is None:
                new.append((known, name))
                measures.append(rows.metric(name))
    if new:
        samples = resample(
            lambda counts: np.stack([measure(counts) for measure in measures]),
            sides[0].num_rows,
            num_resamples,
            seed,
            groups,
        )
        for (known, name), values in zip(new, samples):
            known[name] = values
    return found


def percentile_interval(
    samples: FloatArray, confidence: float, groups: ResamplingGroups | None = None
) -> tuple[float | None, float | None]:
    """Returns the two percentiles that leave out (1 - confidence) / 2 each, less where few `groups` were drawn.

    A resample of G groups varies by (G - 1) / G less than G new groups would, and its standard deviation is itself a
    guess from G numbers, or from fewer where some groups hold most rows: sqrt(G / (G - 1)) times the quantile of t,
    with effective groups - 1 degrees of freedom, takes the place of the normal one. `benchmarks/interval_coverage.py`
    measures it. Source: T. C. Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69
    (2015), 371, the expanded percentile interval.

    None, None with fewer than 2 values, or 1 group.
    """
    defined = samples[np.isfinite(samples)]
    if len(defined) < 2 or (groups is not None and groups.num_groups < 2):
        return None, None
    shares = [(1 - confidence) / 2, (1 + confidence) / 2]
    if groups is not None:
        from scipy.special import (
            ndtr,
        )  # here, since scipy takes 0.2 s that rows do not need

        inflation = math.sqrt(groups.num_groups / (groups.num_groups - 1))
        tail = float(ndtr(t_quantile(shares[0], groups.num_effective) * inflation))
        shares = [tail, 1 - tail]
    low, high = np.quantile(defined, shares)
    return float(low), float(high)


def t_quantile(share: float, num_groups: float) -> float:
    """Computes the quantile of Student's t with groups - 1 degrees of freedom, at least 1."""
    from scipy.special import stdtrit

    return float(stdtrit(max(num_groups - 1, 1.0), share))


def mean_loss_interval(
    loss: FloatArray,
    groups: ResamplingGroups,
    numbers: FloatArray,
    *,
    confidence: float,
    num_resamples: int,
    seed: int,
) -> tuple[float, float] | None:
    """Computes the interval of a mean loss by group: a bootstrap-t of its logarithm.

    Losses of groups are skewed: most samples lack the group with the largest, and then both the error and its standard
    error come out too small. Percentiles follow the sample; the distribution of (error - truth) / standard error, as
    resamples show it, knows of it. The standard error is that of the jackknife over groups, and the quantiles are
    widened by what t with effective groups - 1 degrees of freedom has over the normal one: in simulations of 20 to 60
    clusters, even and uneven, that held 93 to 95 %, without widening 91 to 94 %, percentiles 87 to 93 %
    (`benchmarks/interval_coverage.py` measures what is done here).

    Source: B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), chapter 12.5; J. MacKinnon, M. Nielsen,
    M. Webb, Fast and reliable jackknife and bootstrap methods for cluster-robust inference (2023).

    Args:
        loss: (n,) float64, finite, 0 or more: squared or absolute errors, summed where rows hold several.
        groups: of the rows.
        numbers: (n,) how many errors each row holds.

    Returns:
        Both ends, in the unit of the loss; None where groups are too few for a standard error of each resample, or all
        their errors are alike.

    Cost: groups times resamples; milliseconds.
    """
    total: FloatArray = np.bincount(groups.group_of_row, loss).astype(np.float64)
    sizes: FloatArray = np.bincount(groups.group_of_row, numbers).astype(np.float64)
    num = groups.num_groups
    without = (total.sum() - total) / (sizes.sum() - sizes) if groups.are_enough else np.zeros(1)
    if not without.min() > 0:
        return None
    mean = total.sum() / sizes.sum()
    std = math.sqrt((num - 1) / num * np.sum(np.log(without / mean) ** 2))
    if std < ALIKE:
        return None

    def studentize(counts: FloatArray) -> FloatArray:
        num_rows = counts @ sizes
        means = counts @ total / num_rows
        # Of the logarithm of a ratio of sums, linearized: the jackknife of every resample would cost groups times more.
        deviations = (total - means[:, None] * sizes) / (means * num_rows)[:, None]
        errors = np.sqrt(np.einsum("bu,bu,bu->b", counts, deviations, deviations) * num / (num - 1))
        varies = errors > ALIKE  # not where one group came every time
        return np.log(means[varies] / mean) / errors[varies]

    tail = (1 + confidence) / 2
    low, high = np.quantile(resample(studentize, num, num_resamples, seed), [1 - tail, tail])
    std *= t_quantile(tail, groups.num_effective) / NormalDist().inv_cdf(tail)
    return mean * math.exp(-high * std), mean * math.exp(-low * std)
