"""Scores of several predictors beside each other, what has to be known to read them, and the page of any run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text import is_finite, less_is_better, metric_name, metric_title, units
from .data_section import describe_near_copies
from .page import Blocks, Page, Points, Table
from .record import Facts, Leaks, RunRecord, Score, Scores, SplitRecord, VerdictRecord

REQUIRED_HEADERS = ["metric", "expected", "actual", ""]


def required_rows(checked: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns a row under `REQUIRED_HEADERS` for each `Checked` of `hf_ext.evaluation.requirements`."""
    return [
        [metric_name(one["metric"]), one["expected"], one["actual"], "passed" if one["passed"] else "FAILED"]
        for one in checked
    ]


def default_page(record: RunRecord) -> Page:
    """Returns the page of a run whose record has none: of any model, or of an earlier version."""
    test = record.test
    return Page(
        title=record.model.class_ or "A model",
        numbers=score_numbers(test, dict.fromkeys([*list(test.of_model)[:2], record.chosen_by])),
        results=score_blocks(test, record.data.leaks),
        limits=verdict_limits(record.verdict),
        scores=index_scores(test),
    )


def score_blocks(split: SplitRecord, leaks: Leaks) -> Blocks:
    """Returns tables of the test split and of slices of it, what was noted, how to read it.

    Nothing where it was not scored.

    What is said of near copies, of which `leaks` are the counts, stands in the limits of a page.
    """
    if not split.scores:
        return []
    rows = f", {units.number(split.num_rows)} rows" if split.num_rows else ""
    blocks: Blocks = [score_table(split.scores, f"The test split{rows}.")]
    notes = [*score_notes(split.scores)]
    for one in split.slices:
        caption = f"{units.capitalize(one.name)}: {units.number(one.num_rows)} rows."
        blocks.append(score_table(one.scores, caption))
        notes += score_notes(one.scores)
    said_in_limits = describe_near_copies(leaks)
    notes += [note for note in split.notes if note not in said_in_limits]
    notes += fit_notes(split.baselines)
    return [*blocks, Points(list(dict.fromkeys(notes)))] if notes else blocks


def score_table(scores: Scores, caption: str) -> Table:
    """Returns a row per metric, a column per predictor: there are more metrics than a page is wide."""
    columns = scores.values()
    found = dict.fromkeys(metric for entries in columns for metric in entries)
    rows = [[metric_title(m), *(e[m].shown if m in e else units.MISSING for e in columns)] for m in found]
    return Table(["", *scores], rows, caption)


def score_notes(scores: Scores) -> list[str]:
    """Says what intervals mean, where a score has no value and why, and what counts as positive."""
    notes = []
    entries = [(metric, entry) for both in scores.values() for metric, entry in both.items()]
    shown = [entry for metric, entry in entries if entry.low is not None and metric != "per_group_spearman"]
    if shown:
        level = units.share(shown[0].confidence)
        notes.append(f"In brackets: {level} intervals, by resampling {resampled(shown[0], 'the test rows')}.")
    if len({frozenset(both) for both in scores.values()}) > 1:
        notes.append("A dash: the predictor has no such score.")
    notes += undefined_notes(scores)
    if of_binders := next((entry for _, entry in entries if entry.threshold is not None), None):
        notes.append(
            "Recall, precision, F1, average precision: labels at or above "
            f"{units.number(of_binders.threshold)} count as positive, {units.share(of_binders.base_rate)} of the rows."
        )
    return notes


def resampled(score: Score, rows: str) -> str:
    """Says what the interval of a score resamples: `rows`; or the 57 values of heavy, and whether these are too few."""
    if not score.interval_by:
        return rows
    few = "" if score.is_trusted else ", too few to be trusted"
    return f"the {units.number(score.num_units)} values of {score.interval_by}{few}"


def undefined_notes(scores: Scores) -> list[str]:
    """Says which metrics of which predictors have no value and why, a sentence for all with the same reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for predictor, both in scores.items():
        reasons: dict[str, list[str]] = {}
        for metric, entry in both.items():
            if not entry.is_bare and not is_finite(entry.value):
                reasons.setdefault(entry.undefined or "no value", []).append(metric_name(metric))
        for why, metrics in reasons.items():
            found.setdefault((", ".join(metrics), why), []).append(predictor)
    return [f"Undefined, {metrics} of {', '.join(names)}: {why}." for (metrics, why), names in found.items()]


def fit_notes(baselines: Mapping[str, Facts]) -> list[str]:
    """Names baselines that saw only a part of the training rows or of their features."""
    notes = []
    for name, facts in baselines.items():
        parts = [
            f"{units.number(facts[f'num_{what}'])} of {units.number(facts[f'of_{what}'])} {word}"
            for what, word in (("rows", "training rows"), ("features", "features"))
            if facts.get(f"of_{what}") not in (None, facts.get(f"num_{what}"))
        ]
        if parts:
            notes.append(f"Baseline {name}: fitted on {' and '.join(parts)}.")
    return notes


def score_numbers(split: SplitRecord, metrics: Iterable[str], name: str = "test") -> list[list[str]]:
    """Returns numbers of a page: those of `metrics` that the model has, each beside the best baseline."""
    numbers = []
    for metric in metrics:
        if metric not in split.of_model:
            continue
        values = {one: split.scores.get(one, {}).get(metric, Score()).value for one in split.baselines}
        known = {baseline: value for baseline, value in values.items() if is_finite(value)}
        note = "no baseline to compare with"
        if known:
            best = (min if less_is_better(metric) else max)(known, key=known.__getitem__)
            note = f"best baseline: {units.number(known[best])}, {best}"
        numbers.append([f"{metric_name(metric)} on {name}", split.of_model[metric].shown, note])
    return numbers or [["score", units.NOT_MEASURED, f"no {name} split was scored"]]


def index_scores(split: SplitRecord) -> list[list[Any]]:
    """Scores of a page, of the model's the finite ones."""
    found = split.of_model.items()
    return [[metric, metric_title(metric), score.value] for metric, score in found if is_finite(score.value)]


def verdict_limits(verdict: VerdictRecord) -> list[str]:
    """Says what the verdict found wrong, or did not find out: the first of the limits."""
    baseline = verdict.baseline or "a trivial predictor"
    if verdict.is_better is False:
        return [f"It is not better than {baseline}: prefer that to its predictions."]
    return [] if verdict.is_better else [f"Whether it is better than {baseline} is not decided by this run."]
