"""Models that are scored on the same rows: folders, Hub ids, files; each becomes a column of predictions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.arguments import DataArguments
from ..data.columns import read_columns
from ..data.formats import file_format
from ..data.tokenization import SequenceCollator
from ..errors import ArgumentError
from ..reporting.run_files import read_test_predictions
from ..tasks.running import check_inputs
from ..training_args import FastTrainingArguments
from .prediction_file import read_predictions
from .predictor import check_predictions, columns_of, find_model, load_model, predicting
from .results import PREDICTIONS
from .scoring import RANKING_NOTE, predict_calibrated

FloatArray = NDArray[np.float64]
OLD_FILES = (".pth", ".pt", ".bin", ".ckpt")


@dataclass(frozen=True)
class ScoredModel:
    """A model that is scored: its folder and collator; or predictions that were made, in a file.

    Attributes:
        name: in tables; no two have the same.
        path: the folder, or the file.
        collator: None of a file.
    """

    name: str
    path: Path
    collator: SequenceCollator | None = None

    @property
    def is_scale_free(self) -> bool:
        """Whether it predicts an order only (a ranking loss)."""
        return (
            self.collator is not None and json.loads((self.path / "config.json").read_text()).get("loss") == "ranking"
        )

    @property
    def settings(self) -> dict[str, Any] | None:
        """The arguments that it was trained with; None where its folder has no record of its run."""
        try:
            record = json.loads((self.path / "all_results.json").read_text(encoding="utf-8"))
            return dict(record["settings"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def predict(
        self, rows: Any, source: str, data_args: DataArguments, args: FastTrainingArguments, column: str
    ) -> FloatArray:
        """Its predictions for the rows: (n,), label units; of a model as its own run scored them.

        Args:
            rows: map-style, with labels and `source_row`; `source` says where they are from, for messages.
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
            return read_predictions(self.path, rows, columns, label, policy=data_args, column=column)
        check_inputs(self.collator, {"rows": rows}, source)
        with predicting(load_model(self.path), self.collator, args) as trainer:
            return check_predictions(predict_calibrated(trainer, rows)[1])

    def notes(self, rows: Any) -> list[str]:
        """Sentences on what its scores on these rows do not say."""
        if self.collator is None:
            return [f"Whether {self.name} was trained on these rows is not known."]
        ranking = f"{self.name}: {RANKING_NOTE}" if self.is_scale_free else ""
        return [note for note in (ranking, describe_seen(self.name, self.path, self.collator, rows)) if note]


def find_models(given: Sequence[str], too_long: str | None = None) -> list[ScoredModel]:
    """What the user named: model folders, Hub ids, files with predictions.

    Args:
        given: their names.
        too_long: what models do with long sequences; None: each as it was trained.

    Raises:
        ArgumentError: one is neither, a `.pth` that was not converted, or there twice.
    """
    names = [Path(one).name for one in given]
    names = [*given] if len({*names}) < len(names) else names
    if len({*names}) < len(names):
        raise ArgumentError(f"--models {' '.join(given)}: one is named twice.")
    return [_find(name, one, too_long) for name, one in zip(names, given)]


def _find(name: str, given: str, too_long: str | None) -> ScoredModel:
    path = Path(given).expanduser()
    if path.suffix.lower() in OLD_FILES:
        raise ArgumentError(
            f"--models {given}: make it a model folder first: hf-ext resume --convert {given} "
            "--model FOLDER --output_dir NEW, where FOLDER has the config.json of such a model."
        )
    if file_format(path) and not path.is_dir():
        if not path.is_file():
            raise ArgumentError(f"--models {given}: there is no such file.")
        return ScoredModel(name, path)
    folder = find_model(given)
    collator = SequenceCollator.from_pretrained(folder)
    collator.too_long = too_long or collator.too_long
    return ScoredModel(name, folder, collator)


def read_all_columns(models: Sequence[ScoredModel], args: DataArguments) -> None:
    """Makes `args` read the columns that the models read, where rows may lack the chains that no model needs."""
    collators = [one.collator for one in models if one.collator is not None]
    if collators:
        args.sequence_columns = [*dict.fromkeys(column for one in collators for column in columns_of(one))]
        needed = {column for one in collators for column in columns_of(one) if column not in one.missing_chains}
        args.missing_chains = [column for column in args.sequence_columns if column not in needed]


def check_reads(name: str, collator: SequenceCollator, args: DataArguments) -> None:
    """Raises ArgumentError where a model reads other columns than `args` do, or needs a chain that rows may lack."""
    columns = [*dict.fromkeys(columns_of(collator))]
    if any(column not in args.sequence_columns for column in columns):
        raise ArgumentError(
            f"{name} reads {', '.join(columns)}; the rows have the sequence columns "
            f"{', '.join(args.sequence_columns)}. Give columns of the same sequences the same names."
        )
    needed = [one for one in columns if one in args.missing_chains and one not in collator.missing_chains]
    if needed:
        raise ArgumentError(
            f"{name} has not learned to do without {' and '.join(needed)}, which rows may lack (--missing_chains). "
            "Train it with --missing_chains, or leave these rows out."
        )


def describe_seen(name: str, folder: Path, collator: SequenceCollator, rows: Any) -> str:
    """How many of these rows a model may have been trained on, by the test rows that its run listed; "" for none."""
    columns, path = [*dict.fromkeys(columns_of(collator))], folder / PREDICTIONS
    listed = read_test_predictions(path) if path.is_file() else None
    if listed is None or not listed.columns.keys() >= {*columns}:
        return f"Whether {name} was trained on these rows is not known."
    own = {*zip(*(listed.columns[column] for column in columns))}
    num = sum(row in own for row in read_columns(rows, columns))
    if num == len(rows):
        return ""
    return (
        f"{num:,} of these {len(rows):,} rows are in the test split of {name}. If others were in its training table, "
        "its score here is too good."
    )
