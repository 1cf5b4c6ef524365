"""Metrics in plain numpy, float64: each written once, as a function of how often every row counts.

Ones give a metric's value; the counts that a bootstrap drew give it on all resamples at once, and no row is copied or
sorted again. A metric says why where it has no value; none turns that into 0.

A kind of label is a class of rows like `Regression`, or `Summed` below: `metric(name)` is one of its metrics as a
function of counts, `why_undefined(name)` the reason. Everything behind it (scores, comparisons, verdicts, early
stopping) asks for no more than that. `kinds.rows_for` knows the class of a kind of label.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .arrays import FloatArray, count_not_finite, divide

PLAIN_METRICS = ("spearman", "pearson", "rmse", "mae", "r2")
HIT_METRICS = (
    "recall",
    "precision",
    "f1",
)  # cut predictions and references at a threshold
# With those that cut the references alone, and so need no unit of the predictions.
THRESHOLD_METRICS = (*HIT_METRICS, "average_precision")
GROUP_METRIC = "per_group_spearman"
# Of rows that each hold many predictions: the sum over all rows divided by their number.
RATIO_METRICS = ("token_loss", "perplexity", "accuracy")
# Of rows that have one number each: its mean; also of a part, such as `darcy2d_nrmse`.
MEAN_METRICS = ("loss", "nrmse")
ERRORS = ("rmse", "mae")  # in the unit of the labels, whatever that is

DEFAULT_THRESHOLD = 9.0  # pKd of 1 nM: what drug discovery calls a strong binder

Counted = Callable[[FloatArray], FloatArray]  # counts (resamples, n) -> (resamples,), NaN where there is no value


class MetricValue(NamedTuple):
    """A number, or NaN and the reason why there is none."""

    value: float
    undefined: str | None = None

    @property
    def known(self) -> float | None:
        """The number, or None."""
        return None if self.undefined else float(self.value)


def score_names(threshold: float | None = None, has_groups: bool = False) -> tuple[str, ...]:
    """Names of the metrics of a regression with such a threshold, or None, and with groups or without."""
    binders = () if threshold is None else THRESHOLD_METRICS
    return (*PLAIN_METRICS, *binders, *([GROUP_METRIC] if has_groups else []))


class Rows:
    """Rows of one kind of label, which know their metrics.

    Attributes:
        num_rows: that are drawn and counted.
        means: those that are a mean of what rows hold, or a function of one.
        drawn: what was measured on resamples, by how these were drawn, then by metric: (resamples,).
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.drawn: dict[Any, dict[str, FloatArray]] = {}

    @cached_property
    def means(self) -> dict[str, Summed]:
        return {}

    def share_labels(self, other: Rows) -> None:
        """Takes over what `other` computes of the labels, which are the same."""

    def why_constant(self) -> str | None:
        """Says that predictions are all alike, or not finite; None where they are neither, or nothing can tell."""
        return None

    def metric(self, name: str) -> Counted:
        """Returns the metric as a function of counts."""
        return getattr(self, name, None) or self.means[name].metric(name)

    def why_undefined(self, name: str) -> str | None:
        """Returns the first thing that leaves a metric without a value; None where nothing does."""
        raise NotImplementedError

    def value(self, name: str) -> MetricValue:
        """Computes the metric of all rows, each counted once."""
        if reason := self.why_undefined(name):
            return MetricValue(math.nan, reason)
        value = float(self.metric(name)(np.ones((1, self.num_rows)))[0])
        beyond = "the values' spread is beyond what float64 can hold"
        return MetricValue(value, None if math.isfinite(value) else beyond)


class Summed(Rows):
    """Rows that hold several predictions each, such as masked residues: a metric is a sum by the number of these.

    Args:
        sums: (n,) each row's summed loss in nats, or its number of right predictions; of `MEAN_METRICS` its own error.
        numbers: (n,) how many predictions each row holds, 0 or more; 1 for `MEAN_METRICS`.
        of_mean: what the metric is of that mean, such as a root; None: itself, and exp for a perplexity.
    """

    def __init__(
        self,
        sums: FloatArray,
        numbers: FloatArray,
        of_mean: Callable[[FloatArray], FloatArray] | None = None,
    ):
        super().__init__(len(numbers))
        self.sums = sums
        self.numbers = numbers
        self.of_mean = of_mean

    def apply(self, means: FloatArray) -> FloatArray:
        """Computes the metric of means."""
        return means if self.of_mean is None else self.of_mean(means)

    def metric(self, name: str) -> Counted:
        of_mean = np.exp if name == "perplexity" else self.apply
        return lambda counts: of_mean(divide(counts @ self.sums, counts @ self.numbers))

    def why_undefined(self, name: str) -> str | None:
        for values, side in ((self.sums, "predictions"), (self.numbers, "references")):
            if problem := count_not_finite(values, side):
                return problem
        if self.numbers.sum() > 0:
            return None
        return f"the {self.num_rows:,} rows hold no predictions"


def is_ratio(metric: str) -> bool:
    """Returns whether a metric is a ratio of two sums over rows: one of `RATIO_METRICS` or `MEAN_METRICS`."""
    return metric in RATIO_METRICS or metric.rpartition("_")[2] in MEAN_METRICS
