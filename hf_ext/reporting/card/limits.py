"""What a reader must know before using the model, derived from what the run recorded."""

from __future__ import annotations

from typing import Any

from ...units import capitalize, is_finite, metric_title, number, share
from ..markdown import code, plain
from ..near_copies import describe_near_copies
from ..report.run_files import RunFiles
from ..report.scores import undefined_notes
from ..report.summary import label_name
from ..report.values import as_dict
from .loading import missing_bases
from .metadata import is_demo, scored_split

_SPLITS = {
    "random": "The split is random over rows: the scores say how the model does on rows like those of training, not on "
    "new antibodies, antigens or families.",
    "group": "Whole groups were held out ({rule}): the scores are about new groups, of this kind of data.",
    "cluster": "Similar sequences were kept on one side of the split{limit}: the scores are about sequences unlike "
    "those of training by that measure, of this kind of data.",
    "column": "The split came with the data ({rule}): what the scores say about new sequences depends on how it was "
    "made.",
    "files": "The split came with the data, as files: what the scores say about new sequences depends on how it was "
    "made.",
}


def limits_section(run: RunFiles) -> list[str]:
    """Markdown: a list, the most serious first."""
    data = as_dict(run.results.get("data"))
    lines = [*_basic(run), *_alarms(run), *_split(data), *_leaks(data)]
    if not (run.is_masked_lm or run.is_generator):
        lines += _labels(run)
    lines += [*_lengths(run, data), *_scores(run), *_reference(run)]
    lines += [f"This is about {_task(run)}, and about nothing else: no safety, no function in a cell, no patient."]
    return ["## Limitations", "", *(f"- {line}" for line in lines), ""]


def _task(run: RunFiles) -> str:
    if run.is_masked_lm:
        return "filling in masked residues"
    if run.is_generator:
        return "writing sequences like those of the training antibodies"
    return f"predicting {code(label_name(run))} as it was measured in the training data"


def _basic(run: RunFiles) -> list[str]:
    lines = []
    if is_demo(run):
        does = "writes" if run.is_generator else "predicts"
        lines.append(f"Trained on generated demo data: it shows that the code works and {does} nothing real.")
    if run.is_generator:
        return [*lines, *_generator_lines(run)]
    verdict = as_dict(run.results.get("verdict"))
    better, baseline = verdict.get("is_better"), plain(verdict.get("baseline") or "a trivial predictor")
    if better is False:
        lines.append(f"It is not better than {baseline}: prefer that to its predictions.")
    if better is None:
        lines.append(f"Whether it is better than {baseline} is not decided by this run.")
    return lines


def _generator_lines(run: RunFiles) -> list[str]:
    """What the verdict found wrong, or did not find out."""
    verdict = as_dict(as_dict(run.results.get("generation")).get("verdict"))
    found = [as_dict(one) for one in verdict.get("findings") or []]
    wrong = [one for one in found if one.get("is_failure") or one.get("kind") in ("undecided", "discriminator")]
    return [plain(capitalize(f"{one.get('text')}.")) for one in wrong]


def _alarms(run: RunFiles) -> list[str]:
    split, _ = scored_split(run)
    collapse = as_dict(as_dict(run.results.get(split)).get("collapse"))
    lines = [f"Predictions on the {split} split: {plain(alarm)}" for alarm in collapse.get("alarms") or []]
    during = [entry for entry in run.results.get("alarms") or [] if entry.get("alarms")]
    if during:
        steps = ", ".join(str(entry.get("step")) for entry in during[:10])
        lines.append(f"Predictions collapsed while it trained, at {len(during)} evaluations (steps {steps}).")
    return lines


def _split(data: dict[str, Any]) -> list[str]:
    split = as_dict(data.get("split"))
    rule, identity = str(split.get("rule") or ""), split.get("identity")
    text = _SPLITS.get(rule.partition(":")[0])
    limit = f", down to {share(identity)} identity" if is_finite(identity) else ""
    return [text.format(rule=code(rule), limit=limit)] if text else []


def _leaks(data: dict[str, Any]) -> list[str]:
    if data.get("streaming"):
        return ["The data was streamed: whether test sequences were trained on too was not looked for."]
    leaks = as_dict(data.get("leaks"))
    row, compared = as_dict(leaks.get("row")), leaks.get("compared", "test")
    lines = []
    if row.get("num_test_rows_in_train"):
        lines.append(
            f"{row['num_test_rows_in_train']:,} of {row['num_test_rows']:,} {compared} rows repeat the sequences of a "
            "training row: the scores are partly memory."
        )
    lines += describe_near_copies(leaks)
    columns = as_dict(leaks.get("columns"))
    for name, leak in columns.items() if len(columns) > 1 else ():
        if leak.get("num_test_sequences_in_train"):
            lines.append(
                f"{leak['num_test_sequences_in_train']:,} of the {leak['num_test_sequences']:,} {code(name)} sequences "
                f"of {compared} are in training too."
            )
    return lines


def _labels(run: RunFiles) -> list[str]:
    lines = []
    loss = as_dict(run.results.get("model")).get("loss")
    for split, audit in as_dict(run.results.get("labels")).items():
        censored = audit.get("censored_share")
        if censored:
            read = "which its loss reads as bounds" if loss in ("tobit", "ranking") else "taken as exact"
            lines.append(f"{share(censored)} of the {split} labels are bounds, {read}.")
        lines += [f"Labels of {split}: {plain(alarm)}" for alarm in audit.get("alarms") or []]
    train = as_dict(as_dict(run.results.get("labels")).get("train"))
    if is_finite(train.get("min")) and is_finite(train.get("max")):
        lines.append(
            f"Training labels go from {train['min']:g} to {train['max']:g}; a prediction outside that "
            "range is an extrapolation."
        )
    return lines


def _lengths(run: RunFiles, data: dict[str, Any]) -> list[str]:
    lines = []
    for name, facts in as_dict(data.get("inputs")).items():
        if facts.get("longest"):
            lines.append(
                f"{code(name)}: the longest input seen has {number(facts['longest'])} residues; longer ones are "
                "untested."
            )
        if facts.get("num_above_limit"):
            how = {"truncate": "cut", "window": "read in windows"}.get(run.settings.get("too_long", ""), "changed")
            lines.append(f"{code(name)}: {facts['num_above_limit']:,} sequences above the encoder's limit were {how}.")
    return lines


def _scores(run: RunFiles) -> list[str]:
    _, scores = scored_split(run)
    return undefined_notes({"the model": scores.get("model")}, metric_title)


def _reference(run: RunFiles) -> list[str]:
    lines = []
    if missing_bases(run):
        lines.append("A pretrained model that it needs is neither in this repository nor on the Hub.")
    if not (run.is_masked_lm or run.is_generator or _resamples_units(run)):
        lines.append(
            "The intervals treat rows as independent: where rows share an antibody or an antigen they are too narrow "
            "for a claim about new ones."
        )
    return lines


def _resamples_units(run: RunFiles) -> bool:
    """Whether the intervals resample what was held out together, which the scores' notes say."""
    return bool(as_dict(run.results.get(scored_split(run)[0])).get("interval_by"))
