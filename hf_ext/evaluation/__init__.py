"""Metrics, scores with intervals, baselines, a verdict, alarms. Imports numpy only; the rest waits for first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .alarms import collapse_report, format_report, label_audit
from .baselines import RidgeBaseline
from .metrics import DEFAULT_THRESHOLD, MetricValue
from .scores import GroupScore, Score, score_predictions
from .verdict import Verdict, judge

if TYPE_CHECKING:
    from .evaluate_metrics import METRIC_NAMES, load_metric
    from .row_metrics import RowMetrics

__all__ = [
    "DEFAULT_THRESHOLD",
    "METRIC_NAMES",
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
    modules = {"METRIC_NAMES": "evaluate_metrics", "load_metric": "evaluate_metrics", "RowMetrics": "row_metrics"}
    if name in modules:
        return getattr(import_module(f".{modules[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
