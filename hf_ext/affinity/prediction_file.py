"""CSVs of predictions: where one may be written, and how the predictions in one are put beside the rows they are of."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..checkpoints.run_lock import make_folder
from ..data.arguments import DataArguments
from ..data.cleaning import parse_labels
from ..data.formats import irregular_kind, iter_tables
from ..data.proteins import judge_sequence
from ..data.reading import SOURCE_ROW, local_files
from ..data.row_errors import REJECTED_FILE, REJECTED_HEADER
from ..errors import ArgumentError, DataError
from ..files import read_cell, try_replacing

PREDICTION, LOW, HIGH, SPREAD = "prediction", "prediction_low", "prediction_high", "prediction_std"
ADDED = (SOURCE_ROW, PREDICTION, LOW, HIGH, SPREAD)  # what is written beside the input's own columns, in this order
MAX_LISTED = 10


def is_of_predictions(header: Sequence[str]) -> bool:
    """Whether `predict` wrote a CSV of this header; those that a run leaves have the label before the prediction.

    Not that of a stream, which nothing tells from another program's column `prediction`.
    """
    added = header[header.index(SOURCE_ROW) + 1 :] if SOURCE_ROW in header else []
    return bool(added) and {*added} <= {PREDICTION, LOW, HIGH, SPREAD}


def find_output(
    name: str,
    dataset_name: str | None,
    is_own: Callable[[list[str]], bool] = is_of_predictions,
    writer: str = "hf-ext predict",
) -> Path:
    """The CSV to write predictions to, found fit for that; its folder is made.

    Args:
        name: as given; `~` is the home folder, and a link means the file that it leads to.
        dataset_name: where rows are read from.
        is_own: whether a file with such a header may be replaced.
        writer: of such files, for messages.

    Raises:
        ArgumentError: no file can have that name or be written there; or what is there is what rows are read from, is
            no file, or is not `writer`'s own.
        DataError: the folder that rows are read from holds none.
        FolderError: its folder cannot be made.
    """
    remedy = "Name another CSV to write."
    if not name or "\0" in name or name.endswith(os.sep):
        raise ArgumentError(f"--output {name!r} names no file. {remedy}")
    try:
        path = Path(name).expanduser().resolve()
        if path.exists():
            if kind := irregular_kind(path):
                raise ArgumentError(f"--output {name!r} is {kind}, not a file. {remedy}")
            if any(path.samefile(source) for source in local_files(dataset_name)):
                raise ArgumentError(f"--output {name!r} is what --dataset_name reads, and would be replaced. {remedy}")
            if path.stat().st_size and not is_own(_read_header(path)):
                raise ArgumentError(f"--output {name!r} is there and was not written by {writer}. {remedy}")
        make_folder(path.parent, "--output")
        try_replacing(path)
    except (OSError, RuntimeError) as error:  # RuntimeError: an unknown ~user
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ArgumentError(f"--output {name!r} cannot be written: {reason}. {remedy}") from error
    return path


def find_rejected(output: Path, bad_rows: str) -> Path:
    """Where `--bad_rows drop` lists the rows that it leaves out: beside `output`, under a name made from its own.

    Raises:
        ArgumentError: they are to be dropped, and what is there is no list of rejected rows.
    """
    path = output.with_name(f"{output.stem}.{REJECTED_FILE}")
    is_free = bad_rows != "drop" or not os.path.lexists(path)
    if not is_free and (path.is_symlink() or irregular_kind(path) or _read_header(path) not in ([], REJECTED_HEADER)):
        raise ArgumentError(
            f"{path} is where --bad_rows drop lists rows, and what is there is no such list. Move it away, or give "
            "another --output."
        )
    return path


def refuse_added(
    source: object, names: Iterable[str], added: Collection[str] = ADDED, what: str = "predictions"
) -> None:
    """Raises DataError where `names`, the columns of `source`, hold one of those that are `added` to them."""
    if taken := [name for name in names if name in added]:
        raise DataError(
            f"{source} has columns of the names {', '.join(taken)}, under which {what} are written beside the "
            "file's own. Rename yours, or leave out all that the model does not read: --keep_columns false."
        )


def _read_header(path: Path) -> list[str]:
    """The first row of a CSV; empty of an empty file."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            return next(csv.reader(file), [])
        except csv.Error:
            return ["not a CSV"]


def read_predictions(
    path: Path,
    rows: Any,
    sequence_columns: Sequence[str],
    label_column: str,
    *,
    policy: DataArguments,
    column: str = PREDICTION,
) -> NDArray[np.float64]:
    """The predictions in a table for `rows`, in their order.

    A line belongs to the row whose `source_row` it has; in a table without that column lines are the rows, in their
    order. Either way, sequences and labels that the table has too must be those of the row.

    Args:
        path: CSV, TSV, JSONL or Parquet with `column`; as `hf-ext predict` or a run wrote it, or of another program.
        rows: map-style, with `source_row`, `label` and the sequence columns, as loading left them.
        sequence_columns: of the rows.
        label_column: what the labels were called in their file; in those of runs it is `label`.
        policy: by which the sequences of the rows were read.
        column: of the predictions.

    Returns:
        (n,) float64, label units.

    Raises:
        DataError: no such column, a prediction that is no finite number, a row without one or with two, another number
            of lines, or a sequence or label that is not the row's; lines are named.

    Cost: one read of the table.
    """
    tables = [pd.DataFrame(table.to_pydict(), index=lines, dtype=object) for lines, table in iter_tables(path)]
    lines = pd.concat(tables) if tables else pd.DataFrame()
    if column not in lines:
        names = ", ".join(map(str, lines.columns[:30]))
        raise DataError(
            f"{path}: no column {column!r} with predictions; there are {names}. Name it with --prediction_column."
        )
    if SOURCE_ROW in lines:
        lines = _take_rows(path, lines, [str(number) for number in rows[SOURCE_ROW][:]])
    elif len(lines) != len(rows):
        raise DataError(
            f"{path}: {len(lines):,} predictions for {len(rows):,} scored rows, and no column {SOURCE_ROW} that says "
            "which row each is of. Write one line per row, in their order, or add that column (`hf-ext predict` does)."
        )
    compared: dict[str, Any] = {name: rows[name][:] for name in sequence_columns if name in lines}
    there: dict[str, list[Any]] = {name: [_read_sequence(cell, policy) for cell in lines[name]] for name in compared}
    if label := next((name for name in (label_column, "label") if name in lines), None):
        compared[label] = np.asarray(rows["label"][:], np.float32)  # as a run writes them
        found, _, _ = parse_labels(lines[label].tolist(), label, lines.index.to_numpy())
        there[label] = found.astype(np.float32).tolist()
    for name, own in compared.items():
        others = [line for line, cell, here in zip(lines.index, there[name], own) if cell != here]
        if others:
            raise DataError(
                f"{path}: lines {_list(others)} ({len(others):,} in all) have another {name} than the rows that are "
                "scored. These predictions are of other rows, or the rows have changed since: predict again."
            )
    values = pd.to_numeric(lines[column], errors="coerce").to_numpy(np.float64)
    if wrong := lines.index[~np.isfinite(values)].tolist():
        raise DataError(
            f"{path}: {len(wrong):,} predictions in column {column!r} are no finite numbers: lines {_list(wrong)}. "
            "Mend them, or leave these rows out everywhere."
        )
    return values


def _take_rows(path: Path, lines: pd.DataFrame, asked: list[str]) -> pd.DataFrame:
    """For each row that is asked for, the line that names it; lines of other rows are passed over."""
    if len({*asked}) < len(asked):
        raise DataError(
            f"The scored rows come from several files, and their {SOURCE_ROW} numbers repeat: {path} cannot be put "
            f"beside them by these. Take its column {SOURCE_ROW} away, and write its lines in the order of the rows."
        )
    named = lines[SOURCE_ROW].map(lambda cell: str(cell).strip())
    if named.duplicated().any():
        twice = _list(lines.index[named.duplicated()])
        raise DataError(f"{path}: lines {twice} repeat a {SOURCE_ROW}. Leave one line for each row.")
    line_of = {number: i for i, number in enumerate(named)}
    if lacking := [number for number in asked if number not in line_of]:
        raise DataError(
            f"{path}: {len(lacking):,} of {len(asked):,} scored rows have no prediction ({SOURCE_ROW} "
            f"{_list(lacking)}). Predict all of them, or score the rows that these predictions are of."
        )
    return lines.iloc[[line_of[number] for number in asked]]


def _read_sequence(cell: Any, policy: DataArguments) -> str:
    return judge_sequence(read_cell(cell) if isinstance(cell, str) else cell, policy).value


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:MAX_LISTED])) + (", ..." if len(values) > MAX_LISTED else "")
