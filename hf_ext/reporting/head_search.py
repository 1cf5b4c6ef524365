"""What a search for a head tried, as a table for logs and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .units import format_cell, less_is_better, metric_name

HEADERS = ["head", "dropout", "learning rate", "weight decay", "epochs", "weights", "error"]


def head_name(settings: Mapping[str, Any]) -> str:
    """Such as `mlp 256-64`."""
    return f"{settings['form']} {'-'.join(map(str, settings['sizes']))}"


def error_name(metric: str) -> str:
    """What candidates were compared by: an error, or 1 less a metric of which more is better."""
    name = metric_name(metric)
    return name if less_is_better(metric) else f"1 - {name}"


def candidate_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """A row under `HEADERS` for each candidate of `all_results.json`'s `head_search`, the best first."""
    order = sorted(found["tried"], key=lambda one: math.inf if one["error"] is None else one["error"])
    return [
        [
            head_name(one),
            *(f"{one[name]:g}" for name in ("dropout", "learning_rate", "weight_decay", "epochs")),
            f"{one['num_weights']:,}",
            format_cell(one["error"]) + ("" if one["is_complete"] else " (given up)"),
        ]
        for one in order
    ]
