"""The metrics as `evaluate.Metric` classes that come with the package: no Hub, no network, no remote code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate

from ..errors import ArgumentError
from . import metrics
from .scores import THRESHOLD_METRICS

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
    """Returns `{key: value}`, and `{key}_undefined` with the reason where the value is NaN."""
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

    def __init__(self, *args: Any, threshold: float = metrics.DEFAULT_THRESHOLD, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.threshold = float(threshold)

    def _compute(
        self, predictions: Any, references: Any, groups: Sequence[Any] | None = None, threshold: float | None = None
    ) -> dict[str, Any]:
        threshold = self.threshold if threshold is None else threshold
        counts = metrics.threshold_counts(predictions, references, threshold)
        return {
            **named(self.key, THRESHOLD_METRICS[self.key](predictions, references, threshold)),
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


class Spearman(RegressionMetric):
    """Rank correlation with average ranks for ties; NaN where either side is constant."""

    key = "spearman"
    metric = staticmethod(metrics.spearman)


class Pearson(RegressionMetric):
    """Linear correlation; NaN where either side is constant."""

    key = "pearson"
    metric = staticmethod(metrics.pearson)


class Rmse(RegressionMetric):
    """Root mean squared error, in the unit of the labels."""

    key = "rmse"
    metric = staticmethod(metrics.rmse)


class Mae(RegressionMetric):
    """Mean absolute error, in the unit of the labels."""

    key = "mae"
    metric = staticmethod(metrics.mae)


class R2(RegressionMetric):
    """Share of the references' variance explained; below 0 is worse than their own mean."""

    key = "r2"
    metric = staticmethod(metrics.r2)


class Recall(ThresholdMetric):
    """Share of the rows measured at or above the threshold that were predicted there."""

    key = "recall"


class Precision(ThresholdMetric):
    """Share of the rows predicted at or above the threshold that were measured there."""

    key = "precision"


class F1(ThresholdMetric):
    """Harmonic mean of recall and precision at the threshold."""

    key = "f1"


class AveragePrecision(ThresholdMetric):
    """Area under precision and recall of the rows ranked by prediction; binders are measured at the threshold."""

    key = "average_precision"


# evaluate makes the name of a metric from that of its class.
class Enrichment_1pct(ThresholdMetric):
    """Share of binders among the 1 % of rows predicted highest, as a multiple of their share in all rows."""

    key = "enrichment_1pct"


class Enrichment_5pct(ThresholdMetric):
    """Share of binders among the 5 % of rows predicted highest, as a multiple of their share in all rows."""

    key = "enrichment_5pct"


class PerGroupSpearman(GroupMetric):
    """Rank correlation inside every group of 10 rows and more, and its mean over the groups that have one."""

    key = "per_group_spearman"
    metric = staticmethod(metrics.spearman)


_METRICS = (
    *(Spearman, Pearson, Rmse, Mae, R2),
    *(Recall, Precision, F1, AveragePrecision, Enrichment_1pct, Enrichment_5pct),
    PerGroupSpearman,
)
_CLASSES: dict[str, type[RegressionMetric]] = {metric.key: metric for metric in _METRICS}
METRIC_NAMES = tuple(_CLASSES)


def load_metric(name: str, *, keep_in_memory: bool | None = None, **kwargs: Any) -> evaluate.Metric:
    """Makes one of the package's metrics, ready for `add_batch`, `compute` and `evaluate.combine`.

    Args:
        name: one of `METRIC_NAMES`.
        keep_in_memory: hold the rows in memory, without a file and its lock under the Hugging Face cache. None: yes,
            unless `num_process` is above 1, where `evaluate` cannot.
        **kwargs: for the metric's constructor: `threshold` for those of binders; `experiment_id`, `num_process`
            and the like for all.

    Raises:
        ArgumentError: no such metric, or no such constructor argument.
    """
    if keep_in_memory is None:
        keep_in_memory = kwargs.get("num_process", 1) == 1
    if name not in _CLASSES:
        raise ArgumentError(f"metric {name!r}: allowed are {', '.join(METRIC_NAMES)}.")
    return _CLASSES[name](keep_in_memory=keep_in_memory, **kwargs)
