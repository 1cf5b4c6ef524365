"""Columns of predictions for the same labelled rows, scored and compared: which rows these are, and what is found."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from ..data import (
    REJECTED_FILE,
    SOURCE_ROW,
    SPLIT_CLUSTER,
    DataArguments,
    FloatArray,
    label_array,
    load_sequences,
    read_bounds,
)
from ..errors import ArgumentError, DataError
from ..evaluation import (
    Requirement,
    ResamplingGroups,
    check_requirements,
    collapse_report,
    compare_paired,
    describe_failed,
    format_checked,
    group_facts,
    judge_pair,
)
from ..files import Json
from ..labels import LABEL, LabelKind
from ..property import BOUND_SIGNS, LIMITS_NOTE, RANKING_NOTE, Compared, check_threshold, describe_groups, scored_names
from ..reporting import Facts, read_run
from ..text import format_table, units


@dataclass(frozen=True)
class LabelledRows:
    """Rows with labels, and how scores of them are made and read.

    Attributes:
        table: map-style: sequences, `label`, `source_row`, and where there are any `bound` and the group.
        kind: of the labels.
        source: where they are from, as a reader knows it.
        threshold: label units; None leaves recall and its like out.
        group_names: (n,), of each row, or None.
        groups: what intervals resample; None: rows.
        notes: sentences about the rows.
    """

    table: Any
    kind: LabelKind
    source: str
    threshold: float | None
    group_names: list[Any] | None
    groups: ResamplingGroups | None
    notes: list[str]

    @property
    def labels(self) -> FloatArray:
        """(n, ...), label units; rounded to float32, as batches hold them and runs score them."""
        return label_array(self.table, self.kind).astype(np.float32).astype(np.float64)


def load_labelled(args: DataArguments, threshold: float | None, kind: LabelKind | None) -> LabelledRows:
    """Loads all rows of a labelled table; intervals resample rows.

    Args:
        kind: of labels that models predict; None: what the table's seem to be.

    Raises:
        ArgumentError, DataError: as `load_sequences`; no name; a stream.
    """
    if args.dataset_name is None:
        raise ArgumentError("Which rows? Give --dataset_name with labelled rows, or --test_of with a run's folder.")
    if args.streaming:
        raise ArgumentError("--streaming: scores are of rows that can be counted; leave it out.")
    with tempfile.TemporaryDirectory() as scratch:
        rejected = Path(scratch) / REJECTED_FILE
        loaded = load_sequences(args, rejected=rejected, needs_labels=True, kind=kind)
    table = loaded.table
    report = loaded.report
    if threshold is not None:
        check_threshold(threshold, label_array(table), report)
    group_names = table[args.group_column][:] if args.group_column else None
    notes = [*report["warnings"], *report["notes"], "Whether a model was trained on these rows is not looked at."]
    return LabelledRows(table, loaded.kind, args.dataset_name, threshold, group_names, None, notes)


def load_test(folder: str, args: DataArguments, settings: Any, explicit: Container[str]) -> LabelledRows:
    """Loads the test rows of a run, as its `predictions.csv` lists them, with threshold, groups and resampled groups.

    Args:
        folder: of a run of `hf-ext train`.
        args: get the columns of the run.
        settings: its `binder_threshold` and `seed` become the run's, unless they are among `explicit`, what the user
            set.

    Raises:
        ArgumentError: not such a run.
        DataError: no finished run, a damaged record, or one that does not list its test rows.
    """
    run = read_run(folder)
    settings_of_run = run.record.settings
    if run.record.task != "affinity":
        raise ArgumentError(f"--test_of {folder}: give the output folder of a run of hf-ext train.")
    given = ("sequence_columns", "missing_chains", "numeric_columns", "category_columns", "id_column")
    for name in settings_of_run.keys() & {*given, "label_column", "group_column"}:
        setattr(args, name, settings_of_run[name])
    for name in ("binder_threshold", "seed"):
        if name not in explicit:
            setattr(settings, name, settings_of_run[name])
    listed = run.predictions
    if listed is None or not listed.columns.keys() >= {*args.sequence_columns, SOURCE_ROW}:
        raise DataError(
            f"{run.folder} does not list the sequences of its test rows in predictions.csv: the file is lost, or they "
            "were a stream. Name a file with --dataset_name."
        )
    columns = {**listed.columns, LABEL: listed.labels}
    kind = run.record.kind
    if kind.is_one_number:
        if "bound" in columns:
            columns["bound"] = [BOUND_SIGNS.index(sign) - 1 for sign in columns["bound"]]
        table = Dataset.from_dict(columns)
    else:
        args.label_column = kind.label_names
        if len(args.label_column) > 1:  # a column each, also of numbers that one column listed
            kind = replace(kind, columns=tuple(args.label_column))
        columns[SOURCE_ROW] = [*map(int, columns[SOURCE_ROW])]
        if kind.per_residue:  # of a sequence that the run cut, what it scored
            (name,) = args.sequence_columns
            lengths = [len(kind.check_cell(cell).value) for cell in columns[LABEL]]
            columns[name] = [sequence[:length] for sequence, length in zip(columns[name], lengths)]
        known = {name: cells for name, cells in columns.items() if cells is not None}
        table = load_sequences(args, needs_labels=True, kind=kind, table=Dataset.from_dict(known)).table
    by = run.record.test.interval_by
    resampled = None
    if by:
        is_cluster = by in ("cluster", "position") and SPLIT_CLUSTER in columns
        resampled = ResamplingGroups.of(by, columns[SPLIT_CLUSTER if is_cluster else by])
    group_names = columns[args.group_column] if args.group_column else None
    source = f"test rows of {run.folder}"
    threshold = settings.binder_threshold
    return LabelledRows(table, kind, source, threshold, group_names, resampled, describe_groups(resampled))


def compare(
    predictions: Facts,
    rows: LabelledRows,
    *,
    metric: str = "rmse",
    requirements: Sequence[Requirement] = (),
    seed: int = 0,
    ranking: Collection[str] = (),
) -> Json:
    """Scores predictions as the report of a run does, and compares all with the first.

    Args:
        predictions: model -> (n,), label units; of other kinds as `rows_for` takes them.
        rows: that they are of.
        metric: of the verdicts.
        requirements: that every model but the first must meet; of one model, it.
        seed: of the bootstrap.
        ranking: models that predict an order only.

    Returns:
        JSON-able, by name of model in the order in which they were given. `scores`: model -> metric -> `Score`;
        `collapse`: model -> `collapse_report`; against the first, `verdicts`: model -> `Verdict.as_dict`, and
        `differences`: model -> metric -> `PairedComparison.as_dict`; `requirements`: model -> whether it reaches them.

    Raises:
        ArgumentError: a metric that cannot be compared.

    Cost: per model 1,000 bootstrap resamples of its scores, and one comparison per metric: 1.6 s for 26,000 rows.
    """
    first, *later = predictions
    labels = rows.labels
    bounds = read_bounds(rows.table)
    kind = rows.kind
    compared = Compared(predictions, labels, kind, rows.threshold, seed, rows.groups)
    scores = compared.score(rows.group_names)
    options = compared.options

    def differ(after: Any) -> Json:
        names = scored_names(kind, rows.threshold, has_groups=False)
        before = compared.rows[first]
        return {name: compare_paired(labels, before, after, name, **options).as_dict() for name in names}

    def judge(name: str) -> Json:
        pair = predictions[first], predictions[name]
        return judge_pair(labels, *pair, names=(first, name), metric=metric, bounds=bounds, **options).as_dict()

    has_limits = bounds is not None and bool(np.any(bounds)) and bool(later) and metric == "rmse"
    return {
        "task": "evaluation",
        "rows": rows.source,
        "num_rows": len(labels),
        **group_facts(rows.groups, len(labels)),
        "threshold": rows.threshold,
        "label_kind": kind.state(),
        "scores": scores,
        "collapse": {name: collapse_report(one, labels, kind, name in ranking) for name, one in predictions.items()},
        "verdicts": {name: judge(name) for name in later},
        "differences": {name: differ(compared.rows[name]) for name in later},
        "requirements": {name: check_requirements(requirements, scores[name]) for name in later or [first]},
        "notes": [
            *rows.notes,
            *([LIMITS_NOTE] if has_limits else []),
            *(f"{name}: {RANKING_NOTE}" for name in predictions if name in ranking),
        ],
    }


def describe(found: Facts) -> str:
    """Describes what `compare` found: verdicts, alarms, notes; a table of all rows; requirements."""
    parts = [one["text"] for one in found["verdicts"].values()]
    parts += [f"ALARM, {name}: {alarm}" for name, one in found["collapse"].items() for alarm in one["alarms"]]
    parts += [*found["notes"], "", f"{found['num_rows']:,} rows, {found['rows']}:"]
    parts += [_format(found["scores"], found["differences"])]
    parts += ["* the interval of the difference excludes 0."] if found["differences"] else []
    for name, checked in found["requirements"].items():
        parts += ["", f"Required of {name}:", format_checked(checked)] if checked else []
    return "\n".join(parts)


def describe_unmet(found: Facts) -> list[str]:
    """Lists requirements that some model does not meet."""
    return [f"{name}: {one}" for name, checked in found["requirements"].items() for one in describe_failed(checked)]


def _format(scores: Facts, differences: Facts) -> str:
    """Formats a row per metric, a column per model and, beside each but the first, by how much it is better."""
    first = next(iter(scores))
    headers = [""]
    rows = [[units.metric_name(metric)] for metric in scores[first]]
    for name, found in scores.items():
        headers += [name, f"better than {first} by"] if name in differences else [name]
        for row, metric in zip(rows, found):
            row.append(units.score(found[metric]))
            if name in differences:
                row.append(format_difference(differences[name].get(metric)))
    return format_table(rows, headers)


def format_difference(compared: Facts | None) -> str:
    """Formats `PairedComparison.as_dict` as 0.120 [0.100, 0.140] *, with a star where the interval excludes 0."""
    if compared is None:  # of the metric by groups
        return units.MISSING
    numbers = {"value": compared["improvement"], "low": compared["low"], "high": compared["high"]}
    shown = units.score({name: None if value is None else value + 0.0 for name, value in numbers.items()})  # never -0
    return f"{shown} *" if compared["is_better"] or compared["is_worse"] else shown
