"""The scores of a card: every predictor beside the model, every value with its interval."""

from __future__ import annotations

from typing import Any

from .. import units
from ..report.scores import resampled
from ..report.values import as_dict
from .score_lines import render_scores
from .tasks import TaskCard


def scores_section(task: TaskCard) -> list[str]:
    """Markdown: scores of model and baselines, and what the task says of them."""
    split, scores = task.scored_split()
    if not scores:
        return ["## Scores", "", "This run left no scores.", ""]
    num_rows = as_dict(task.run.results.get(split)).get("num_rows")
    where = f"Scores on the {split} split" + (f", {num_rows:,} rows" if num_rows else "")
    table = render_scores(scores, task.metric_title, task.absent)
    return ["## Scores", "", f"{where}{_interval_text(scores)}.", "", table, "", *task.score_notes()]


def _interval_text(scores: dict[str, Any]) -> str:
    found = [score for score in as_dict(scores.get("model")).values() if isinstance(score, dict)]
    shown = [score for score in found if score.get("low") is not None]
    if not shown:
        return ""
    level = units.share(max(float(score["confidence"]) for score in shown))
    return f", with {level} bootstrap intervals over {resampled(shown[0], 'rows')}"
