"""Several models on the same labelled rows: scores, differences that are paired, what has collapsed, slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evaluation.alarms import AlarmKind, examine_predictions
from ..evaluation.metrics import score_names
from ..evaluation.requirements import Checked, Requirement, check_requirements, describe_failed, format_checked
from ..evaluation.resampling import unit_facts
from ..evaluation.scores import compare_paired
from ..evaluation.verdict import judge_pair
from ..reporting import units
from ..reporting.tables import format_table
from .evaluated_rows import EvaluatedRows
from .scoring import LIMITS_NOTE, Compared

FloatArray = NDArray[np.float64]
COLLAPSED = (AlarmKind.CONSTANT, AlarmKind.FEW_VALUES, AlarmKind.BLOCK)


@dataclass(frozen=True)
class Evaluation:
    """What was found; all by name of model, in the order in which they were given.

    Attributes:
        rows: that were scored.
        scores: model -> metric -> `Score`.
        collapse: model -> `collapse_report`, and `is_collapsed`.
        verdicts: later model -> `Verdict.as_dict`, against the first.
        differences: later model -> metric -> `PairedComparison.as_dict`, against the first.
        slices: the same scores and differences of some of the rows: {"name", "num_rows", "scores", "differences"}.
        requirements: model -> what it must reach, and whether it does.
        notes: sentences about rows and models.
    """

    rows: EvaluatedRows
    scores: dict[str, dict[str, Any]]
    collapse: dict[str, dict[str, Any]]
    verdicts: dict[str, dict[str, Any]]
    differences: dict[str, dict[str, Any]]
    slices: list[dict[str, Any]]
    requirements: dict[str, list[Checked]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "task": "evaluation",
            "rows": self.rows.source,
            "num_rows": len(self.rows.labels),
            **unit_facts(self.rows.units, len(self.rows.labels)),
            "threshold": self.rows.threshold,
            "scores": self.scores,
            "collapse": self.collapse,
            "verdicts": self.verdicts,
            "differences": self.differences,
            "slices": self.slices,
            "requirements": self.requirements,
            "notes": self.notes,
        }

    def text(self) -> str:
        """For a terminal: verdicts, alarms, notes; a table of all rows and of each slice; requirements."""
        parts = [one["text"] for one in self.verdicts.values()]
        parts += [f"ALARM, {name}: {alarm}" for name, found in self.collapse.items() for alarm in found["alarms"]]
        parts += [*self.notes, "", f"{len(self.rows.labels):,} rows, {self.rows.source}:"]
        parts += [_format(self.scores, self.differences)]
        parts += ["* the interval of the difference excludes 0."] if self.differences else []
        for one in self.slices:
            title = f"{units.capitalize(one['name'])} ({one['num_rows']:,}):"
            parts += ["", title, _format(one["scores"], one["differences"])]
        for name, checked in self.requirements.items():
            parts += ["", f"Required of {name}:", format_checked(checked)] if checked else []
        return "\n".join(parts)

    def failed(self) -> list[str]:
        """Requirements that some model does not meet."""
        return [f"{name}: {one}" for name, checked in self.requirements.items() for one in describe_failed(checked)]


def evaluate(
    predictions: Mapping[str, FloatArray],
    rows: EvaluatedRows,
    *,
    metric: str = "rmse",
    requirements: Sequence[Requirement] = (),
    seed: int = 0,
    notes: Sequence[str] = (),
) -> Evaluation:
    """Scores predictions as the report of a run does, and compares all with the first.

    Args:
        predictions: model -> (n,), label units.
        rows: that they are of.
        metric: of the verdicts.
        requirements: that every model but the first must meet; of one model, it.
        seed: of the bootstrap.
        notes: to be shown with those of the rows.

    Raises:
        ArgumentError: a metric that cannot be compared.

    Cost: per model 1,000 bootstrap resamples of its scores, and one comparison per metric, for all rows and each slice:
    per comparison 1.6 s for 26,000 rows.
    """
    first, *later = predictions
    compared = Compared(predictions, rows.labels, rows.threshold, seed, rows.units)
    scores = compared.score(rows.groups)
    verdicts = {
        name: judge_pair(
            rows.labels,
            predictions[first],
            predictions[name],
            names=(first, name),
            metric=metric,
            bounds=rows.bounds,
            groups=rows.groups,
            **compared.options,
        ).as_dict()
        for name in later
    }
    slices = [
        {**compared.score_slice(one), "differences": _differences(compared.select(one), first)} for one in rows.slices
    ]
    has_limits = rows.bounds is not None and bool(np.any(rows.bounds))
    return Evaluation(
        rows,
        scores,
        {name: _collapse(predicted, rows.labels) for name, predicted in predictions.items()},
        verdicts,
        _differences(compared, first, rows.groups),
        slices,
        {name: check_requirements(requirements, scores[name]) for name in later or [first]},
        [*rows.notes, *([LIMITS_NOTE] if has_limits and later and metric == "rmse" else []), *notes],
    )


def _differences(compared: Compared, first: str, groups: Sequence[Any] | None = None) -> dict[str, dict[str, Any]]:
    """Of every other model against the first, in each metric that can be compared."""
    before, metrics = compared.predictors[first], score_names(compared.threshold, groups is not None)

    def compare(after: FloatArray, metric: str) -> dict[str, Any]:
        found = compare_paired(compared.labels, before, after, metric, groups=groups, **compared.options)
        return found.as_dict()

    return {
        name: {metric: compare(after, metric) for metric in metrics}
        for name, after in compared.predictors.items()
        if name != first
    }


def _collapse(predicted: FloatArray, labels: FloatArray) -> dict[str, Any]:
    report, alarms = examine_predictions(predicted, labels)
    is_collapsed = any(alarm.kind in COLLAPSED for alarm in alarms)
    texts = [f"collapsed: {alarm.text}" if alarm.kind in COLLAPSED else alarm.text for alarm in alarms]
    return {**report, "alarms": texts, "is_collapsed": is_collapsed}


def _format(scores: Mapping[str, Any], differences: Mapping[str, Any]) -> str:
    """A row per metric, a column per model and, beside each but the first, by how much it is better than that."""
    names = [*scores]
    headers, rows = [""], [[units.metric_name(metric)] for metric in scores[names[0]]]
    for name in names:
        headers.append(name)
        for row, metric in zip(rows, scores[name]):
            row.append(units.score(scores[name][metric]))
        if name in differences:
            headers.append(f"better than {names[0]} by")
            for row, metric in zip(rows, scores[name]):
                row.append(_difference(differences[name].get(metric)))
    return format_table(rows, headers)


def _difference(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return units.MISSING
    numbers = {"value": compared["improvement"], "low": compared["low"], "high": compared["high"]}
    shown = units.score({name: None if value is None else value + 0.0 for name, value in numbers.items()})  # never -0
    return f"{shown} *" if compared["is_better"] or compared["is_worse"] else shown
