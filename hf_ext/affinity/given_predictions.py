"""Predictions that stand in a table, put beside the rows that they are of; other rows are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.arguments import DataArguments
from ..data.formats import iter_tables
from ..data.labels import parse_labels, parse_number
from ..data.proteins import judge_sequence
from ..data.reading import SOURCE_ROW
from ..errors import DataError
from ..files import read_cell
from .prediction_file import PREDICTION

MAX_LISTED = 10
Record = tuple[int, Mapping[str, Any]]  # line of the table, its cells


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
        path: CSV, TSV, JSONL or Parquet with `column`; as `predict.py` or a run wrote it, or of another program.
        rows: map-style, with `source_row`, `label` and the sequence columns, as loading left them.
        sequence_columns: of the rows.
        label_column: what the labels were called in their file.
        policy: by which the sequences of the rows were read.
        column: of the predictions.

    Returns:
        (n,) float64, label units.

    Raises:
        DataError: no such column, a prediction that is no finite number, a row without one or with two, another number
            of lines, or a sequence or label that is not the row's; lines are named.

    Cost: one read of the table.
    """
    records = [pair for lines, table in iter_tables(path) for pair in zip(lines.tolist(), table.to_pylist())]
    names = [*dict.fromkeys(name for _, record in records for name in record)]
    if column not in names:
        raise DataError(
            f"{path}: no column {column!r} with predictions; there are {', '.join(map(str, names[:30]))}. Name it with "
            "--prediction_column."
        )
    chosen = _by_source_row(path, records, rows) if SOURCE_ROW in names else _by_order(path, records, rows)
    lines = [line for line, _ in chosen]
    for name in sequence_columns:
        if name in names:
            cells = [read_cell(cell) if isinstance(cell, str) else cell for cell in _cells(chosen, name)]
            there = [judge_sequence(cell, policy).sequence for cell in cells]
            _refuse_others(path, name, lines, there, [sequence or "" for sequence in rows[name][:]])
    if label := _own_label_column(names, label_column, column):
        labels = parse_labels(_cells(chosen, label), label, np.array(lines)).labels
        # A run writes them in float32.
        _refuse_others(path, label, lines, labels.astype(np.float32), np.asarray(rows["label"][:], np.float32))
    values = [parse_number(str(cell).strip()) for cell in _cells(chosen, column)]
    wrong = [line for line, value in zip(lines, values) if value is None or not np.isfinite(value)]
    if wrong:
        raise DataError(
            f"{path}: {len(wrong):,} predictions in column {column!r} are no finite numbers: lines {_list(wrong)}. "
            "Mend them, or leave these rows out everywhere."
        )
    return np.array(values, np.float64)


def _by_source_row(path: Path, records: Sequence[Record], rows: Any) -> list[Record]:
    """For each row, the line that names it; lines of other rows are passed over."""
    asked = [str(number) for number in rows[SOURCE_ROW][:]]
    if len(set(asked)) < len(asked):
        raise DataError(
            f"The scored rows come from several files, and their {SOURCE_ROW} numbers repeat: {path} cannot be put "
            f"beside them by these. Take its column {SOURCE_ROW} away, and write its lines in the order of the rows."
        )
    found: dict[str, Record] = {}
    twice = []
    for line, record in records:
        number = str(record.get(SOURCE_ROW)).strip()
        if number in found:
            twice.append(line)
        found[number] = (line, record)
    if twice:
        raise DataError(f"{path}: lines {_list(twice)} repeat a {SOURCE_ROW}. Leave one line for each row.")
    lacking = [number for number in asked if number not in found]
    if lacking:
        raise DataError(
            f"{path}: {len(lacking):,} of {len(asked):,} scored rows have no prediction ({SOURCE_ROW} "
            f"{_list(lacking)}). Predict all of them, or score the rows that these predictions are of."
        )
    return [found[number] for number in asked]


def _by_order(path: Path, records: Sequence[Record], rows: Any) -> list[Record]:
    if len(records) != len(rows):
        raise DataError(
            f"{path}: {len(records):,} predictions for {len(rows):,} scored rows, and no column {SOURCE_ROW} that says "
            "which row each is of. Write one line per row, in their order, or add that column (predict.py does)."
        )
    return [*records]


def _own_label_column(names: Sequence[str], label_column: str, column: str) -> str | None:
    """Where the table has the labels; a run's own stands before its predictions, whatever the label was called."""
    if label_column in names:
        return label_column
    return "label" if "label" in names and names.index("label") + 1 == names.index(column) else None


def _refuse_others(path: Path, name: str, lines: Sequence[int], there: Iterable[Any], here: Iterable[Any]) -> None:
    """Raises DataError where the table has something else in column `name` than the rows have."""
    others = [line for line, cell, own in zip(lines, there, here) if cell != own]
    if others:
        raise DataError(
            f"{path}: lines {_list(others)} ({len(others):,} in all) have another {name} than the rows that are "
            "scored. These predictions are of other rows, or the rows have changed since: predict again."
        )


def _cells(records: Sequence[Record], name: str) -> list[Any]:
    return [record.get(name) for _, record in records]


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:MAX_LISTED])) + (", ..." if len(values) > MAX_LISTED else "")
