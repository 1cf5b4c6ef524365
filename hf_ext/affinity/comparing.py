"""Columns of predictions for the same labelled rows, scored and compared: which rows these are, and what is found."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray

from ..data.arguments import SPLIT_CLUSTER, DataArguments
from ..data.loading import load_sequences
from ..data.reading import SOURCE_ROW
from ..data.row_errors import REJECTED_FILE
from ..errors import ArgumentError, DataError
from ..evaluation.alarms import AlarmKind, examine_predictions
from ..evaluation.metrics import score_names
from ..evaluation.requirements import Requirement, check_requirements, describe_failed, format_checked
from ..evaluation.resampling import ResamplingUnits, unit_facts
from ..evaluation.scores import compare_paired
from ..evaluation.verdict import judge_pair
from ..reporting import units
from ..reporting.run_files import read_run
from ..reporting.tables import format_table
from .results import BOUND_SIGNS, PREDICTIONS
from .rows import check_threshold, describe_units, find_exact, find_units, label_array, read_bounds
from .scoring import LIMITS_NOTE, Compared

FloatArray = NDArray[np.float64]
COLLAPSED = (AlarmKind.CONSTANT, AlarmKind.FEW_VALUES, AlarmKind.BLOCK)


@dataclass(frozen=True)
class LabelledRows:
    """Rows with labels, and how scores of them are made and read.

    Attributes:
        table: map-style: sequences, `label`, `source_row`, and where there are any `bound` and the group.
        source: where they are from, as a reader knows it.
        threshold: label units; None leaves recall and its like out.
        groups: (n,), of each row, or None.
        units: what intervals resample; None: rows.
        notes: sentences about the rows.
    """

    table: Any
    source: str
    threshold: float | None
    groups: list[Any] | None
    units: ResamplingUnits | None
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> FloatArray:
        """(n,), label units; rounded to float32, as batches hold them and runs score them."""
        return label_array(self.table).astype(np.float32).astype(np.float64)


def load_labelled(args: DataArguments, settings: Any, scratch: Path) -> LabelledRows:
    """All rows of a labelled table; intervals resample rows unless `args.interval_by` names a column.

    Args:
        args: of the data.
        settings: with `binder_threshold`.
        scratch: where `--bad_rows drop` lists what it left out.

    Raises:
        ArgumentError, DataError: as `load_sequences`; no name; a stream.
    """
    if args.dataset_name is None:
        raise ArgumentError("Which rows? Give --dataset_name with labelled rows, or --test_of with a run's folder.")
    if args.streaming:
        raise ArgumentError("--streaming: scores are of rows that can be counted; leave it out.")
    table: Any = load_sequences(args, rejected=scratch / REJECTED_FILE, needs_labels=True).table
    report: dict[str, Any] = {"notes": [], "warnings": []}
    if settings.binder_threshold is not None:
        check_threshold(settings.binder_threshold, label_array(table), report)
    resampled = find_units(args, {"train": table, "test": table})
    groups = table[args.group_column][:] if args.group_column else None
    notes = [*report["warnings"], *report["notes"], *describe_units(resampled)]
    return LabelledRows(table, args.dataset_name, settings.binder_threshold, groups, resampled, notes)


def load_test(folder: str, args: DataArguments, settings: Any, explicit: Container[str]) -> LabelledRows:
    """The test rows of a run, as its `predictions.csv` lists them, with its threshold, groups and resampled units.

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
    if run.task != "affinity":
        raise ArgumentError(f"--test_of {folder}: give the output folder of a run of hf-ext train.")
    for name in ("sequence_columns", "missing_chains", "label_column", "group_column"):
        setattr(args, name, run.settings[name])
    for name in ("binder_threshold", "seed"):
        if name not in explicit:
            setattr(settings, name, run.settings[name])
    listed = run.predictions
    if listed is None or not listed.columns.keys() >= {*args.sequence_columns, SOURCE_ROW}:
        raise DataError(
            f"{run.folder / PREDICTIONS} does not list the sequences of the test rows: it is lost, or they were a "
            "stream. Name a file with --dataset_name."
        )
    columns: dict[str, Any] = {**listed.columns, "label": listed.labels}
    if "bound" in columns:
        columns["bound"] = [BOUND_SIGNS.index(sign) - 1 for sign in columns["bound"]]
    by = run.results["test"]["interval_by"]
    unit_column = SPLIT_CLUSTER if by == "cluster" and SPLIT_CLUSTER in columns else by
    resampled = ResamplingUnits.of(by, columns[unit_column]) if by else None
    return LabelledRows(
        Dataset.from_dict(columns),
        f"test rows of {run.folder}",
        settings.binder_threshold,
        columns[args.group_column] if args.group_column else None,
        resampled,
        describe_units(resampled),
    )


def compare(
    predictions: Mapping[str, FloatArray],
    rows: LabelledRows,
    *,
    metric: str = "rmse",
    requirements: Sequence[Requirement] = (),
    seed: int = 0,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Scores predictions as the report of a run does, and compares all with the first.

    Args:
        predictions: model -> (n,), label units.
        rows: that they are of.
        metric: of the verdicts.
        requirements: that every model but the first must meet; of one model, it.
        seed: of the bootstrap.
        notes: to be shown with those of the rows.

    Returns:
        JSON-able, by name of model in the order in which they were given. `scores`: model -> metric -> `Score`;
        `collapse`: model -> `collapse_report`, and `is_collapsed`; against the first, `verdicts`: model ->
        `Verdict.as_dict`, and `differences`: model -> metric -> `PairedComparison.as_dict`; `slices`: scores and
        differences of some of the rows; `requirements`: model -> whether it reaches them.

    Raises:
        ArgumentError: a metric that cannot be compared.

    Cost: per model 1,000 bootstrap resamples of its scores, and one comparison per metric, for all rows and each slice:
    per comparison 1.6 s for 26,000 rows.
    """
    first, *later = predictions
    labels, bounds = rows.labels, read_bounds(rows.table)
    compared = Compared(predictions, labels, rows.threshold, seed, rows.units)
    scores = compared.score(rows.groups)
    judged: dict[str, Any] = {"metric": metric, "bounds": bounds, "groups": rows.groups, **compared.options}
    has_limits = bounds is not None and bool(np.any(bounds))
    return {
        "task": "evaluation",
        "rows": rows.source,
        "num_rows": len(labels),
        **unit_facts(rows.units, len(labels)),
        "threshold": rows.threshold,
        "scores": scores,
        "collapse": {name: _collapse(predicted, labels) for name, predicted in predictions.items()},
        "verdicts": {
            name: judge_pair(labels, predictions[first], predictions[name], names=(first, name), **judged).as_dict()
            for name in later
        },
        "differences": _differences(compared, first, rows.groups),
        "slices": [
            {**compared.score_slice(one), "differences": _differences(compared.select(one), first)}
            for one in find_exact(bounds)
        ],
        "requirements": {name: check_requirements(requirements, scores[name]) for name in later or [first]},
        "notes": [*rows.notes, *([LIMITS_NOTE] if has_limits and later and metric == "rmse" else []), *notes],
    }


def describe(found: Mapping[str, Any]) -> str:
    """What `compare` found: verdicts, alarms, notes; a table of all rows and of each slice; requirements."""
    parts = [one["text"] for one in found["verdicts"].values()]
    parts += [f"ALARM, {name}: {alarm}" for name, one in found["collapse"].items() for alarm in one["alarms"]]
    parts += [*found["notes"], "", f"{found['num_rows']:,} rows, {found['rows']}:"]
    parts += [_format(found["scores"], found["differences"])]
    parts += ["* the interval of the difference excludes 0."] if found["differences"] else []
    for one in found["slices"]:
        title = f"{units.capitalize(one['name'])} ({one['num_rows']:,}):"
        parts += ["", title, _format(one["scores"], one["differences"])]
    for name, checked in found["requirements"].items():
        parts += ["", f"Required of {name}:", format_checked(checked)] if checked else []
    return "\n".join(parts)


def describe_unmet(found: Mapping[str, Any]) -> list[str]:
    """Requirements that some model does not meet."""
    return [f"{name}: {one}" for name, checked in found["requirements"].items() for one in describe_failed(checked)]


def _differences(compared: Compared, first: str, groups: Sequence[Any] | None = None) -> dict[str, dict[str, Any]]:
    """Of every other model against the first, in each metric that can be compared."""
    before, metrics = compared.predictors[first], score_names(compared.threshold, groups is not None)

    def differ(after: FloatArray, metric: str) -> dict[str, Any]:
        return compare_paired(compared.labels, before, after, metric, groups=groups, **compared.options).as_dict()

    later = {name: after for name, after in compared.predictors.items() if name != first}
    return {name: {metric: differ(after, metric) for metric in metrics} for name, after in later.items()}


def _collapse(predicted: FloatArray, labels: FloatArray) -> dict[str, Any]:
    report, alarms = examine_predictions(predicted, labels)
    is_collapsed = any(alarm.kind in COLLAPSED for alarm in alarms)
    texts = [f"collapsed: {alarm.text}" if alarm.kind in COLLAPSED else alarm.text for alarm in alarms]
    return {**report, "alarms": texts, "is_collapsed": is_collapsed}


def _format(scores: Mapping[str, Any], differences: Mapping[str, Any]) -> str:
    """A row per metric, a column per model and, beside each but the first, by how much it is better than that."""
    first = next(iter(scores))
    headers, rows = [""], [[units.metric_name(metric)] for metric in scores[first]]
    for name, found in scores.items():
        headers += [name, f"better than {first} by"] if name in differences else [name]
        for row, metric in zip(rows, found):
            row.append(units.score(found[metric]))
            if name in differences:
                row.append(_difference(differences[name].get(metric)))
    return format_table(rows, headers)


def _difference(compared: Mapping[str, Any] | None) -> str:
    if compared is None:
        return units.MISSING
    numbers = {"value": compared["improvement"], "low": compared["low"], "high": compared["high"]}
    shown = units.score({name: None if value is None else value + 0.0 for name, value in numbers.items()})  # never -0
    return f"{shown} *" if compared["is_better"] or compared["is_worse"] else shown
