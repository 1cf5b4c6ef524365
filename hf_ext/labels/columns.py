"""Columns of a table, each distinct cell of which is checked once; and an error for each row that is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from .cells import Checked, shorten

CHUNK_ROWS = 100_000  # per Arrow array, so that none reaches the 2 GiB of one text array


class RowError(NamedTuple):
    """One refused value. `row` is the 1-based line of the file as an editor shows it (a CSV's header is line 1)."""

    row: int
    column: str
    value: str
    rule: str
    remedy: str


Read = tuple[dict[str, Any], list[RowError]]  # columns by name, and an error for each row that is refused


class Distinct(NamedTuple):
    """A column as its distinct `cells`, text as large_string, and the `number` (n,) of the cell that each row has."""

    cells: pa.Array
    number: np.ndarray

    def to_rows(self, values: Any, kind: pa.DataType) -> pa.ChunkedArray:
        """Builds a column of `kind` from one value for each of `cells`, in chunks none of which reaches 2 GiB."""
        taken = pa.array(values, pa.large_string() if kind == pa.string() else kind)
        starts = range(0, len(self.number), CHUNK_ROWS)
        chunks = [taken.take(pa.array(self.number[i : i + CHUNK_ROWS])).cast(kind) for i in starts]
        return pa.chunked_array(chunks, type=kind)


def distinct(values: pa.ChunkedArray | Sequence[Any]) -> Distinct:
    """Finds each cell of a column once, None too: what is true of a cell need not be found again for each of its rows.

    Cells of a type that Arrow does not compare (lists, float16) are all taken for different. Python values of several
    types become text.
    """
    column = values if isinstance(values, pa.ChunkedArray) else pa.chunked_array([as_array(values)])
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string(column.type) or pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())  # its offsets reach beyond 2 GiB
        column = pa.chunked_array([column.combine_chunks()])  # a thousand small pieces take longer
    try:
        coded = column.dictionary_encode("encode")
    except pa.ArrowNotImplementedError:
        return Distinct(pa.concat_arrays(column.chunks), np.arange(len(column)))
    chunks = coded.chunks  # they share the dictionary of all
    cells = chunks[0].dictionary if chunks else pa.array([], column.type)
    return Distinct(cells, np.concatenate([np.zeros(0, np.int64), *(chunk.indices.to_numpy() for chunk in chunks)]))


def as_array(values: pa.Array | Sequence[Any]) -> pa.Array:
    """Converts values to booleans, whole numbers, numbers or, where they are anything else or mixed, text (`as_text`).

    Whole numbers that float64 would round beside others (an id of 20 digits) are text, too.
    """
    values = values.to_pylist() if isinstance(values, pa.Array) else values
    try:
        array = pa.array(values, from_pandas=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        array = None
    if array is not None and array.type in (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.null()):
        return array
    return pa.array(map(_write, values), pa.string())


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Converts a column to text: numbers as Python writes them, lists and structures as JSON, None stays."""
    if pa.types.is_string(column.type):
        return column
    found = distinct(column)
    return found.to_rows(list(map(_write, found.cells.to_pylist())), pa.string())


def _write(cell: Any) -> str | None:
    if cell is None or isinstance(cell, str):
        return cell
    if isinstance(cell, bytes):  # as some programs store text in Parquet
        return cell.decode("utf-8", "replace")
    return json.dumps(cell, default=str) if isinstance(cell, list | dict) else str(cell)


class CheckedColumn(NamedTuple):
    """The distinct cells of a column, what was found of each, and an error for each row that has a refused one."""

    found: Distinct
    checked: list[Checked]
    errors: list[RowError]

    def to_rows(self, kind: pa.DataType) -> pa.ChunkedArray:
        """Returns the value of each row, as a column of `kind`."""
        return self.found.to_rows([one.value for one in self.checked], kind)

    def numbers(self) -> np.ndarray:
        """Returns the value of each row, float64; (n,) or, of pairs, (n, 2)."""
        return np.array([one.value for one in self.checked], np.float64)[self.found.number]


def check_cells(cells: Any, check: Callable[[Any], Checked], column: str, rows: np.ndarray) -> CheckedColumn:
    """Checks each distinct cell of a column once.

    Args:
        cells: n of them, see `distinct`.
        check: what becomes of one.
        column: its name.
        rows: (n,) the row of each cell in its file.
    """
    found = distinct(cells)
    values = found.cells.to_pylist()
    checked = [check(cell) for cell in values]
    is_refused = np.array([bool(one.rule) for one in checked], bool)[found.number]
    errors = []
    for index in np.flatnonzero(is_refused):
        number = found.number[index]
        one = checked[number]
        errors.append(RowError(int(rows[index]), column, shorten(values[number]), one.rule, one.remedy))
    return CheckedColumn(found, checked, errors)


@dataclass(frozen=True)
class LabelTable:
    """The columns that a kind of label reads, of n rows.

    Attributes:
        table: holds the label columns, and those that the next two name.
        rows: (n,) the row of each cell in its file.
        sequences: n, cleaned: residues have as many labels. "" where the sequence was refused.
        mask_column: of labels of residues; None: all that is written is known.
        censor_column: of marks that say which labels are bounds, or None.
    """

    table: pa.Table
    rows: np.ndarray
    sequences: pa.ChunkedArray
    mask_column: str | None = None
    censor_column: str | None = None

    def check(self, column: str, check: Callable[[Any], Checked]) -> CheckedColumn:
        """Returns what `check_cells` does of one of the columns."""
        return check_cells(self.table[column], check, column, self.rows)
