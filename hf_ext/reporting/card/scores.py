"""The score tables of a card: every predictor beside the model, every value with its interval."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import units
from ...units import metric_title
from ..markdown import plain, plain_line
from ..report.generation import measure_title
from ..report.markdown import render_table
from ..report.run_files import RunFiles
from ..report.scores import resampled, score_table, undefined_notes
from ..report.values import as_dict
from .generation import findings_lines
from .metadata import scored_split

_OF_SLICES = ("spearman", "rmse")


def scores_section(run: RunFiles) -> list[str]:
    """Markdown: scores of model and baselines, of slices, per group, and what is undefined and why."""
    split, scores = scored_split(run)
    if not scores:
        return ["## Scores", "", "This run left no scores.", ""]
    num_rows = as_dict(run.results.get(split)).get("num_rows")
    where = f"Scores on the {split} split" + (f", {num_rows:,} rows" if num_rows else "")
    lines = ["## Scores", "", f"{where}{_interval_text(scores)}.", "", _table(scores, _title(run)), ""]
    if run.is_generator:
        return [*lines, *findings_lines(run)]
    lines += _undefined(scores)
    lines += _groups(scores)
    notes = as_dict(run.results.get(split)).get("notes") or []
    lines += [*(f"- {plain_line(note)}" for note in notes), ""] if notes else []
    lines += _seeds(as_dict(run.results.get("seeds")))
    for part in as_dict(run.results.get(split)).get("slices") or []:
        found = {name: _only(metrics) for name, metrics in as_dict(part.get("scores")).items()}
        lines += [
            f"### {plain(units.capitalize(str(part.get('name'))))} ({units.number(part.get('num_rows'))} rows)",
            "",
        ]
        lines += [_table(found), "", *_undefined(found)]
    return lines


def _title(run: RunFiles) -> Callable[[str], str]:
    return measure_title if run.is_generator else metric_title


def _table(scores: dict[str, Any], title: Callable[[str], str] = metric_title) -> str:
    """The model's metrics, each with its threshold where it has one."""
    metrics = as_dict(scores.get("model")) or as_dict(next(iter(scores.values()), {}))
    limits = {metric: as_dict(score).get("threshold") for metric, score in metrics.items()}
    at = {metric: "" if limit is None else f" at {limit:g} and above" for metric, limit in limits.items()}
    return render_table(score_table(scores, names={metric: title(metric) + at[metric] for metric in metrics}))


def _interval_text(scores: dict[str, Any]) -> str:
    found = [score for score in as_dict(scores.get("model")).values() if isinstance(score, dict)]
    shown = [score for score in found if score.get("low") is not None]
    if not shown:
        return ""
    level = units.share(max(float(score["confidence"]) for score in shown))
    return f", with {level} bootstrap intervals over {resampled(shown[0], 'rows')}"


def _undefined(scores: dict[str, Any]) -> list[str]:
    lines = [f"- {plain_line(note)}" for note in undefined_notes(scores, metric_title)]
    return [*lines, ""] if lines else []


def _groups(scores: dict[str, Any]) -> list[str]:
    """The range over groups, without their names, which are the user's data."""
    groups = as_dict(as_dict(as_dict(scores.get("model")).get("per_group_spearman")).get("groups"))
    found = [group["value"] for group in groups.values() if group.get("value") is not None]
    if not found:
        return []
    return [
        f"Spearman's rho within single groups: {units.number(min(found))} to {units.number(max(found))} in "
        f"{len(found)} of {len(groups)} groups; in the others it is undefined.",
        "",
    ]


def _seeds(seeds: dict[str, Any]) -> list[str]:
    """What heads of several seeds say apart, and whether their spread can serve as an error bar."""
    if not seeds.get("seeds"):
        return []
    lines = [
        f"The model predicts the mean of {len(seeds['seeds'])} heads (seeds {', '.join(map(str, seeds['seeds']))})."
    ]
    single = as_dict(as_dict(seeds.get("scores")).get("spearman"))
    if single.get("mean") is not None:
        lines.append(f"One head alone: Spearman's rho {single['mean']:.3f} +- {single['std']:.3f} over seeds.")
    fit = as_dict(seeds.get("uncertainty"))
    if fit.get("scale") is not None:
        lines.append(
            f"`predictor.predict_members(rows).std(1, ddof=1)` times {fit['scale']:.3g} (fitted on validation) covers "
            f"the error of {units.share(fit.get('coverage_1'))} of the test rows (an error bar: 68 %); rank "
            f"correlation of spread and error: {units.score(fit.get('spearman_of_error'))}."
        )
    return [" ".join([*lines, plain(seeds.get("meaning") or "")]).strip(), ""]


def _only(metrics: Any) -> dict[str, Any]:
    found = as_dict(metrics)
    return {name: found[name] for name in _OF_SLICES if name in found} or found
