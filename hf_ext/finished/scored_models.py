"""What `hf-ext evaluate` scores: models, and CSVs of predictions, and what they predict for labelled rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..baselines import columns_of
from ..checkpoints import find_members, make_folder
from ..data import DataArguments, SequenceCollator, TooLong, check_columns, check_inputs, column_names
from ..errors import ArgumentError
from ..evaluation import unpack_labelled
from ..labels import LABEL, Array, LabelKind, average
from ..property import (
    EvaluateArguments,
    bind_vectors,
    check_predictions,
    load_model,
    predicting,
    read_predictions,
)
from ..reporting import RunRecord, describe_inputs, from_json, read_object
from ..text import LOGGER
from ..training_args import FastTrainingArguments
from .comparing import LabelledRows


@dataclass(frozen=True)
class ScoredModel:
    """A model that is scored.

    Attributes:
        name: in tables; no two have the same.
        path: its folder, or the CSV of its predictions.
        collator: None of a CSV.
        members: folders of the models whose mean predicts.
    """

    name: str
    path: Path
    collator: SequenceCollator | None = None
    members: Sequence[Path] = ()

    @property
    def is_scale_free(self) -> bool:
        """Whether it predicts an order only (a ranking loss)."""
        return any(read_object(one / "config.json").get("loss") == "ranking" for one in self.members)

    @property
    def kind(self) -> LabelKind | None:
        """What it predicts; None of a CSV, which is read as the labels are."""
        return None if self.collator is None else self.collator.kind

    def predict(
        self,
        rows: Any,
        source: str,
        data_args: DataArguments,
        args: FastTrainingArguments,
        kind: LabelKind,
        embeddings: str | None = None,
    ) -> Array:
        """Predicts for the rows, (n, ...), as scores take it; of a model as its own run scored them.

        Args:
            rows: map-style, with labels and `source_row`; `source` says where they are from, for messages.
            data_args: as the rows were read.
            args: of prediction: speed-ups, batch size, precision, embedding cache.
            kind: of the labels.
            embeddings: file with vectors, for a model that has no encoder.

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
        check_columns(column_names(rows), self.collator.numbers.columns, source, f" {self.name} reads it.")
        for line in describe_inputs(check_inputs(self.collator, {"rows": rows}, source)):
            LOGGER.info("%s: %s", self.name, line)
        found = []
        for folder in self.members:
            model = load_model(folder)
            bind_vectors(model, embeddings if model.config.reads_vectors else None, {"rows": rows}, data_args)
            with predicting(model, self.collator.for_member(folder), args) as trainer:
                outputs = check_predictions(unpack_labelled(trainer.predict(rows), kind)[0])
            found.append(kind.to_predictions(outputs))
        return average(found)


def cut_behind(predictions: dict[str, Any], rows: LabelledRows) -> tuple[dict[str, Any], LabelledRows]:
    """Cuts off predictions and labels of residues behind what some model has read."""
    longest = min(max(map(len, one)) for one in predictions.values())
    table = rows.table
    labels = [values[:longest] for values in table[LABEL][:]]
    rows = dataclasses.replace(rows, table=table.remove_columns(LABEL).add_column(LABEL, labels))
    for name, one in predictions.items():
        predictions[name] = [row[:longest] for row in one] if isinstance(one, list) else one[:, :longest]
    return predictions, rows


def find_models(given: Sequence[str], too_long: TooLong | None, max_residues: int | None) -> list[ScoredModel]:
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
            members = find_members(one)
            collator = SequenceCollator.from_pretrained(members[0])
            collator.resolve_long(too_long, max_residues)
            whole = path if path.is_dir() else members[0]
            models.append(ScoredModel(name, whole, collator, members))
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
    data_args.numeric_columns = [*dict.fromkeys(name for one in collators for name in one.numbers.numeric)]
    data_args.category_columns = [*dict.fromkeys(name for one in collators for name in one.numbers.categories)]
    files = (one.path / "all_results.json" for one in models)
    settings = next(filter(None, (from_json(RunRecord, read_object(file), file).settings for file in files)), {})
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
    if path.exists() and (path.is_dir() or b'"task": "evaluation"' not in path.read_bytes()):
        raise ArgumentError(f"--output {name!r} is there and was not written by hf-ext evaluate. Name another file.")
    make_folder(path.parent, "--output")
    return path
