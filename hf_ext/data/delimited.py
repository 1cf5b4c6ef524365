"""CSV and TSV by pyarrow: strict, and every line of the file is accounted for."""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from ..errors import DataError
from .names import check_columns, missing_columns, show_names
from .text_files import TextFile, read_lines, warn_once

MAX_LISTED = 20
MAX_HEADER_ROW = 20  # a header further down is not looked for
# The longest protein known has 35,000 residues: a longer record has lost its end, or was made to fill the memory.
MAX_RECORD_BYTES = 16 * 2**20

_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*').fullmatch  # Excel's; it shows no such line


@dataclass(frozen=True)
class Header:
    """The cells as they are written, the line where they end, and what separates cells."""

    cells: list[str]
    last_line: int
    delimiter: str

    @property
    def names(self) -> list[str]:
        """Of the columns."""
        return [cell.strip() or f"column_{number}" for number, cell in enumerate(self.cells, 1)]


def read_delimited(path: Path, delimiter: str, needed: Collection[str]) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yields (lines, table): all columns as text, as written, and the line where each record begins.

    Rows without any text at the end are left out. Records over several lines are announced in one warning; where each
    of their lines could be a row, they are refused: two stray quotes join rows.

    Raises:
        DataError: see `read_parts`. No row comes after the first that is refused, and all refused ones are named.
    """
    header = find_header(path, delimiter, needed)
    line, held = header.last_line + 1, None
    ragged: list[pyarrow.csv.InvalidRow] = []
    repeated: list[int] = []
    spanning: list[str] = []
    with TextFile(path) as source:
        for table in _tables(source, header, ragged):
            line_ends = np.zeros(len(table), np.int64)
            if source.has_quotes:
                line_ends += sum(pc.count_substring(column, "\n").to_numpy() for column in table.columns)
            lines = line + np.cumsum(line_ends + 1) - line_ends - 1
            line += len(table) + int(line_ends.sum())
            repeated += lines[_is_header(table, header)].tolist()
            for place in np.flatnonzero(line_ends):
                spanning.append(_spanning_rows(path, header, int(lines[place]), table.slice(place, 1).to_pylist()[0]))
            if not ragged and not repeated:
                if held is not None:
                    yield held
                held = (lines, table)
    if ragged or repeated:
        raise DataError(_refusal(path, header, _ragged_rows(path, header) if ragged else [], repeated))
    if spanning:
        warn_once(
            f"{path}: {len(spanning)} records run over several lines, because a quoted field holds a line end: rows "
            f"{_list(spanning)}. If these lines should be rows of their own, a stray quote joins them."
        )
    if held is not None:
        lines, table = held
        end = len(table)
        while end and not any(column[end - 1].as_py() for column in table.columns):
            end -= 1
        if end:
            yield lines[:end], table.slice(0, end)


def find_header(path: Path, delimiter: str, needed: Collection[str]) -> Header:
    """The first line that is not blank, or the second where that has the needed columns and the first has not.

    A line `sep=;`, as Excel reads it, says what separates cells.

    Raises:
        DataError: an empty file, another separator, a column twice, or needed ones that are missing.
    """
    with TextFile(path) as file:
        lines = re.findall(r"[^\n]*\n|[^\n]+", file.read().decode("utf-8", "ignore"))
    mark = _SEPARATOR_LINE(lines[0]) if lines else None
    delimiter, skipped = (mark[1], 1) if mark else (delimiter, 0)
    reader, found = csv.reader(lines[skipped:], delimiter=delimiter), []
    for cells in islice((cells for cells in reader if any(map(str.strip, cells))), MAX_HEADER_ROW):
        found.append(Header(cells, skipped + reader.line_num, delimiter))
        if set(needed) <= set(found[0].names):
            break
    if not found:
        raise DataError(f"{path}: the file is empty. It needs a header line and at least one row.")
    first = found[0]
    header = next((one for one in found if set(needed) <= set(one.names)), first)
    others = [word for sign, word in (("\t", "tab"), (",", "comma"), (";", "semicolon")) if sign in first.cells[0]]
    if header is first and len(first.cells) == 1 and others:
        raise DataError(f"{path}, row 1: the text is {others[0]}-separated; save it as .csv with commas, or as .tsv.")
    if header not in found[:2]:
        missing = missing_columns([name for name in needed if name not in first.names], first.names)
        shown = f"Row {header.last_line} has them: {show_names(header.names)}. Remove the lines before it."
        raise DataError(f"{path}: {missing} {shown}")
    check_columns(header.names, needed, str(path))
    if header is not first or skipped:
        warn_once(f"{path}: the header is in row {header.last_line}; what stands before it is passed over.")
    return header


def _tables(source: TextFile, header: Header, ragged: list[pyarrow.csv.InvalidRow]) -> Iterator[pa.Table]:
    """The records that have as many fields as the header; the others are put into `ragged`."""

    def keep(row: pyarrow.csv.InvalidRow) -> str:
        ragged.append(row)
        return "skip"

    read = pyarrow.csv.ReadOptions(
        use_threads=False, block_size=MAX_RECORD_BYTES, skip_rows=header.last_line, column_names=header.names
    )
    parse = pyarrow.csv.ParseOptions(
        delimiter=header.delimiter, newlines_in_values=True, ignore_empty_lines=False, invalid_row_handler=keep
    )
    convert = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(header.names, pa.string()), check_utf8=False)
    try:
        with pyarrow.csv.open_csv(source, read, parse, convert) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
    except pa.ArrowInvalid as error:
        if "Could not skip initial" not in str(error):  # where nothing follows the header
            message = f"{source.path}, before row {source.row}: {error}. Look for a quote that is never closed."
            raise DataError(message) from error


def _ragged_rows(path: Path, header: Header) -> list[str]:
    """Arrow counts records, not lines: those with another number of fields are looked for once more."""
    reader = csv.reader((f"{line}\n" for _, line in read_lines(path)), delimiter=header.delimiter)
    found, start = [], 1
    for cells in reader:
        if cells and len(cells) != len(header.cells) and start > header.last_line:
            found.append(f"row {start} has {len(cells)}")
        start = reader.line_num + 1
    return found


def _is_header(table: pa.Table, header: Header) -> np.ndarray:
    """Which rows repeat the header, as `cat a.csv b.csv` leaves it."""
    same = pc.equal(table.column(0), header.cells[0]).to_numpy()
    for column, cell in zip(table.columns[1:], header.cells[1:]):
        same = same & pc.equal(column, cell).to_numpy() if same.any() else same
    return same


def _spanning_rows(path: Path, header: Header, first: int, cells: dict[str, str]) -> str:
    """The lines of a record, as "5 to 7"; in a text that is meant, hardly ever do all have the header's separators."""
    lines, num_cells = header.delimiter.join(cells.values()).rstrip("\n").split("\n"), len(cells)
    rows = f"{first} to {first + len(lines) - 1}"
    if num_cells > 1 and len(lines) > 1 and all(line.count(header.delimiter) == num_cells - 1 for line in lines):
        raise DataError(
            f"{path}, rows {rows}: two quotes make one record of these {len(lines)} lines, each of which has the "
            f"{num_cells} fields of a row. Remove the stray quotes; if the text is meant, put it on one line."
        )
    return rows


def _refusal(path: Path, header: Header, ragged: Sequence[str], repeated: Sequence[int]) -> str:
    """All of them at once: who mends one row at a time has to run as often as there are rows."""
    texts = []
    if ragged:
        texts.append(
            f"{path}: the header has {len(header.cells)} fields, but {_list(ragged)}. Add what is missing, take out "
            f"what is too much, quote text with separators, and close each quote; the decimal sign is a point."
        )
    if repeated:
        texts.append(
            f"{path}, row {_list(repeated)}: the header again, as joined files have it. Remove it, or name the files "
            f"by a pattern in quotes, as 'folder/*.csv'."
        )
    return "\n".join(texts)


def _list(found: Sequence[Any]) -> str:
    more = len(found) - MAX_LISTED
    return ", ".join(map(str, found[:MAX_LISTED])) + (f" and {more:,} more" if more > 0 else "")
