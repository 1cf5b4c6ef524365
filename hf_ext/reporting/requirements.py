"""What scores had to be, beside what they are, as rows of a table: alike on the terminal and in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .units import metric_name

HEADERS = ["metric", "expected", "actual", ""]


def required_rows(checked: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row per requirement, of `Checked` as results hold it (`hf_ext.evaluation.requirements`)."""
    return [
        [metric_name(one["metric"]), one["expected"], one["actual"], "passed" if one["passed"] else "FAILED"]
        for one in checked
    ]
