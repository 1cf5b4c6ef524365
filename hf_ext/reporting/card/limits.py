"""What a reader must know before using the model, derived from what the run recorded."""

from __future__ import annotations

from typing import Any

from ..markdown import code, plain
from ..near_copies import describe_near_copies
from ..report.run_files import RunFiles
from ..report.scores import undefined_notes
from ..report.values import as_dict
from ..units import is_finite, metric_title, number, share
from .facts import is_demo
from .loading import missing_bases
from .tasks import TaskCard

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


def limits_section(task: TaskCard) -> list[str]:
    """Markdown: a list, the most serious first."""
    run, data = task.run, as_dict(task.run.results.get("data"))
    lines = [f"Trained on generated demo data: it shows that the code works and {task.demo_effect} nothing real."]
    lines = [*(lines if is_demo(run) else []), *task.findings(), *_alarms(task), *_split(data), *_leaks(data)]
    lines += [*task.limits(), *_lengths(run, data), *_scores(task), *_reference(task)]
    lines += [f"This is about {task.subject()}, and about nothing else: {task.not_about}."]
    return ["## Limitations", "", *(f"- {line}" for line in lines), ""]


def _alarms(task: TaskCard) -> list[str]:
    run, (split, _) = task.run, task.scored_split()
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


def _scores(task: TaskCard) -> list[str]:
    _, scores = task.scored_split()
    return undefined_notes({"the model": scores.get("model")}, metric_title)


def _reference(task: TaskCard) -> list[str]:
    missing = "A pretrained model that it needs is neither in this repository nor on the Hub."
    return [*([missing] if missing_bases(task) else []), *task.interval_limits()]
