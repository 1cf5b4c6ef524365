"""Score tables of a card, and why some scores have no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import units
from ..markdown import plain_line
from ..report.markdown import render_table
from ..report.scores import score_table, undefined_notes
from ..report.values import as_dict
from ..units import metric_title


def render_scores(
    scores: dict[str, Any], title: Callable[[str], str] = metric_title, absent: str = units.NOT_MEASURED
) -> str:
    """The model's metrics, each with its threshold where it has one; `absent` where another predictor lacks one."""
    metrics = as_dict(scores.get("model")) or as_dict(next(iter(scores.values()), {}))
    limits = {metric: as_dict(score).get("threshold") for metric, score in metrics.items()}
    at = {metric: "" if limit is None else f" at {limit:g} and above" for metric, limit in limits.items()}
    names = {metric: title(metric) + at[metric] for metric in metrics}
    return render_table(score_table(scores, names=names, absent=absent))


def undefined_lines(scores: dict[str, Any]) -> list[str]:
    """A list of the metrics without a value; nothing where all have one."""
    lines = [f"- {plain_line(note)}" for note in undefined_notes(scores, metric_title)]
    return [*lines, ""] if lines else []


def note_lines(split: dict[str, Any]) -> list[str]:
    """A list of what the run noted on the scores of a split; nothing where it noted nothing."""
    lines = [f"- {plain_line(note)}" for note in split.get("notes") or []]
    return [*lines, ""] if lines else []
