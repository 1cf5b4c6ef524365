"""The report of a model that predicts a label: scores beside baselines, figures of predictions, groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ... import units
from ...charts import group_chart, prediction_charts
from ...units import metric_name
from ..blocks import Block, Bullets, Figure, Fold, KeyNumber, Paragraph, Table
from ..columns import join_words, label_name, list_columns
from ..run_files import RunFiles
from ..scores import best_baseline, fit_notes, score_notes, score_table
from ..values import as_dict
from .base import TaskReport

MAX_GROUP_ROWS = 300


class AffinityReport(TaskReport):
    """Also of runs whose record names no task."""

    def title(self) -> str:
        """What is predicted from what."""
        columns = list_columns(self.run)
        return f"Predicting {label_name(self.run)}" + (f" from {join_words(columns)}" if columns else "")

    def score_numbers(self) -> list[KeyNumber]:
        test = as_dict(self.run.results.get("test"))
        model = as_dict(as_dict(test.get("scores")).get("model"))
        if not model:
            return [KeyNumber("test score", units.NOT_MEASURED, "no test split was scored")]
        numbers = []
        chosen_by = str(self.run.settings.get("metric_for_best_model")).removeprefix("eval_")
        for metric in dict.fromkeys(("spearman", "rmse", chosen_by)):
            if metric not in model:
                continue
            best = best_baseline(test, metric)
            note = f"best baseline: {units.number(best[1]['value'])}, {best[0]}" if best else ""
            label, value = f"{metric_name(metric)} on test", units.score(as_dict(model[metric]))
            numbers.append(KeyNumber(label, value, note or "no baseline to compare with"))
        return numbers

    def result_blocks(self) -> list[Block]:
        test = as_dict(self.run.results.get("test"))
        scores = as_dict(test.get("scores"))
        if not scores:
            return [Paragraph("Not measured: the run has no scores of a test split."), *_figures(self.run)]
        blocks: list[Block] = [score_table(scores, f"Test rows: {units.number(test.get('num_rows'))}.")]
        notes = score_notes(scores)
        for part in test.get("slices") or []:
            rows = f"{units.capitalize(str(part.get('name')))}: {units.number(part.get('num_rows'))} rows."
            blocks.append(score_table(as_dict(part.get("scores")), rows))
            notes += score_notes(as_dict(part.get("scores")))
        if test.get("notes"):
            blocks.append(Bullets([str(note) for note in test["notes"]]))
        notes += fit_notes(as_dict(test.get("baselines")))
        if notes:
            blocks.append(Bullets(list(dict.fromkeys(notes)), is_note=True))
        blocks += _figures(self.run)
        return blocks + _group_blocks(as_dict(scores.get("model")))


def _figures(run: RunFiles) -> list[Figure]:
    if run.predictions is None:
        return []
    png = "scatter.png" if "scatter.png" in run.images else None
    charts = prediction_charts(run.predictions.labels, run.predictions.predictions, label_name(run))
    return [Figure(chart, None if i else png) for i, chart in enumerate(charts)]


def _group_blocks(model: Mapping[str, Any]) -> list[Block]:
    entry = as_dict(model.get("per_group_spearman"))
    groups = as_dict(entry.get("groups"))
    if not groups:
        return []
    chart = group_chart(groups, "Spearman")
    ordered = sorted(groups.items(), key=lambda item: (-(item[1].get("n") or 0), item[0]))
    rows = [
        [name, units.number(group.get("n")), units.score(group), group.get("undefined") or ""]
        for name, group in ordered[:MAX_GROUP_ROWS]
    ]
    cut = f" The {MAX_GROUP_ROWS} largest of {len(ordered):,}." if len(ordered) > MAX_GROUP_ROWS else ""
    table = Table(["group", "rows", "Spearman", "why undefined"], rows, f"Scores within groups.{cut}")
    blocks: list[Block] = [Figure(chart)] if chart else []
    return [*blocks, Fold(f"All {len(ordered):,} groups", [table]) if len(ordered) > 12 else table]
