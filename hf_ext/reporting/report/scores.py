"""The result: scores beside baselines, rows that training has not seen, figures of predictions, groups, advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ... import units
from ...units import metric_name
from ..charts.rows import group_chart, prediction_charts
from ..near_copies import describe_near_copies
from .blocks import Block, Bullets, Figure, Fold, Paragraph, Section, Table
from .generation import generation_blocks
from .run_files import RunFiles
from .summary import label_name
from .values import as_dict, hide_folders

MAX_GROUP_ROWS = 300


def result_section(run: RunFiles) -> Section:
    """How good the model is, and compared with what."""
    if run.is_generator:
        blocks = generation_blocks(run)
    else:
        blocks = _token_blocks(run) if run.is_masked_lm else _score_blocks(run)
    advice = [hide_folders(str(line)) for line in run.results.get("advice") or []]
    if advice:
        blocks.append(Fold("What the run suggests next", [Bullets(advice)]))
    return Section("result", "Result", blocks)


def _score_blocks(run: RunFiles) -> list[Block]:
    test = as_dict(run.results.get("test"))
    scores = as_dict(test.get("scores"))
    if not scores:
        return [Paragraph("Not measured: the run has no scores of a test split."), *_figures(run)]
    blocks: list[Block] = [score_table(scores, f"Test rows: {units.number(test.get('num_rows'))}.")]
    notes = _score_notes(scores)
    for part in test.get("slices") or []:
        rows = f"{units.capitalize(str(part.get('name')))}: {units.number(part.get('num_rows'))} rows."
        blocks.append(score_table(as_dict(part.get("scores")), rows))
        notes += _score_notes(as_dict(part.get("scores")))
    if test.get("notes"):
        blocks.append(Bullets([str(note) for note in test["notes"]]))
    notes += fit_notes(as_dict(test.get("baselines")))
    if notes:
        blocks.append(Bullets(list(dict.fromkeys(notes)), is_note=True))
    blocks += _figures(run)
    return blocks + _group_blocks(as_dict(scores.get("model")))


def score_table(scores: Mapping[str, Any], caption: str = "", names: Mapping[str, str] | None = None) -> Table:
    """A row per metric, a column per predictor: there are more metrics than a page is wide.

    Args:
        scores: predictor -> metric -> score, or a number that has no interval.
        names: metric -> what its row is called, of those that are shown; None: every metric by its name.
    """
    found = dict.fromkeys(metric for entries in scores.values() for metric in as_dict(entries))
    names = {metric: metric_name(metric) for metric in found} if names is None else names
    rows = [[name, *(units.score(as_dict(both).get(m)) for both in scores.values())] for m, name in names.items()]
    return Table(["", *scores], rows, caption, highlight="model")


def _score_notes(scores: Mapping[str, Any]) -> list[str]:
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
            f"Recall, precision and F1: labels at or above {units.number(threshold['threshold'])} count as positive, "
            f"{units.share(threshold.get('base_rate'))} of the rows."
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
            if entry and not units.is_finite(entry.get("value")):
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


def _token_blocks(run: RunFiles) -> list[Block]:
    metrics = ("token_loss", "perplexity", "accuracy", "num_tokens")
    rows = [
        [f"{split}, {name}", *(units.number(as_dict(entry).get(metric)) for metric in metrics)]
        for split in ("validation", "test")
        for name, entry in as_dict(run.results.get(split)).items()
        if isinstance(entry, dict) and "token_loss" in entry
    ]
    if not rows:
        return [Paragraph("Not measured: the run has no scores of a validation or test split.")]
    note = (
        "Loss in nats per masked residue, perplexity is its exponential. The unigram predicts from how often residues "
        "occur in training, whatever stands around them; a model that is no better has learned nothing about order."
    )
    near = describe_near_copies(as_dict(as_dict(run.results.get("data")).get("leaks")))
    table = Table(["split, predictor", *map(metric_name, metrics[:3]), "masked residues"], rows)
    return [table, *([Bullets(near)] if near else []), Paragraph(note)]
