"""Scores of several predictors beside each other, what has to be known to read them, and the page of any run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text import units
from ..text.units import is_finite, less_is_better, metric_name, metric_title
from .data_section import describe_near_copies
from .page import Block, Page, Points, Table
from .run_files import as_dict

REQUIRED_HEADERS = ["metric", "expected", "actual", ""]


def required_rows(checked: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A row under `REQUIRED_HEADERS` for each `Checked` of `hf_ext.evaluation.requirements`."""
    return [
        [metric_name(one["metric"]), one["expected"], one["actual"], "passed" if one["passed"] else "FAILED"]
        for one in checked
    ]


def default_page(results: Mapping[str, Any]) -> Page:
    """The page of a run whose record has none: of any model, or of an earlier version."""
    test = as_dict(results.get("test"))
    if "model" in test:  # scores without intervals, and nothing beside them
        test = {"scores": test, "baselines": {name: {} for name in test if name != "model"}}
    chosen_by = str(as_dict(results.get("settings")).get("metric_for_best_model")).removeprefix("eval_")
    model = as_dict(as_dict(test.get("scores")).get("model"))
    return Page(
        title=str(as_dict(results.get("model")).get("class") or "A model"),
        numbers=score_numbers(test, dict.fromkeys([*list(model)[:2], chosen_by])),
        results=score_blocks(test, as_dict(results.get("data")).get("leaks")),
        limits=verdict_limits(results),
        scores=index_scores(model),
    )


def score_blocks(split: Mapping[str, Any], leaks: Mapping[str, Any] | None = None) -> list[Block]:
    """Tables of the test split and of slices of it, what was noted, how to read it; nothing where it was not scored.

    Args:
        split: {"num_rows", "scores": predictor -> metric -> score, "slices", "notes", "baselines"}; all may be absent.
        leaks: as `leak_report` gives them; what is said of near copies stands in the limits of a page.
    """
    scores = as_dict(split.get("scores"))
    if not scores:
        return []
    rows = f", {units.number(split['num_rows'])} rows" if split.get("num_rows") else ""
    blocks: list[Block] = [score_table(scores, f"The test split{rows}.")]
    notes = [*score_notes(scores)]
    for part in split.get("slices") or []:
        caption = f"{units.capitalize(str(part.get('name')))}: {units.number(part.get('num_rows'))} rows."
        blocks.append(score_table(as_dict(part.get("scores")), caption))
        notes += score_notes(as_dict(part.get("scores")))
    said_in_limits = describe_near_copies(leaks)
    notes += [str(note) for note in split.get("notes") or [] if note not in said_in_limits]
    notes += fit_notes(as_dict(split.get("baselines")))
    return [*blocks, Points(list(dict.fromkeys(notes)))] if notes else blocks


def score_table(scores: Mapping[str, Any], caption: str) -> Table:
    """A row per metric, a column per predictor: there are more metrics than a page is wide.

    Args:
        scores: predictor -> metric -> score, or a number that has no interval.
    """
    found = dict.fromkeys(metric for entries in scores.values() for metric in as_dict(entries))
    columns = [as_dict(entries) for entries in scores.values()]
    rows = [[metric_title(m), *(units.score(e[m]) if m in e else units.MISSING for e in columns)] for m in found]
    return Table(["", *scores], rows, caption)


def score_notes(scores: Mapping[str, Any]) -> list[str]:
    """What intervals mean, where a score has no value and why, and what counts as positive."""
    notes = []
    entries = [(metric, as_dict(e)) for both in scores.values() for metric, e in as_dict(both).items()]
    shown = [entry for metric, entry in entries if entry.get("low") is not None and metric != "per_group_spearman"]
    if shown:
        level = units.share(shown[0].get("confidence"))
        notes.append(f"In brackets: {level} intervals, by resampling {resampled(shown[0], 'the test rows')}.")
    if len({frozenset(as_dict(both)) for both in scores.values()}) > 1:
        notes.append("A dash: the predictor has no such score.")
    notes += undefined_notes(scores)
    threshold = next((entry for _, entry in entries if "threshold" in entry), None)
    if threshold:
        notes.append(
            "Recall, precision, F1, average precision: labels at or above "
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


def undefined_notes(scores: Mapping[str, Any]) -> list[str]:
    """Which metrics of which predictors have no value and why: a sentence for all that share metrics and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for predictor, both in scores.items():
        reasons: dict[str, list[str]] = {}
        for metric, entry in ((metric, as_dict(entry)) for metric, entry in as_dict(both).items()):
            if entry and not is_finite(entry.get("value")):
                reasons.setdefault(str(entry.get("undefined") or "no value"), []).append(metric_name(metric))
        for why, metrics in reasons.items():
            found.setdefault((", ".join(metrics), why), []).append(predictor)
    return [f"Undefined, {metrics} of {', '.join(names)}: {why}." for (metrics, why), names in found.items()]


def fit_notes(baselines: Mapping[str, Any]) -> list[str]:
    """Baselines that saw only a part of the training rows or of their features."""
    notes = []
    for name, facts in ((name, as_dict(facts)) for name, facts in baselines.items()):
        parts = [
            f"{units.number(facts[f'num_{what}'])} of {units.number(facts[f'of_{what}'])} {word}"
            for what, word in (("rows", "training rows"), ("features", "features"))
            if facts.get(f"of_{what}") not in (None, facts.get(f"num_{what}"))
        ]
        if parts:
            notes.append(f"Baseline {name}: fitted on {' and '.join(parts)}.")
    return notes


def score_numbers(split: Mapping[str, Any], metrics: Iterable[str], name: str = "test") -> list[list[str]]:
    """Numbers of a page: those of `metrics` that the model has, each beside the best baseline."""
    scores = {predictor: as_dict(entries) for predictor, entries in as_dict(split.get("scores")).items()}
    numbers = []
    for metric in metrics:
        if metric not in scores.get("model", {}):
            continue
        values = {baseline: _value(scores.get(baseline, {}).get(metric)) for baseline in split.get("baselines") or ()}
        known = {baseline: value for baseline, value in values.items() if is_finite(value)}
        note = "no baseline to compare with"
        if known:
            best = (min if less_is_better(metric) else max)(known, key=known.__getitem__)
            note = f"best baseline: {units.number(known[best])}, {best}"
        numbers.append([f"{metric_name(metric)} on {name}", units.score(scores["model"][metric]), note])
    return numbers or [["score", units.NOT_MEASURED, f"no {name} split was scored"]]


def index_scores(model: Mapping[str, Any]) -> list[list[Any]]:
    """Scores of a page, of the model's: metric -> score or number; only finite ones."""
    values = {metric: _value(entry) for metric, entry in model.items()}
    return [[metric, metric_title(metric), value] for metric, value in values.items() if is_finite(value)]


def verdict_limits(results: Mapping[str, Any]) -> list[str]:
    """What the verdict found wrong, or did not find out: the first of the limits."""
    verdict = as_dict(results.get("verdict"))
    better, baseline = verdict.get("is_better"), verdict.get("baseline") or "a trivial predictor"
    if better is False:
        return [f"It is not better than {baseline}: prefer that to its predictions."]
    return [] if better else [f"Whether it is better than {baseline} is not decided by this run."]


def _value(entry: Any) -> Any:
    return entry.get("value") if isinstance(entry, Mapping) else entry
