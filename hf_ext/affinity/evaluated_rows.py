"""The rows that models are scored on: a labelled table, or what a run's own split held out for test."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.arguments import DataArguments
from ..data.collators import INPUTS_NAME, SequenceCollator
from ..data.columns import read_columns
from ..data.demo import make_demo_table
from ..data.loading import load_data, load_sequences
from ..errors import ArgumentError, DataError
from ..evaluation.resampling import ResamplingUnits
from ..reporting.near_copies import describe_near_copies, describe_repeated
from ..reporting.report.run_files import RunFiles, read_run
from .baselines import label_array, read_bounds
from .given_predictions import read_predictions
from .held_out import describe_units, find_lone_value, find_units
from .predictor import columns_of
from .preparing import settle_threshold
from .results import PREDICTIONS
from .slices import Slice, find_exact, find_slices

# Of a run's training arguments, those that decide what its model predicts, where embeddings are, and how it is judged.
REPEATED = (
    *("seed", "per_device_eval_batch_size", "metric_for_best_model", "use_cpu", "full_determinism"),
    *("speedups", "without", "attention", "max_encoder_noise", "bf16", "fp16", "tf32", "bf16_full_eval"),
    *("fp16_full_eval", "embedding_cache_dir", "max_tokens_per_batch"),
)


@dataclass(frozen=True)
class EvaluatedRows:
    """Rows with labels, and how scores of them are made and read.

    Attributes:
        table: map-style: sequences, `label`, `source_row`, and where there are any `bound` and the group.
        source: where they are from, as a reader knows it.
        threshold: label units; None leaves recall and its like out.
        groups: (n,), of each row, or None.
        units: what intervals resample; None: rows.
        slices: rows that are scored apart, too.
        notes: sentences about the rows.
    """

    table: Any
    source: str
    threshold: float | None
    groups: list[Any] | None
    units: ResamplingUnits | None
    slices: list[Slice]
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> NDArray[np.float64]:
        """(n,), label units; rounded to float32, as batches hold them and runs score them."""
        return label_array(self.table).astype(np.float32).astype(np.float64)

    @property
    def bounds(self) -> NDArray[np.int64] | None:
        """(n,) of -1, 0, 1; None where all labels are exact."""
        return read_bounds(self.table)


def read_trained_run(folder: str) -> RunFiles:
    """What a run that came to its end left in its folder, its settings and predictions of its test rows among it.

    Raises:
        ArgumentError: not a run of `recipes/max_speed.py`, or one whose test rows were a stream.
        DataError: no finished run, or a damaged record, or the test rows are not listed there.
    """
    run = read_run(folder)
    if run.task != "affinity" or not (run.folder / INPUTS_NAME).is_file():
        raise ArgumentError(f"--test_of {folder}: give the output folder of a run of recipes/max_speed.py.")
    if run.settings.get("streaming"):
        raise ArgumentError(
            f"--test_of {folder}: its test rows were a stream, whose rows have no place of their own. Name a file "
            "with --dataset_name."
        )
    if run.predictions is None:
        raise DataError(f"{run.folder / PREDICTIONS} is missing, which says what the test rows were. Copy it there.")
    return run


def repeated_settings(run: RunFiles, known: Container[str]) -> dict[str, Any]:
    """A run's settings of the data and those of `REPEATED`, as far as `known` has them: as defaults of a command."""
    names = [*(field.name for field in dataclasses.fields(DataArguments)), *REPEATED, "binder_threshold"]
    return {name: run.settings[name] for name in names if name in run.settings and name in known}


def load_test(run: RunFiles, args: DataArguments, settings: Any, seed: int) -> EvaluatedRows:
    """Splits the data as a run did, and gives its test rows, with the slices that its report has.

    Args:
        run: from `read_trained_run`.
        args: of the run; `args.dataset_name` may be another place of the same data.
        settings: with `binder_threshold`, that of the run.
        seed: of the run, which a training subset was drawn by.

    Raises:
        ArgumentError, DataError: as `load_data`; or the rows are not those that the run left in its folder.
    """
    table = make_demo_table() if args.dataset_name is None else None
    with tempfile.TemporaryDirectory() as scratch:
        data = load_data(args, output_dir=scratch, seed=seed, needs_validation=True, table=table)
    splits: Any = data.splits
    test, listed = splits["test"], run.folder / PREDICTIONS
    assert run.predictions is not None
    if len(test) != len(run.predictions.labels):
        raise DataError(
            f"{listed} lists {len(run.predictions.labels):,} test rows, and splitting the data again gives "
            f"{len(test):,}: the data have changed since. Name the data that the run had with --dataset_name."
        )
    columns = [*dict.fromkeys(columns_of(SequenceCollator.from_pretrained(run.folder)))]
    read_predictions(listed, test, columns, args.label_column, policy=args)  # of the same rows?
    slices, notes = find_slices(splits["train"], test, columns)
    units, lone = find_units(args, splits), find_lone_value(args, splits)
    alone = f"All {len(test):,} rows share one value of {lone}: nothing is claimed about others." if lone else ""
    leaks = data.report.get("leaks")
    told = [alone, describe_repeated(leaks), *notes, *describe_units(units), *describe_near_copies(leaks)]
    return EvaluatedRows(
        test,
        f"test rows of {run.folder}",
        settings.binder_threshold,
        _groups(test, args.group_column),
        units,
        [*slices, *find_exact(read_bounds(test))],
        [note for note in told if note],
    )


def find_labels(table: Any, folder: Path, given: str | None) -> str | None:
    """The column of a table that has labels of what the model in `folder` predicts; None where there is none.

    Args:
        table: all columns as text, map-style.
        folder: of the model, which knows what its run called the labels.
        given: what the user calls them.
    """
    name = given or recorded_label(folder)
    if name not in table.column_names:
        return None
    return name if any(cell and cell.strip() for cell in table[name][:]) else None


def recorded_label(folder: Path) -> str | None:
    """What the run of a model called its labels; None of one without a record, or with a damaged one."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads((folder / "all_results.json").read_text())["settings"]["label_column"]
    return None


def load_labelled(args: DataArguments, settings: Any, explicit: Container[str], scratch: Path) -> EvaluatedRows:
    """All rows of a labelled table.

    Which of them a model has seen in training nothing says, so there are no slices but that of exact labels, and
    intervals resample rows unless `args.interval_by` names a column.

    Args:
        args: of the data.
        settings: with `binder_threshold`, which becomes None where nobody typed it and no label tells hits by it.
        explicit: names of the arguments that the user set.
        scratch: where `--bad_rows drop` lists what it left out.

    Raises:
        ArgumentError, DataError: as `load_sequences`; no name; a stream.
    """
    if args.dataset_name is None:
        raise ArgumentError("Which rows? Give --dataset_name with labelled rows, or --test_of with a run's folder.")
    if args.streaming:
        raise ArgumentError("--streaming: scores are of rows that can be counted; leave it out.")
    loaded = load_sequences(args, output_dir=scratch, needs_labels=True)
    table: Any = loaded.table
    report: dict[str, Any] = {"notes": [], "warnings": []}
    settle_threshold(settings, explicit, label_array(table), report)
    units = find_units(args, {"train": table, "test": table})
    return EvaluatedRows(
        table,
        str(args.dataset_name),
        settings.binder_threshold,
        _groups(table, args.group_column),
        units,
        find_exact(read_bounds(table)),
        [*report["warnings"], *report["notes"], *describe_units(units)],
    )


def _groups(table: Any, column: str | None) -> list[Any] | None:
    return [row[0] for row in read_columns(table, [column])] if column else None
