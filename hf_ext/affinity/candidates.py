"""What is scored: a trained model in a folder or on the Hub, or predictions that some program left in a file."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..cli import recipe_command
from ..data.arguments import DataArguments
from ..data.collators import SequenceCollator
from ..data.columns import read_columns
from ..data.formats import file_format
from ..errors import ArgumentError
from ..running import check_inputs
from ..trainer import FastTrainer
from ..training_args import FastTrainingArguments
from .evaluated_rows import EvaluatedRows
from .given_predictions import read_predictions
from .predictor import check_predictions, columns_of, find_model, load_model
from .results import read_test_rows
from .scoring import RANKING_NOTE, predict_calibrated

OLD_FILES = (".pth", ".pt", ".bin", ".ckpt")


@dataclass(frozen=True)
class Candidate:
    """A model that is scored: its folder and collator; or predictions that were made, in a file.

    Attributes:
        name: in tables; no two candidates have the same.
        path: the folder, or the file.
        collator: None of a file.
    """

    name: str
    path: Path
    collator: SequenceCollator | None = None

    @property
    def columns(self) -> list[str]:
        """Sequence columns that it reads, each once; none of a file."""
        return [*dict.fromkeys(columns_of(self.collator))] if self.collator else []

    @property
    def is_scale_free(self) -> bool:
        """Whether it predicts an order only (a ranking loss)."""
        return (
            self.collator is not None and json.loads((self.path / "config.json").read_text()).get("loss") == "ranking"
        )

    def predict(
        self, rows: EvaluatedRows, data_args: DataArguments, args: FastTrainingArguments, column: str
    ) -> NDArray[np.float64]:
        """Its predictions for the rows: (n,), label units; of a model as its own run scored them.

        Args:
            rows: to be predicted.
            data_args: as the rows were read.
            args: of prediction: speed-ups, batch size, precision, embedding cache.
            column: of the predictions in a file.

        Raises:
            ArgumentError: the model cannot be loaded.
            DataError: rows that it cannot read, or other ones than a file's; predictions that are not finite.

        Cost: one pass over the rows.
        """
        if self.collator is None:
            columns, label = data_args.sequence_columns, data_args.label_column
            return read_predictions(self.path, rows.table, columns, label, policy=data_args, column=column)
        check_inputs(self.collator, {"rows": rows.table}, rows.source)
        with tempfile.TemporaryDirectory() as scratch:
            own = copy.copy(args)
            own.output_dir = scratch
            trainer = FastTrainer(load_model(self.path), own, data_collator=self.collator)
            _, predictions, _ = predict_calibrated(trainer, rows.table)
            trainer.close()
        return check_predictions(predictions)

    def notes(self, rows: EvaluatedRows) -> list[str]:
        """Sentences on what its scores on these rows do not say."""
        notes = [f"{self.name}: {RANKING_NOTE}"] if self.is_scale_free else []
        own = read_test_rows(self.path, self.columns) if self.collator else None
        if own is None:
            return [*notes, f"Whether {self.name} was trained on these rows is not known."]
        num, num_rows = sum(row in own for row in read_columns(rows.table, self.columns)), len(rows.table)
        if num < num_rows:
            notes.append(
                f"{self.name}'s own test split has {num:,} of these {num_rows:,} rows: it may have been trained on the "
                "others, and then knows their labels."
            )
        return notes


def find_candidates(given: Sequence[str], too_long: str | None = None) -> list[Candidate]:
    """What the user named, each found fit to be loaded.

    Args:
        given: model folders, Hub ids, files with predictions.
        too_long: what models do with long sequences; None: each as it was trained.

    Raises:
        ArgumentError: one is neither, a `.pth` that was not converted, or there twice.
    """
    names = [Path(one).name for one in given]
    if len(set(names)) < len(names):
        names = [*given]
    if len(set(names)) < len(names):
        raise ArgumentError(f"--models {' '.join(given)}: one is named twice.")
    return [_find(name, one, too_long) for name, one in zip(names, given)]


def _find(name: str, given: str, too_long: str | None) -> Candidate:
    path = Path(given).expanduser()
    if path.suffix.lower() in OLD_FILES:
        raise ArgumentError(
            f"--models {given}: make it a model folder first: {recipe_command('resume_check')} --convert {given} "
            "--model FOLDER --output_dir NEW, where FOLDER has the config.json of such a model."
        )
    if file_format(path) and not path.is_dir():
        if not path.is_file():
            raise ArgumentError(f"--models {given}: there is no such file.")
        return Candidate(name, path)
    folder = find_model(given)
    collator = SequenceCollator.from_pretrained(folder)
    if too_long is not None:
        collator.too_long = too_long
    return Candidate(name, folder, collator)


def settle_columns(candidates: Sequence[Candidate], args: DataArguments, is_given: bool) -> None:
    """Makes `args` read the sequence columns that the models read, and lets rows lack those that no model needs.

    Args:
        candidates: of files alone, `args` stay as they are.
        args: of the data.
        is_given: whether the columns are settled, by a run or the user; then models must read no others.

    Raises:
        ArgumentError: a model reads other columns, or needs a chain that rows may lack.
    """
    models = [one for one in candidates if one.collator is not None]
    if not is_given and models:
        args.sequence_columns = [*dict.fromkeys(column for one in models for column in one.columns)]
        args.missing_chains = [
            column
            for column in args.sequence_columns
            if all(column in one.collator.missing_chains for one in models if one.collator and column in one.columns)
        ]
    for one in models:
        others = [column for column in one.columns if column not in args.sequence_columns]
        if others:
            raise ArgumentError(
                f"{one.name} reads {', '.join(one.columns)}; the rows have the sequence columns "
                f"{', '.join(args.sequence_columns)}."
            )
        assert one.collator is not None
        needed = [c for c in one.columns if c in args.missing_chains and c not in one.collator.missing_chains]
        if needed:
            raise ArgumentError(f"{one.name} has not learned to do without {', '.join(needed)}, which rows may lack.")
