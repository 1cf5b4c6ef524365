"""Scores models, and CSVs of predictions, on labelled rows: what `hf-ext evaluate` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..arguments import PredictingArguments
from ..baselines import columns_of
from ..checkpoints import find_model, make_folder
from ..data import DataArguments, LabelledArguments, SequenceCollator, TooLong, check_inputs
from ..errors import ArgumentError
from ..evaluation import metrics_of, parse_requirements, raise_failed, unpack_labelled
from ..files import parse_json
from ..labels import LABEL, LabelKind
from ..property import (
    RANKING_NOTE,
    EvaluateArguments,
    check_predictions,
    load_model,
    predicting,
    read_predictions,
    scored_names,
    training_arguments,
)
from ..reporting import RunRecord, describe_unread, from_json, write_json
from ..text import LOGGER, start_run_log
from ..training_args import FastTrainingArguments
from .comparing import LabelledRows, compare, describe, describe_unmet, load_labelled, load_test


@dataclass(frozen=True)
class ScoredModel:
    """A model that is scored.

    Attributes:
        name: in tables; no two have the same.
        path: its folder, or the CSV of its predictions.
        collator: None of a CSV.
    """

    name: str
    path: Path
    collator: SequenceCollator | None = None

    @property
    def is_scale_free(self) -> bool:
        """Whether it predicts an order only (a ranking loss)."""
        return self.collator is not None and _read_json(self.path / "config.json").get("loss") == "ranking"

    @property
    def kind(self) -> LabelKind | None:
        """What it predicts; None of a CSV, which is read as the labels are."""
        return None if self.collator is None else self.collator.kind

    def predict(
        self, rows: Any, source: str, data_args: DataArguments, args: FastTrainingArguments, kind: LabelKind
    ) -> NDArray[Any]:
        """Predicts for the rows, (n, ...), as scores take it; of a model as its own run scored them.

        Args:
            rows: map-style, with labels and `source_row`; `source` says where they are from, for messages.
            data_args: as the rows were read.
            args: of prediction: speed-ups, batch size, precision, embedding cache.
            kind: of the labels.

        Raises:
            ArgumentError: the model cannot be loaded, or reads other columns.
            DataError: rows that it cannot read, or other ones than a CSV's; predictions that are not finite.

        Cost: one pass over the rows.
        """
        if self.collator is None:
            return read_predictions(self.path, rows, data_args, kind)
        columns = columns_of(self.collator)
        if any(column not in data_args.sequence_columns for column in columns):
            raise ArgumentError(
                f"{self.name} reads {', '.join(columns)}; the rows have the sequence columns "
                f"{', '.join(data_args.sequence_columns)}. Give columns of the same sequences the same names."
            )
        for line in describe_unread(check_inputs(self.collator, {"rows": rows}, source)):
            LOGGER.info("%s: %s", self.name, line)
        with predicting(load_model(self.path), self.collator, args) as trainer:
            output = trainer.predict(rows)
        return kind.to_predictions(check_predictions(unpack_labelled(output, kind)[0]))


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
    models = find_models(own.models, labelled.too_long if "too_long" in explicit else None, labelled.max_residues)
    if own.test_of is None:
        take_from_training(models, own, data_args, explicit)
        rows = load_labelled(data_args, own.binder_threshold, find_common_kind(models))
    else:
        names = {one.name for one in dataclasses.fields(LabelledArguments)} - {"too_long"}
        if given := sorted(names & {*explicit}):
            raise ArgumentError(f"--test_of has rows and columns of its own: leave out --{', --'.join(given)}.")
        rows = load_test(own.test_of, data_args, own, explicit)
    kind = rows.kind
    find_common_kind([*models, rows])
    requirements = parse_requirements(own.require, scored_names(kind, rows.threshold, rows.groups is not None))
    decides = "spearman" if any(one.is_scale_free for one in models) else metrics_of(kind).decides
    metric = own.metric or decides
    if metric not in (allowed := scored_names(kind, rows.threshold, has_groups=False)):
        raise ArgumentError(f"--metric {metric}: allowed here are {', '.join(allowed)}.")
    args = training_arguments(computing, explicit, seed=own.seed)
    predictions = {one.name: one.predict(rows.table, rows.source, data_args, args, kind) for one in models}
    if kind.per_residue:
        predictions, rows = cut_behind(predictions, rows)
    found = compare(
        predictions,
        rows,
        metric=metric,
        requirements=requirements,
        seed=own.seed,
    )
    found["notes"] += [f"{one.name}: {RANKING_NOTE}" for one in models if one.is_scale_free]
    log.info("\n%s\n", describe(found))
    result = {"models": {one.name: str(one.path) for one in models}, "seed": own.seed, **found}
    if output:
        write_json(output, result)
        log.info("All numbers are in %s.", output)
    raise_failed(describe_unmet(found), f"All scores are in {output}." if output else "All scores stand above.")
    return result


def cut_behind(predictions: dict[str, Any], rows: LabelledRows) -> tuple[dict[str, Any], LabelledRows]:
    """Cuts off predictions and labels of residues behind what some model has read."""
    longest = min(max(map(len, one)) for one in predictions.values())
    table = rows.table
    labels = [values[:longest] for values in table[LABEL][:]]
    rows = dataclasses.replace(rows, table=table.remove_columns(LABEL).add_column(LABEL, labels))
    for name, one in predictions.items():
        predictions[name] = [row[:longest] for row in one] if isinstance(one, list) else one[:, :longest]
    return predictions, rows


def find_models(
    given: Sequence[str], too_long: TooLong | None = None, max_residues: int | None = None
) -> list[ScoredModel]:
    """Finds what the user named: model folders, Hub ids, CSVs of predictions.

    Args:
        given: their names.
        too_long, max_residues: what models do with long sequences; None: each as it was trained.

    Raises:
        ArgumentError: one is neither, or there twice.
    """
    names = [Path(one).name for one in given]
    names = [*given] if len({*names}) < len(names) else names
    if len({*names}) < len(names):
        raise ArgumentError(f"--models {' '.join(given)}: one is named twice.")
    models = []
    for name, one in zip(names, given):
        path = Path(one).expanduser()
        if path.suffix == ".csv" and not path.is_dir():
            models.append(ScoredModel(name, path))
        else:
            folder = find_model(one)
            collator = SequenceCollator.from_pretrained(folder)
            collator.resolve_long(too_long, max_residues)
            models.append(ScoredModel(name, folder, collator))
    return models


def find_common_kind(models: Sequence[Any]) -> LabelKind | None:
    """Finds what all models predict, that name it in `kind`; None where none does.

    Raises:
        ArgumentError: two predict something else, or other names.
    """
    kinds = [one.kind for one in models if one.kind is not None]
    for one in kinds[1:]:
        if not one.matches(kinds[0]):
            raise ArgumentError(
                f"One of them predicts {kinds[0].describe()}, another {one.describe()}: compare models of the "
                "same labels."
            )
    return kinds[0] if kinds else None


def take_from_training(
    models: Sequence[ScoredModel], own: EvaluateArguments, data_args: DataArguments, explicit: Collection[str]
) -> None:
    """Sets what the user did not: sequence columns as the models read them; label column and threshold as the first
    model with a record of its run was trained by."""
    collators = [one.collator for one in models if one.collator is not None]
    if collators and "sequence_columns" not in explicit:
        data_args.sequence_columns = [*dict.fromkeys(column for one in collators for column in columns_of(one))]
        needed = {column for one in collators for column in columns_of(one) if column not in one.missing_chains}
        data_args.missing_chains = [column for column in data_args.sequence_columns if column not in needed]
    files = (one.path / "all_results.json" for one in models)
    settings = next(filter(None, (from_json(RunRecord, _read_json(file), file).settings for file in files)), {})
    taken = []
    for name, owner in (("label_column", data_args), ("binder_threshold", own)):
        value = settings.get(name)
        if name not in explicit and value not in (None, getattr(owner, name)):
            setattr(owner, name, value)
            taken.append(f"--{name} {' '.join(value) if isinstance(value, list) else value}")
    if taken:
        LOGGER.info("As the model was trained: %s.", ", ".join(taken))


def find_output(name: str | None) -> Path | None:
    """Finds the JSON to write; refuses a file that this command did not write."""
    if name is None:
        return None
    path = Path(name).expanduser()
    if path.exists() and _read_json(path).get("task") != "evaluation":
        raise ArgumentError(f"--output {name!r} is there and was not written by hf-ext evaluate. Name another file.")
    make_folder(path.parent, "--output")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    """Reads a file; nothing where it is no JSON object."""
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
