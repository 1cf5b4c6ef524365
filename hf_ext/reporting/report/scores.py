"""Scores of several predictors as a table, what has to be known to read it, and the baseline to beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import units
from ..units import is_finite, less_is_better, metric_name
from .blocks import Table
from .values import as_dict


def score_table(
    scores: Mapping[str, Any],
    caption: str = "",
    names: Mapping[str, str] | None = None,
    absent: str = units.NOT_MEASURED,
) -> Table:
    """A row per metric, a column per predictor: there are more metrics than a page is wide.

    Args:
        scores: predictor -> metric -> score, or a number that has no interval.
        names: metric -> what its row is called, of those that are shown; None: every metric by its name.
        absent: what a cell says where a predictor has no such metric.
    """
    found = dict.fromkeys(metric for entries in scores.values() for metric in as_dict(entries))
    names = {metric: metric_name(metric) for metric in found} if names is None else names
    entries = [as_dict(both) for both in scores.values()]
    rows = [[name, *(units.score(e[m]) if m in e else absent for e in entries)] for m, name in names.items()]
    return Table(["", *scores], rows, caption, highlight="model")


def score_notes(scores: Mapping[str, Any]) -> list[str]:
    """What intervals mean, where a score has no value and why, and what counts as positive."""
    notes = []
    entries = [(name, m, as_dict(e)) for name, both in scores.items() for m, e in as_dict(both).items()]
    shown = [entry for _, metric, entry in entries if entry.get("low") is not None and metric != "per_group_spearman"]
    if shown:
        level = units.share(shown[0].get("confidence"))
        notes.append(f"In brackets: {level} intervals, by resampling {resampled(shown[0], 'the test rows')}.")
    notes += undefined_notes(scores, metric_name)
    threshold = next((entry for _, _, entry in entries if "threshold" in entry), None)
    if threshold:
        notes.append(
            "Recall, precision, F1, average precision, enrichment: labels at or above "
            f"{units.number(threshold['threshold'])} count as positive, {units.share(threshold.get('base_rate'))} of "
            "the rows."
        )
    return notes


def resampled(score: Mapping[str, Any], rows: str) -> str:
    """What the interval of a score resamples: `rows`; or the 57 values of heavy, and whether these are too few."""
    if not score.get("interval_by"):
        return rows
    few = ", too few to be trusted" if score.get("is_trusted") is False else ""
    return f"the {units.number(score.get('num_units'))} values of {score['interval_by']}{few}"


def undefined_notes(scores: Mapping[str, Any], name_metric: Callable[[str], str]) -> list[str]:
    """Which metrics of which predictors have no value and why: a sentence for all that share metrics and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for predictor, both in scores.items():
        reasons: dict[str, list[str]] = {}
        for metric, entry in ((metric, as_dict(entry)) for metric, entry in as_dict(both).items()):
            if entry and not is_finite(entry.get("value")):
                reasons.setdefault(str(entry.get("undefined") or "no value"), []).append(name_metric(metric))
        for why, metrics in reasons.items():
            found.setdefault((", ".join(metrics), why), []).append(predictor)
    return [f"Undefined, {metrics} of {', '.join(names)}: {why}." for (metrics, why), names in found.items()]


def fit_notes(baselines: Mapping[str, Any]) -> list[str]:
    """Baselines that saw only a part of the training rows or of their features."""
    notes = []
    for name, facts in ((name, as_dict(facts)) for name, facts in baselines.items()):
        parts = [_part(facts, "rows", "training rows"), _part(facts, "features", "features")]
        if any(parts):
            notes.append(f"Baseline {name}: fitted on {' and '.join(filter(None, parts))}.")
    return notes


def _part(facts: Mapping[str, Any], what: str, word: str) -> str:
    """2,000 of 3,000 rows; empty where it was all of them."""
    number, whole = facts.get(f"num_{what}"), facts.get(f"of_{what}")
    return "" if whole in (None, number) else f"{units.number(number)} of {units.number(whole)} {word}"


def best_baseline(test: Mapping[str, Any], metric: str) -> tuple[str, dict[str, Any]] | None:
    """Name and score of the baseline with the best value; None where no baseline has one. A teacher is none."""
    scores = as_dict(test.get("scores"))
    entries = {name: as_dict(as_dict(scores.get(name)).get(metric)) for name in as_dict(test.get("baselines"))}
    known = {name: entry for name, entry in entries.items() if is_finite(entry.get("value"))}
    if not known:
        return None
    choose = min if less_is_better(metric) else max
    name = choose(known, key=lambda key: known[key]["value"])
    return name, known[name]
