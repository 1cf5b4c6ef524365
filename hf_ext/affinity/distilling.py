"""`--distill_from MODEL`: a small student learns from the predictions of a large teacher beside the measured labels."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from transformers import set_seed

from ..data.arguments import DataArguments
from ..data.collators import SequenceCollator
from ..data.columns import read_columns
from ..data.loading import load_sequences
from ..errors import ArgumentError
from ..evaluation import score_predictions
from ..evaluation.resampling import ResamplingUnits
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .predictor import columns_of, find_model, load_model
from .results import read_test_rows
from .scoring import SplitScores
from .teacher import Row, fingerprint_teacher, predict_once

logger = logging.getLogger(__name__)


@dataclass
class Distillation:
    """What a teacher gave.

    `train`: rows to train on, with mixed labels, further rows last. `test_predictions`: (n,) float32, label units, the
    teacher's for the test split. `facts`: for `all_results.json["distillation"]`. `folder`: the teacher's model.
    """

    train: Dataset
    test_predictions: np.ndarray
    facts: dict[str, Any]
    folder: str


def distill(
    model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, splits: Any
) -> Distillation:
    """Labels training rows with `alpha * teacher + (1 - alpha) * label`, and further rows with the teacher alone.

    With a squared loss this is the same gradient as `alpha` of the loss against the teacher and `1 - alpha` of the loss
    against the label. Validation and test keep their labels, and so does `splits`, to which baselines are fitted.
    The teacher's predictions are kept in the output folder; a resumed run reads them there.

    Args:
        model_args: `distill_from`, `distill_alpha`, `distill_rows` and `distill_columns`.
        data_args: how rows were read; further rows are read and checked the same way.
        args: seed, output folder, embedding cache and batch size of the teacher's one pass.
        splits: train, validation and test, in memory.

    Raises:
        ArgumentError: no trained model there, other columns than the teacher's, or streamed rows.
        DataError: rows that the teacher cannot read, or further rows that cannot be used.

    Cost: the teacher once over the distinct rows of train, test and the further rows.
    """
    if not hasattr(splits["train"], "__len__"):
        raise ArgumentError("--distill_from needs rows in memory, which the teacher reads once: drop --streaming.")
    folder = str(find_model(str(model_args.distill_from)))
    collator = SequenceCollator.from_pretrained(folder)
    columns = _match_columns(collator, model_args, data_args)
    further, num_dropped = _further_rows(model_args, data_args, args, splits)
    tables = [splits["train"], splits["test"], *([further] if further is not None else [])]
    rows = [read_columns(table, columns) for table in tables]
    distinct = sorted({row for part in rows for row in part}, key=lambda row: (sum(map(len, row)), row))
    teacher = fingerprint_teacher(folder)
    predictions = predict_once(folder, collator, args, distinct, teacher)
    by_row = dict(zip(distinct, predictions.tolist()))
    train = _mix(splits["train"], [by_row[row] for row in rows[0]], model_args.distill_alpha)
    if further is not None:
        train = _append(train, further, [by_row[row] for row in rows[2]])
    set_seed(args.seed)  # whether the teacher ran or not, the student starts from the same numbers
    facts: dict[str, Any] = {
        "teacher": model_args.distill_from,
        "teacher_fingerprint": teacher,
        "alpha": model_args.distill_alpha,
        "num_labelled_rows": len(splits["train"]),
        "num_further_rows": 0 if further is None else len(further),
        "num_further_rows_left_out": num_dropped,
        "held_out": _held_out(Path(folder), rows[1], columns_of(collator)),
    }
    logger.log(logging.INFO if facts["held_out"]["is_clean"] else logging.WARNING, facts["held_out"]["text"])
    return Distillation(train, np.array([by_row[row] for row in rows[1]], np.float32), facts, folder)


def compare_with_teacher(
    distillation: Distillation,
    test: SplitScores,
    test_rows: Any,
    student_folder: str,
    *,
    threshold: float | None,
    group_column: str | None = None,
    seed: int = 0,
    units: ResamplingUnits | None = None,
) -> dict[str, Any]:
    """Adds the row "teacher" to the test scores and says how much smaller the student is.

    Args:
        distillation: from `distill`.
        test: scores of the student on the test split, against measured labels; gets the teacher's.
        test_rows: the test split.
        student_folder: where the student was saved.
        threshold, group_column, seed, units: as `score_split` used them.

    Returns:
        The facts of `distill` with Spearman and parameters of both.

    Cost: 1,000 bootstrap resamples; both models are loaded with their encoders.
    """
    groups = [row[0] for row in read_columns(test_rows, [group_column])] if group_column else None
    scores = score_predictions(
        distillation.test_predictions, test.labels, groups=groups, threshold=threshold, seed=seed, units=units
    )
    test.scores["teacher"] = {name: score for name, score in scores.items() if name in test.scores["model"]}
    num_parameters = {
        "student": _count_parameters(student_folder),
        "teacher": _count_parameters(distillation.folder),
    }
    both = {"student": "model", "teacher": "teacher"}
    return {
        **distillation.facts,
        "num_parameters": num_parameters,
        "size_ratio": num_parameters["teacher"] / num_parameters["student"],
        "spearman": {name: test.scores[key]["spearman"]["value"] for name, key in both.items()},
    }


def _count_parameters(folder: str) -> int:
    """Of a model in a folder, encoders that it refers to included."""
    model = load_model(folder)
    model.attach_encoders()
    return sum(parameter.numel() for parameter in model.parameters())


def format_distillation(facts: dict[str, Any]) -> str:
    """What `compare_with_teacher` found, in one sentence."""
    shown = {name: "undefined" if value is None else f"{value:.3f}" for name, value in facts["spearman"].items()}
    return (
        f"Distilled from {facts['teacher']}: Spearman {shown['student']}, the teacher's {shown['teacher']} on the same "
        f"test rows; 1/{facts['size_ratio']:.3g} of its parameters. {facts['held_out']['text']}"
    )


def _match_columns(collator: SequenceCollator, model_args: AffinityArguments, data_args: DataArguments) -> list[str]:
    """This data's columns, in the order of the teacher's."""
    names, own = columns_of(collator), data_args.sequence_columns
    columns = model_args.distill_columns or names
    unknown = [name for name in columns if name not in own]
    if unknown or len(columns) != len(names):
        raise ArgumentError(
            f"The teacher {model_args.distill_from} reads {names}; the sequence columns here are {own}. Say which "
            f"stand for which with --distill_columns, {len(names)} of them in the teacher's order."
        )
    needed = [theirs for theirs, mine in zip(names, columns) if mine in data_args.missing_chains]
    unlearned = [name for name in needed if name not in collator.missing_chains]
    if unlearned:
        raise ArgumentError(
            f"--missing_chains: rows lack {' and '.join(unlearned)}, without which the teacher "
            f"{model_args.distill_from} cannot predict. Train it with --missing_chains, or leave these rows out."
        )
    return list(columns)


def _further_rows(
    model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, splits: Any
) -> tuple[Dataset | None, int]:
    """Distinct rows of `distill_rows` that no split holds, and how many were left out."""
    if model_args.distill_rows is None:
        return None, 0
    source = dataclasses.replace(
        data_args,
        dataset_name=model_args.distill_rows,
        dataset_config_name=None,
        dataset_revision=None,
        censor_column=None,
        group_column=None,
        id_column=None,
        split_column=None,
        split=None,
        cluster_column=None,
        cluster_identity=None,
        cluster_file=None,
        interval_by=None,
        filter=None,
    )
    table: Any = load_sequences(source, output_dir=args.output_dir).table
    seen = {row for split in splits.values() for row in read_columns(split, data_args.sequence_columns)}
    kept = []
    for i, row in enumerate(read_columns(table, data_args.sequence_columns)):
        if row not in seen:
            seen.add(row)
            kept.append(i)
    return table.select(kept), len(table) - len(kept)


def _mix(train: Dataset, teacher: Sequence[float], alpha: float) -> Dataset:
    labels = alpha * np.asarray(teacher, np.float64) + (1 - alpha) * np.asarray(train["label"][:], np.float64)
    return train.remove_columns("label").add_column("label", labels)


def _append(train: Dataset, further: Dataset, teacher: Sequence[float]) -> Dataset:
    """Columns that further rows lack are null; no bound is known of them."""
    known = {name: further[name][:] for name in further.column_names}
    known |= {"label": list(teacher), "bound": [0] * len(further)}
    columns = {name: known.get(name, [None] * len(further)) for name in train.column_names}
    return concatenate_datasets([train, Dataset.from_dict(columns, features=train.features)])


def _held_out(folder: Path, test: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """How many test rows the teacher did not train on, as far as its own `predictions.csv` says."""
    rows = read_test_rows(folder, names)
    if rows is None:
        text = "Whether the teacher was trained on these test rows is not known: its folder lists no test rows."
        return {"num_test_rows": len(test), "num_held_out": None, "is_clean": False, "text": text}
    num = sum(row in rows for row in test)
    text = f"The teacher's test split has {num:,} of these {len(test):,} test rows."
    if num < len(test):
        text += " It may have been trained on the others, and the student then knows their labels through it."
    return {"num_test_rows": len(test), "num_held_out": num, "is_clean": num == len(test), "text": text}
