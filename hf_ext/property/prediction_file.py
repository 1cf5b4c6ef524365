"""CSVs of predictions: where one may be written, what stands in it, and how it is read beside the rows it is of."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..checkpoints import make_folder
from ..data import (
    REJECTED_FILE,
    REJECTED_HEADER,
    SOURCE_ROW,
    DataArguments,
    check_sequence,
    column_names,
    irregular_kind,
    local_files,
    read_lines,
)
from ..errors import ArgumentError, DataError
from ..evaluation import FloatArray
from ..files import read_cell, try_replacing, write_cell, writing_csv
from ..labels import PREDICTION, PROBABILITY, Columns, LabelKind

STD = "prediction_std"
LOW = "prediction_low"  # of an interval
HIGH = "prediction_high"
RANK = "rank"  # of a row that is to be measured
ACQUISITION = "acquisition"
BOUND_SIGNS = ("<=", "", ">=")  # where the true value lies, as seen from the label
MAX_LISTED = 10
WHERE = "rows (the first is 1)"


def is_of_predictions(header: Sequence[str]) -> bool:
    """Returns whether `predict` wrote a CSV of this header.

    Those that a run leaves have the label before the prediction.

    Not that of a stream, which nothing tells from another program's column `prediction`.
    """
    added = header[header.index(SOURCE_ROW) + 1 :] if SOURCE_ROW in header else []
    return bool(added) and all(name.partition("_")[0] in (PREDICTION, PROBABILITY, RANK, ACQUISITION) for name in added)


def find_output(
    name: str,
    dataset_name: str | None,
    is_own: Callable[[list[str]], bool] = is_of_predictions,
    writer: str = "hf-ext predict",
) -> Path:
    """Finds the CSV to write predictions to, fit for that; makes its folder.

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
    """Returns where `--bad_rows drop` lists the rows that it leaves out: beside `output`, by its name.

    Raises:
        ArgumentError: they are to be dropped, and what is there is no list of rejected rows.
    """
    path = output.with_name(f"{output.stem}.{REJECTED_FILE}")
    if bad_rows == "drop":
        find_output(str(path), None, lambda header: header == REJECTED_HEADER, "--bad_rows drop")
    return path


def refuse_added(source: object, names: Iterable[str], added: Collection[str]) -> None:
    """Raises DataError where `names`, the columns of `source`, hold one of those that are `added` to them."""
    if taken := [name for name in names if name in added]:
        raise DataError(
            f"{source} has columns of the names {', '.join(taken)}, under which predictions are written beside the "
            "file's own. Rename yours, or leave out all that the model does not read: --keep_columns false."
        )


def _read_header(path: Path) -> list[str]:
    """Reads the first row of a CSV; empty of an empty file."""
    try:
        return next(csv.reader(line for _, line in read_lines(path)), [])
    except (csv.Error, DataError):
        return ["not a CSV"]


def read_predictions(path: Path, rows: Any, args: DataArguments, kind: LabelKind) -> Any:
    """Reads the predictions in a CSV of any program for `rows`, in their order.

    A line belongs to the row whose `source_row` it has, or else whose `--id_column`; in a CSV without these, lines are
    the rows, in their order. Either way, sequences that it has too must be those of the row.

    Args:
        path: of the CSV; `hf-ext predict` or a run may have written it.
        rows: map-style, with `source_row` and the sequence columns, as loading left them.
        args: by which the rows were read.
        kind: of their labels.

    Returns:
        (n,) float64, label units; of other labels as scores take predictions. Where classes have no probabilities, the
        named one counts as certain.

    Raises:
        DataError: no such file or column, a prediction that is no finite number, a row without a line of its own, or
            sequences that are not the rows'.

    Cost: one read of the file.
    """
    try:
        lines = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a CSV of predictions: {error}.") from error
    lines.columns = [*map(read_cell, lines.columns)]
    outputs = kind.score_columns
    lacking = [name for name in outputs if name not in lines]
    if 0 < len(lacking) < len(outputs):
        raise DataError(f"{path}: columns of some outputs alone; {', '.join(lacking[:MAX_LISTED])} are missing.")
    if lacking and PREDICTION not in lines:
        raise DataError(f"{path}: no column {kind.prediction_names[0]!r}; there are {', '.join(lines.columns[:30])}.")
    if key := next((name for name in (SOURCE_ROW, args.id_column) if name in lines), None):
        asked = [str(number) for number in rows[key][:]]
        lines = lines.set_index(key)
    if key and [*lines.index] != asked:  # else in their order, also where numbers begin anew with each file
        if lines.index.has_duplicates or len({*asked}) < len(asked):
            raise DataError(f"{path}: {key} does not tell rows apart. Leave it out, with one line for each row.")
        if unknown := [number for number in asked if number not in lines.index]:
            raise DataError(
                f"{path}: {len(unknown):,} of {len(asked):,} scored rows have no prediction ({key} "
                f"{', '.join(unknown[:MAX_LISTED])}). Predict all of them, or score the rows that these are of."
            )
        lines = lines.loc[asked]
    if len(lines) != len(rows):
        raise DataError(
            f"{path}: {len(lines):,} predictions for {len(rows):,} scored rows, and no column {SOURCE_ROW} that says "
            "which row each is of. Write one line per row, in their order, add that column (`hf-ext predict` does), or "
            "name a column of both files: --id_column."
        )
    for name in (name for name in args.sequence_columns if name in lines):
        found = [check_sequence(read_cell(cell), args).value for cell in lines[name]]
        if num := sum(not kind.covers(one, other) for one, other in zip(found, rows[name][:])):
            raise DataError(
                f"{path}: {num:,} lines have another {name} than the rows that are scored. These predictions are of "
                f"other rows, in another order without {SOURCE_ROW} and --id_column, or the rows have changed since."
            )
    if lacking:
        return _read_cells(path, [*map(read_cell, lines[PREDICTION])], kind)
    values = lines[outputs].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    if num := int((~np.isfinite(values)).any(1).sum()):  # NaN where it is none
        raise DataError(
            f"{path}: {num:,} predictions are no finite numbers. Fix them, or leave these rows out everywhere."
        )
    return kind.shape_outputs(values)


def _read_cells(path: Path, cells: Sequence[str], kind: LabelKind) -> Any:
    """Reads predictions that are written as labels are: an array, or of residues a list of arrays."""
    checked = [kind.check_cell(cell) for cell in cells]
    if wrong := [f"line {line}: {one.rule}. {one.remedy}" for line, one in enumerate(checked, 2) if one.rule]:
        raise DataError(f"{path}, column {PREDICTION!r}, {wrong[0]}")
    return kind.join_cells([one.value for one in checked])


def std_column(stds: FloatArray | None) -> Columns:
    """Makes the column of standard deviations, (n,); none where they are not known."""
    return {} if stds is None else {STD: stds.astype(np.float32)}


def interval_columns(predicted: FloatArray, half_width: FloatArray | float) -> Columns:
    """Makes the columns of both ends of an interval around predictions, (n,); `half_width` of each row or of all."""
    centre = np.asarray(predicted, np.float32)
    reach = np.asarray(half_width, np.float32)
    return {LOW: centre - reach, HIGH: centre + reach}


def write_predictions(path: Path, blocks: Iterable[tuple[Any, Columns, Any]]) -> int:
    """Writes one line per row: its file row and identifying columns, then what is added. Returns the number of rows.

    Each block is written as it comes; the file appears with the last one.

    Of rows with bounds, the column `bound` says `<=` or `>=` where the truth is at or below, or above, the label. Text
    that a spreadsheet would take for a formula has a `'` in front (`csv_cells`); `source_row` joins without it.

    Args:
        blocks: rows; columns to add: the label where there is one, and predictions; and None, or the same rows as their
            source has them, whose columns take the place of the identifying ones.
    """
    num_rows = 0
    with writing_csv(path) as file:
        writer = csv.writer(file)
        for rows, added, as_read in blocks:
            names = column_names(rows) if hasattr(rows, "__len__") else ()
            kept = {name: rows for name in names if name != "label"}
            if as_read is not None:
                kept = {**dict.fromkeys(as_read.column_names, as_read), SOURCE_ROW: rows}
            columns: list[Any] = [map(write_cell, source[name][:]) for name, source in kept.items()]
            if "bound" in kept and as_read is None:
                columns[[*kept].index("bound")] = [BOUND_SIGNS[side + 1] for side in rows["bound"][:]]
            columns += [map(write_cell, values) if isinstance(values, list) else values for values in added.values()]
            if not num_rows:
                writer.writerow(map(write_cell, (*kept, *added)))
            writer.writerows(zip(*columns))
            num_rows += len(next(iter(added.values())))
    return num_rows


def check_predictions(predictions: Any, before: int = 0) -> Any:
    """Checks that all `predictions` of n rows, an array (n, ...) or a list of arrays, are numbers; returns them.

    Raises:
        DataError: some are NaN or infinite; with their rows, counted from 1, or on from `before`.
    """
    wrong = np.flatnonzero([not np.isfinite(row).all() for row in predictions]) + 1 + before
    if len(wrong):
        raise DataError(
            f"Predictions of {len(wrong)} {WHERE} are NaN or infinite: {', '.join(map(str, wrong[:20]))}. The model's "
            "weights are finite, so the numbers overflow: predict in float32 (no --fp16), or take another model."
        )
    return predictions
