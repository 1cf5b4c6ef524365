"""The metrics as `evaluate.Metric`, ready for `add_batch`, `compute` and `evaluate.combine`: no Hub, no remote code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from ..errors import ArgumentError
from .metrics.rows import DEFAULT_THRESHOLD, GROUP_METRIC, score_names
from .scores import score_predictions

METRIC_NAMES = score_names(DEFAULT_THRESHOLD, has_groups=True)


class RegressionMetric(evaluate.Metric):
    """A metric of float predictions against float references, by the name of its configuration.

    `compute` gives `{name}`, and `{name}_undefined` with the reason where that is NaN. Metrics of binders take
    `threshold`, in the constructor or in `compute` (which wins); `per_group_spearman` takes `groups`, (n,) text or
    integers.

    `compute` also takes (and, where it does not concern this metric, ignores) the arguments of the other metrics,
    because `evaluate.combine` hands the same ones to all. Any other argument is an error.
    """

    def __init__(self, config_name: str, threshold: float = DEFAULT_THRESHOLD, **kwargs: Any):
        self.threshold = float(threshold)
        super().__init__(config_name=config_name, **kwargs)

    @property
    def name(self) -> str:
        """Of the metric; evaluate would take that of the class."""
        return str(self.config_name)

    def _info(self) -> evaluate.MetricInfo:
        columns = {name: datasets.Value("float64") for name in ("predictions", "references")}
        # Text first: evaluate takes the first set of features that the rows fit, and "01" would fit an integer.
        kinds = ("string", "int64") if self.config_name == GROUP_METRIC else ()
        return evaluate.MetricInfo(
            description=inspect.getdoc(type(self)) or "",
            citation="",
            inputs_description="predictions, references: (n,) numbers in one unit; groups: (n,) names.",
            features=[datasets.Features(columns | {"groups": datasets.Value(kind)}) for kind in kinds]
            or datasets.Features(columns),
        )

    def _compute(
        self,
        predictions: Any,
        references: Any,
        groups: Sequence[Any] | None = None,
        threshold: float | None = None,
    ) -> dict[str, Any]:
        name = self.config_name
        if name == GROUP_METRIC and groups is None:
            raise ArgumentError(f"{name}: groups=None; one group name per row is needed.")
        at = self.threshold if threshold is None else threshold
        given = groups if name == GROUP_METRIC else None
        score = score_predictions(predictions, references, group_names=given, threshold=at, num_resamples=0)[name]
        if score["undefined"]:
            return {name: math.nan, f"{name}_undefined": score["undefined"]}
        return {name: score["value"]}


def load_metric(name: str, *, threshold: float = DEFAULT_THRESHOLD) -> evaluate.Metric:
    """Makes one of the package's metrics, ready for `add_batch`, `compute` and `evaluate.combine`.

    Rows are held in memory, without a file and its lock under the Hugging Face cache.

    Args:
        name: one of `METRIC_NAMES`.
        threshold: of the metrics of binders.

    Raises:
        ArgumentError: no such metric.
    """
    if name not in METRIC_NAMES:
        raise ArgumentError(f"metric {name!r}: allowed are {', '.join(METRIC_NAMES)}.")
    return RegressionMetric(name, threshold, keep_in_memory=True)
