"""`--distill_from`: a student learns what a teacher predicts, of the training rows and of rows without labels.

The teacher sees them once, before training; the loss is that of `hf_ext.models.AffinityModel.forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import Hasher

from ..checkpoints import find_model
from ..data import (
    REJECTED_FILE,
    TEACHER,
    DataArguments,
    LoadedData,
    SequenceCollator,
    kept_random_states,
    leak_report,
    load_sequences,
    read_columns,
)
from ..errors import ArgumentError, DataError
from ..files import Json, replacing, write_cell
from ..labels import UNKNOWN, LabelKind
from ..models import ModelArguments, fingerprint_weights
from ..processes import do_on_main
from ..reporting import read_object, read_run
from ..tasks import Run
from ..text import units
from .predictor import AffinityPredictor
from .scoring import Compared, SplitScores


def check_teacher(args: ModelArguments, data_args: DataArguments, loaded: LoadedData) -> list[str]:
    """Returns warnings about the teacher, if one is asked for.

    Raises:
        ArgumentError: there is no model; it predicts something else than the student; or labels, rows, a loss or a
            trainer for which there is no teacher.

    Cost: reads small files of its folder.
    """
    if args.distill_from is None:
        return []
    kind = loaded.kind
    told = f"--distill_from {args.distill_from}"
    folder = find_model(args.distill_from)
    trained = read_object(folder / "all_results.json").get("settings", {})
    labels = trained.get("label_column", data_args.label_column)
    taught = SequenceCollator.from_pretrained(folder).kind
    is_same = type(taught) is type(kind) and ({*taught.names} == {*kind.names} or kind.matches(taught))
    if not (kind.takes_teacher and is_same and {*labels} == {*data_args.label_column}):
        raise ArgumentError(
            f"{told}: both must predict the same numbers or classes of rows. There it is {taught.describe()}, from "
            f"{labels}, here {kind.describe()}, from {data_args.label_column}."
        )
    if data_args.streaming or args.stock_trainer or "ranking" in (args.loss, trained.get("loss")):
        raise ArgumentError(f"{told} goes without --streaming, --stock_trainer and --loss ranking, its own too.")
    rows = read_columns(loaded.splits["test"], data_args.sequence_columns)
    test = {tuple(map(write_cell, row)) for row in rows}
    num_seen = len(test - _held_out(folder, data_args.sequence_columns))
    if not num_seen:
        return []
    return [
        f"{told}: {num_seen} of {len(test)} distinct test rows are not in the list of test rows that it has of its own "
        "training (predictions.csv). What it has seen of them, the student knows through it: train it with the same "
        "rows and split."
    ]


def _held_out(folder: Path, columns: Sequence[str]) -> set[tuple[str, ...]]:
    """Reads the sequences of the test rows of a run; none where its folder does not list them."""
    try:
        listed = read_run(folder).predictions
    except DataError:
        return set()
    if listed is None or not listed.columns.keys() >= {*columns}:
        return set()
    return {*zip(*([write_cell(cell) for cell in listed.columns[name]] for name in columns))}


def teach(run: Run, loaded: LoadedData) -> Dataset:
    """Returns what a run trains on: of a student training rows, then those of `--unlabelled`, with a column `TEACHER`.

    Leaks in the report are those of all of them.

    Raises:
        ArgumentError, DataError: as `check_teacher`; rows that cannot be used, or that the teacher cannot read.

    Cost: the teacher once over the distinct rows, on the main process.
    """
    kind = loaded.kind
    loaded.report["warnings"] += check_teacher(run.model_args, run.data_args, loaded)
    rows = loaded.splits["train"]
    if run.model_args.distill_from is None:
        return rows
    if name := run.model_args.unlabelled:
        names = ("sequence_columns", "missing_chains", "bad_rows", "numeric_columns", "category_columns")
        given = {one: getattr(run.data_args, one) for one in names}
        rejected = run.folder / f"unlabelled.{REJECTED_FILE}"
        further: Any = load_sequences(DataArguments(name, **given), rejected=rejected).table
        unknown = np.full(kind.label_shape, UNKNOWN if kind.dtype is np.int64 else np.nan).tolist()
        rows = concatenate_datasets([rows, further.add_column("label", [unknown] * len(further))])
        columns = run.data_args.sequence_columns, run.data_args.number_columns
        loaded.report["leaks"] = leak_report({**loaded.splits, "train": rows}, *columns)
        loaded.report["notes"].append(f"{len(further):,} rows of {name} are trained on too, without labels")
    return rows.add_column(TEACHER, predict_taught(run, kind, rows).tolist())


def predict_taught(run: Run, kind: LabelKind, rows: Dataset) -> np.ndarray:
    """Returns the teacher's logits for rows, (n,) or (n, k), float32, in the order of `kind.names`; on all processes.

    They are kept in the output folder, by content, so that a run has the same ones wherever it goes on.
    """
    columns = [*run.data_args.sequence_columns, *run.data_args.number_columns]
    return do_on_main(run.args, partial(_predict, run, kind, rows.select_columns(columns)))


def _predict(run: Run, kind: LabelKind, rows: Dataset) -> np.ndarray:
    folder = find_model(run.model_args.distill_from)
    if folder.resolve() == run.folder.resolve():
        raise ArgumentError(f"--distill_from {folder} is the --output_dir, where the student is written: name another.")
    content = [fingerprint_weights(str(folder), None), kind.names, read_columns(rows, rows.column_names)]
    path = run.folder / f"teacher-{Hasher.hash(content)}.npy"
    if path.is_file():
        return np.load(path)
    with kept_random_states():
        predictor = AffinityPredictor.from_pretrained(folder, device=run.args.device)
        found = predictor.logits(rows)
    if found.ndim > 1:
        found = found[:, [*map(predictor.collator.kind.names.index, kind.names)]]
    with replacing(path) as draft, draft.open("wb") as file:
        np.save(file, found)
    return found


def compare_with_teacher(run: Run, test: SplitScores, rows: Dataset) -> Json:
    """Scores a student on test rows with what its teacher predicts in place of labels; adds the teacher to `test`.

    Cost: the teacher once over these rows, and 1,000 bootstrap resamples of both.
    """
    kind = test.kind
    taught = predict_taught(run, kind, rows)
    how = (kind, run.model_args.binder_threshold, run.args.seed, test.groups)
    test.scores |= Compared({"teacher": kind.to_predictions(taught)}, test.labels, *how).score()
    said = taught.argmax(-1) if taught.ndim > test.labels.ndim else taught
    agreement = Compared({"student": kind.to_predictions(test.outputs)}, said, *how).score()
    metric = "accuracy" if "accuracy" in agreement["student"] else "pearson"
    test.notes.append(
        f"The student agrees with its teacher, {run.model_args.distill_from}: {units.metric_name(metric)} "
        f"{units.score(agreement['student'][metric])} with the teacher's predictions in place of labels."
    )
    return agreement
