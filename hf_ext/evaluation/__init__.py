"""Metrics, scores with intervals, baselines, a verdict, guards. Imports numpy only; the rest waits for first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .alarms import collapse_report, format_report, label_audit
from .baselines import ConstantBaseline, GroupMeanBaseline, RidgeBaseline
from .metrics import DEFAULT_THRESHOLD, MetricValue
from .scores import GroupScore, Score, score_predictions
from .verdict import Verdict, judge

if TYPE_CHECKING:
    from .evaluate_metrics import METRIC_NAMES, load_metric
    from .row_metrics import RowMetrics

__all__ = [
    "DEFAULT_THRESHOLD",
    "METRIC_NAMES",
    "ConstantBaseline",
    "GroupMeanBaseline",
    "GroupScore",
    "MetricValue",
    "RidgeBaseline",
    "RowMetrics",
    "Score",
    "Verdict",
    "collapse_report",
    "format_report",
    "judge",
    "label_audit",
    "load_metric",
    "score_predictions",
]


def __getattr__(name: str) -> Any:
    if name in ("METRIC_NAMES", "load_metric"):
        from . import evaluate_metrics

        return getattr(evaluate_metrics, name)
    if name == "RowMetrics":
        from .row_metrics import RowMetrics

        return RowMetrics
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
