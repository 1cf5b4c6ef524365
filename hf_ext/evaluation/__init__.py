"""Metrics, scores with intervals, baselines, a verdict, alarms. Nothing is imported before its first use."""

from importlib import import_module
from typing import Any

_HOMES = {
    "METRIC_NAMES": "evaluate_metrics",
    "RowMetrics": "row_metrics",
    "collapse_report": "kinds",
    "judge": "verdict",
    "label_audit": "alarms",
    "load_metric": "evaluate_metrics",
    "score_predictions": "scores",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
