"""Metrics, scores with intervals, baselines, a verdict, guards. Imports numpy only; `evaluate` waits for first use."""

from __future__ import annotations

from .baselines import ConstantBaseline, GroupMeanBaseline, RidgeBaseline
from .guards import collapse_report, format_report, label_audit
from .metrics import DEFAULT_THRESHOLD, MetricValue
from .modules import METRIC_NAMES, load_metric, metric_path
from .scores import GroupScore, Score, intervals_overlap, score_predictions
from .verdict import Verdict, judge

__all__ = [
    "DEFAULT_THRESHOLD",
    "METRIC_NAMES",
    "ConstantBaseline",
    "GroupMeanBaseline",
    "GroupScore",
    "MetricValue",
    "RidgeBaseline",
    "Score",
    "Verdict",
    "collapse_report",
    "format_report",
    "intervals_overlap",
    "judge",
    "label_audit",
    "load_metric",
    "metric_path",
    "score_predictions",
]
