"""What the metric files share: features, a strict constructor, and NaN plus a reason where there is no value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate

from hf_ext.errors import ArgumentError
from hf_ext.evaluation import metrics

_INPUTS = """
Args:
    predictions: (n,) numbers, in the unit of the references.
    references: (n,) numbers.
"""
_GROUPS = """    groups: (n,) names of the groups, text or integers.
"""
_ROW_FEATURES = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
_KNOWN_ARGUMENTS = frozenset(inspect.signature(evaluate.EvaluationModule.__init__).parameters) - {"self", "kwargs"}


def named(key: str, result: metrics.MetricValue) -> dict[str, Any]:
    """Return `{key: value}`, and `{key}_undefined` with the reason where the value is NaN."""
    return {key: result.value, **({f"{key}_undefined": result.undefined} if result.undefined else {})}


class RegressionMetric(evaluate.Metric):
    """A metric of float predictions against float references; a subclass names its key and its function.

    `compute` also takes (and, where it does not concern this metric, ignores) the arguments of the other metrics of
    this package, because `evaluate.combine` hands the same ones to all. Any other argument is an error.
    """

    key: str
    metric: Callable[[Any, Any], metrics.MetricValue]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unknown = sorted(set(kwargs) - _KNOWN_ARGUMENTS)
        if unknown:  # evaluate would swallow them
            allowed = ", ".join(sorted(_KNOWN_ARGUMENTS))
            raise ArgumentError(f"{type(self).__name__}: unknown argument {unknown[0]!r}; allowed are {allowed}.")
        super().__init__(*args, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)) or "",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(_ROW_FEATURES),
        )

    def _compute(
        self, predictions: Any, references: Any, groups: Sequence[Any] | None = None, threshold: float | None = None
    ) -> dict[str, Any]:
        return named(self.key, type(self).metric(predictions, references))


class ThresholdMetric(RegressionMetric):
    """A metric of the rows at or above a threshold, given to the constructor or to `compute` (which wins).

    Beside the value stand `{key}_base_rate` (share of references at or above the threshold), `{key}_predicted_rate`
    (share of predictions) and `{key}_threshold`: recall of 1.0 means nothing where the predicted rate is 1.0 too.
    """

    ratio: Callable[[metrics.ThresholdCounts], metrics.MetricValue]

    def __init__(self, *args: Any, threshold: float = metrics.DEFAULT_THRESHOLD, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.threshold = float(threshold)

    def _compute(
        self, predictions: Any, references: Any, groups: Sequence[Any] | None = None, threshold: float | None = None
    ) -> dict[str, Any]:
        counts = metrics.threshold_counts(predictions, references, self.threshold if threshold is None else threshold)
        return {
            **named(self.key, type(self).ratio(counts)),
            f"{self.key}_base_rate": counts.base_rate,
            f"{self.key}_predicted_rate": counts.predicted_rate,
            f"{self.key}_threshold": counts.threshold,
        }


class GroupMetric(RegressionMetric):
    """A metric inside every group: `{key}` is the mean over the groups that have a value, `{key}_by_group` the rest.

    Beside them stand `{key}_num_groups` and `{key}_num_defined_groups`.
    """

    def _info(self) -> evaluate.MetricInfo:
        # Text first: evaluate takes the first set of features that the rows fit, and "01" would fit an integer.
        options = [{**_ROW_FEATURES, "groups": datasets.Value(kind)} for kind in ("string", "int64")]
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)) or "",
            citation="",
            inputs_description=_INPUTS + _GROUPS,
            features=[datasets.Features(option) for option in options],
        )

    def _compute(
        self, predictions: Any, references: Any, groups: Sequence[Any] | None = None, threshold: float | None = None
    ) -> dict[str, Any]:
        if groups is None:
            raise ArgumentError(f"{self.key}: groups=None; one group name per row is needed.")
        grouped = metrics.per_group(predictions, references, groups, type(self).metric)
        by_group = {
            name: {**named("value", result), "n": grouped.sizes[name]} for name, result in grouped.values.items()
        }
        return {
            **named(self.key, grouped.mean),
            f"{self.key}_num_groups": len(grouped.values),
            f"{self.key}_num_defined_groups": len(grouped.defined),
            f"{self.key}_by_group": by_group,
        }
