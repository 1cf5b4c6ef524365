"""Scores models and files of predictions on labelled rows: what `hf-ext evaluate` does."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ..arguments.training_fields import PredictingArguments
from ..checkpoints.run_lock import make_folder
from ..data.arguments import DataArguments, LabelledArguments
from ..data.reading import peek_columns
from ..errors import ArgumentError
from ..evaluation.metrics import GROUP_METRIC, score_names
from ..evaluation.requirements import parse_requirements, raise_failed
from ..evaluation.scores import PAIRED_METRICS
from ..reporting.run_log import LOGGER, start_run_log
from ..reporting.run_record import write_json
from .arguments import EvaluateArguments
from .comparing import LabelledRows, compare, describe, describe_unmet, load_labelled, load_test
from .predictor import training_arguments
from .scored_models import ScoredModel, check_reads, find_models, read_all_columns


def evaluate_models(
    own: EvaluateArguments, labelled: LabelledArguments, computing: PredictingArguments, explicit: Collection[str]
) -> dict[str, Any]:
    """Scores all models on the same rows; returns what the JSON holds.

    Args:
        own, labelled, computing: the command line.
        explicit: names of the arguments that the user set.

    Raises:
        ArgumentError, DataError: what cannot be scored.
        RequirementsFailed: a score is not as required; everything was said and written before.
    """
    data_args = DataArguments(**vars(labelled))
    output = find_output(own.output)
    log = start_run_log(None)
    models = find_models(own.models, labelled.too_long if "too_long" in explicit else None)
    if own.test_of is None:
        take_training_columns(models, own, data_args, explicit)
    known = score_names(own.binder_threshold, data_args.group_column is not None or own.test_of is not None)
    parse_requirements(own.require, known)  # before rows are read, which may leave the threshold out
    rows = load_rows(own, data_args, models, explicit)
    for one in models:
        if one.collator is not None:
            check_reads(one.name, one.collator, data_args)
    known = score_names(rows.threshold, rows.groups is not None)
    requirements = parse_requirements(own.require, known)
    metric = settle_metric(own.metric, models, known)
    args = training_arguments(computing, explicit, seed=own.seed)
    found = compare(
        {one.name: one.predict(rows.table, rows.source, data_args, args, own.prediction_column) for one in models},
        rows,
        metric=metric,
        requirements=requirements,
        seed=own.seed,
        notes=[note for one in models for note in one.notes(rows.table)],
    )
    log.info("\n%s\n", describe(found))
    result = {"models": {one.name: str(one.path) for one in models}, "seed": own.seed, **found}
    if output:
        write_json(output, result)
        log.info("All numbers are in %s.", output)
    raise_failed(describe_unmet(found), f"All scores are in {output}." if output else "All scores stand above.")
    return result


def take_training_columns(
    models: Sequence[ScoredModel], own: EvaluateArguments, data_args: DataArguments, explicit: Collection[str]
) -> None:
    """Takes label column, group column and threshold from the first model whose folder has a run's record, and says so.

    What the user set stays, and a column that the rows lack is not taken.
    """
    settings = next(filter(None, (one.settings for one in models)), None)
    if settings is None:
        return
    files = [set(names) for names in peek_columns(data_args.dataset_name).values()] if data_args.dataset_name else []
    taken = []
    for name, owner in (("label_column", data_args), ("group_column", data_args), ("binder_threshold", own)):
        value = settings.get(name)
        is_there = name == "binder_threshold" or all(value in names for names in files)
        if name not in explicit and value is not None and is_there and value != getattr(owner, name):
            setattr(owner, name, value)
            taken.append(f"--{name} {value}")
    if taken:
        LOGGER.info("As the model was trained: %s.", ", ".join(taken))


def find_output(name: str | None) -> Path | None:
    """The JSON to write; refused where there is one of somebody else's."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.exists() and not is_evaluation(path):
        raise ArgumentError(f"--output {name!r} is there and was not written by hf-ext evaluate. Name another file.")
    make_folder(path.parent, "--output")
    return path


def is_evaluation(path: Path) -> bool:
    """Whether a file is what this command writes."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["task"] == "evaluation"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def load_rows(
    own: EvaluateArguments, data_args: DataArguments, models: Sequence[ScoredModel], explicit: Collection[str]
) -> LabelledRows:
    """The rows to score: of a run, or of a table; what `--bad_rows drop` leaves out is counted in the log."""
    if own.test_of:
        names = {one.name for one in dataclasses.fields(LabelledArguments)} - {"too_long"}
        if given := sorted(names & {*explicit}):
            raise ArgumentError(f"--test_of has rows and columns of its own: leave out --{', --'.join(given)}.")
        return load_test(own.test_of, data_args, own, explicit)
    if "sequence_columns" not in explicit:
        read_all_columns(models, data_args)
    with tempfile.TemporaryDirectory() as scratch:
        return load_labelled(data_args, own, Path(scratch))


def settle_metric(asked: str | None, models: Sequence[ScoredModel], known: Sequence[str]) -> str:
    """What verdicts compare in."""
    metric = asked or ("spearman" if any(one.is_scale_free for one in models) else "rmse")
    allowed = [name for name in known if name in (*PAIRED_METRICS, GROUP_METRIC)]
    if metric not in allowed:
        raise ArgumentError(f"--metric {metric}: allowed here are {', '.join(allowed)}.")
    return metric
