"""`--distill_from MODEL`: a small student learns from the predictions of a large teacher beside the measured labels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.utils import broadcast_object_list
from datasets import Dataset, concatenate_datasets
from transformers import set_seed

from ..arguments.predicting_fields import PredictingArguments
from ..data.arguments import DataArguments
from ..data.columns import read_columns
from ..data.loading import load_sequences
from ..data.row_errors import REJECTED_FILE
from ..data.tokenization import INPUTS_NAME, SequenceCollator
from ..errors import ArgumentError
from ..evaluation import score_predictions
from ..evaluation.resampling import ResamplingUnits
from ..files import replacing
from ..models.encoders import fingerprint_weights
from ..tasks.running import check_inputs
from ..training_args import FastTrainingArguments
from .arguments import AffinityArguments
from .predictor import check_predictions, columns_of, find_model, load_model, predicting, training_arguments
from .scored_models import check_reads, describe_seen
from .scoring import SplitScores

# Of the arguments that say how rows are read, those that tell splits and labels, which further rows do not have.
NOT_OF_FURTHER_ROWS = (
    *("dataset_config_name", "dataset_revision", "censor_column", "group_column", "id_column", "split_column", "split"),
    *("cluster_column", "cluster_identity", "cluster_file", "interval_by"),
)
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
    folder: Path


def distill(
    model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, splits: Any
) -> Distillation:
    """Labels training rows with `alpha * teacher + (1 - alpha) * label`, and further rows with the teacher alone.

    With a squared loss this is the same gradient as `alpha` of the loss against the teacher and `1 - alpha` of the loss
    against the label. Validation and test keep their labels, and so does `splits`, to which baselines are fitted.
    The teacher's predictions are kept in the output folder; a resumed run reads them there.

    Args:
        model_args: `distill_from`, `distill_alpha` and `distill_rows`.
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
    folder = find_model(str(model_args.distill_from))
    collator = SequenceCollator.from_pretrained(folder)
    check_reads(f"The teacher {model_args.distill_from}", collator, data_args)
    train, test, alpha = splits["train"], splits["test"], model_args.distill_alpha
    further, num_dropped = _further_rows(model_args, data_args, args, splits)
    column = _predict_once(folder, collator, args, [train, test, further])
    labels = alpha * column[0].astype(np.float64) + (1 - alpha) * np.asarray(train["label"][:], np.float64)
    mixed = train.remove_columns("label").add_column("label", labels)
    set_seed(args.seed)  # whether the teacher ran or not, the student starts from the same numbers
    held_out = describe_seen("the teacher", folder, collator, test)
    if held_out:
        logger.warning("%s The student then knows them through it.", held_out)
    facts: dict[str, Any] = {
        "teacher": model_args.distill_from,
        "alpha": alpha,
        "num_labelled_rows": len(train),
        "num_further_rows": len(further),
        "num_further_rows_left_out": num_dropped,
        "held_out": held_out,
    }
    return Distillation(_append(mixed, further, column[2]), column[1], facts, folder)


def _further_rows(
    model_args: AffinityArguments, data_args: DataArguments, args: FastTrainingArguments, splits: Any
) -> tuple[Dataset, int]:
    """Distinct rows of `distill_rows` that no split holds, and how many were left out."""
    if model_args.distill_rows is None:
        return splits["train"].select([]), 0
    none_of_it = dict.fromkeys(NOT_OF_FURTHER_ROWS)
    source = dataclasses.replace(data_args, **none_of_it, dataset_name=model_args.distill_rows)  # type: ignore[arg-type]
    table: Any = load_sequences(source, rejected=Path(str(args.output_dir)) / REJECTED_FILE).table
    seen = {row for split in splits.values() for row in read_columns(split, data_args.sequence_columns)}
    first = {row: i for i, row in reversed([*enumerate(read_columns(table, data_args.sequence_columns))])}
    kept = sorted(i for row, i in first.items() if row not in seen)
    return table.select(kept), len(table) - len(kept)


def _append(train: Dataset, further: Dataset, labels: np.ndarray) -> Dataset:
    """Columns that further rows lack are null; no bound is known of them."""
    if not len(further):
        return train
    known = {name: further[name][:] for name in further.column_names}
    known |= {"label": labels.tolist(), "bound": [0] * len(further)}
    columns = {name: known.get(name, [None] * len(further)) for name in train.column_names}
    return concatenate_datasets([train, Dataset.from_dict(columns, features=train.features)])


def _predict_once(
    folder: Path, collator: SequenceCollator, args: FastTrainingArguments, tables: Sequence[Dataset]
) -> list[np.ndarray]:
    """The teacher's predictions for each table, (n,) float32 in label units, the same on all processes.

    They are kept in the output folder under a name made of the model and its rows, and read there.

    Raises:
        ArgumentError: the model cannot be loaded.
        DataError: rows that it cannot read, or predictions that are not finite.
    """
    columns = columns_of(collator)
    rows = [read_columns(table, columns) for table in tables]
    distinct = sorted({row for part in rows for row in part}, key=lambda row: (sum(map(len, row)), row))
    identity = [fingerprint_weights(str(folder), None), (folder / INPUTS_NAME).read_text(), distinct]
    path = Path(str(args.output_dir)) / f"teacher-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}.npy"
    found = [np.load(path) if args.process_index == 0 and path.is_file() else None]
    if args.world_size > 1:
        broadcast_object_list(found)
    predictions = found[0]
    if predictions is None:
        predictions = _predict(folder, collator, args, Dataset.from_dict(dict(zip(columns, map(list, zip(*distinct))))))
        if args.process_index == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as draft, draft.open("wb") as file:
                np.save(file, predictions)
    else:
        logger.info("The teacher's predictions are read from %s.", path)
    by_row = dict(zip(distinct, predictions))
    return [np.array([by_row[row] for row in part], np.float32) for part in rows]


def _predict(folder: Path, collator: SequenceCollator, args: FastTrainingArguments, table: Dataset) -> np.ndarray:
    check_inputs(collator, {"rows": table})
    names = ("use_cpu", "per_device_eval_batch_size", "embedding_cache_dir", "disable_tqdm")
    computing = PredictingArguments(**{name: getattr(args, name) for name in names})
    own = training_arguments(computing, seed=args.seed)
    with predicting(load_model(folder), collator, own) as trainer:
        return check_predictions(np.asarray(trainer.predict(table).predictions, np.float32).reshape(-1))


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
    num_parameters = {}
    for name, folder in (("student", student_folder), ("teacher", distillation.folder)):
        model = load_model(folder)
        model.attach_encoders()
        num_parameters[name] = sum(parameter.numel() for parameter in model.parameters())
    both = {"student": "model", "teacher": "teacher"}
    return {
        **distillation.facts,
        "num_parameters": num_parameters,
        "size_ratio": num_parameters["teacher"] / num_parameters["student"],
        "spearman": {name: test.scores[key]["spearman"]["value"] for name, key in both.items()},
    }


def format_distillation(facts: dict[str, Any]) -> str:
    """What `compare_with_teacher` found, in one sentence."""
    shown = {name: "undefined" if value is None else f"{value:.3f}" for name, value in facts["spearman"].items()}
    text = (
        f"Distilled from {facts['teacher']}: Spearman {shown['student']}, the teacher's {shown['teacher']} on the same "
        f"test rows; 1/{facts['size_ratio']:.3g} of its parameters. {facts['held_out']}"
    )
    return text.rstrip()
