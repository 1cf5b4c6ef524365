"""Text files, plain or gzip: their lines, checked, and the tables of separated fields (CSV, TSV) in them."""

from __future__ import annotations

import csv
import gzip
import logging
import stat
import zlib
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..errors import DataError
from .columns import check_columns, missing_columns, show_name

MAX_LISTED = 20
MAX_HEADER_ROW = 20  # a header further down is not looked for

logger = logging.getLogger(__name__)

Record = tuple[int, dict[str, Any]]  # number of the row, its cells
# A record as it is written, from its first line to its last; without cells where a line is blank.
_Cells = tuple[int, int, list[str]]


def irregular_kind(path: Path) -> str:
    """Returns what `path` is, or links to, if not a regular file, else "": a pipe or a device may never end."""
    kind = stat.S_IFMT(path.stat().st_mode)
    names = {stat.S_IFREG: "", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
    return names.get(kind, "a device")


def check_regular(path: Path) -> None:
    """Raises DataError unless `path` is, or links to, a regular file."""
    try:
        kind = irregular_kind(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from error
    if kind:
        raise DataError(f"{path}: is {kind}, not a regular file. Save the rows in a file, and name that.")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of every line, without its end; unpacked where the name ends in .gz, no byte order mark.

    Raises:
        DataError: not a regular file, damaged or cut gzip data, unreadable, not UTF-8 text, or a line that ends in CR
            alone; with file and row.
    """
    check_regular(path)
    number = 0
    try:
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield number, _decode(path, number, line)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip data is damaged or cut off after row {number} ({error}). Copy or download it again; if "
            f"it is not packed, take .gz off its name."
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read after row {number} ({error.strerror}).") from error


def _decode(path: Path, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\r\n").removesuffix("\n")
        wrong = 0 if "\0" in text else None
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
    if wrong is not None:
        raise DataError(
            f"{path}, row {number}: not UTF-8 text (byte 0x{wrong:02x}). Save the file as UTF-8; of a workbook or an "
            f"archive (Excel, zip), save or unpack the table as CSV; name gzip .gz and Parquet .parquet."
        )
    if "\r" in text:
        raise DataError(f"{path}, row {number}: a line ends in CR alone. Save the file with LF or CRLF.")
    return text


@lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Logs a warning the first time only: streams read their file in every pass."""
    logger.warning("%s", text)


def read_delimited(path: Path, delimiter: str, needed: Collection[str]) -> Iterator[Record]:
    """Yields the line where each record begins, and its cells as they are written.

    Rows without any text at the end are left out. Records over several lines are announced in one warning; where each
    of their lines could be a row, they are refused: two stray quotes join rows.

    Raises:
        DataError: see `read_parts`. No row comes after the first that is refused, and all refused ones are named.
    """
    records = _read_cells(path, delimiter)
    header, first_ones = _find_header(path, records, needed)
    names, width = _name_columns(header), len(header)
    ragged: list[str] = []
    repeated: list[int] = []
    spanning: list[str] = []
    held: list[Record] = []  # rows without text, until one with text follows
    for first, last, cells in chain(first_ones, records):
        if cells and len(cells) != width:
            ragged.append(f"row {first} has {len(cells)}")
        elif cells == header:
            repeated.append(first)
        elif last > first:
            spanning.append(_check_spanning(path, first, last, cells, delimiter))
        if ragged or repeated:
            continue
        held.append((first, dict(zip(names, cells or [""] * width))))
        if any(cells):
            yield from held
            held = []
    refusals = []  # all at once: who mends one row at a time has to run as often as there are rows
    if ragged:
        refusals.append(
            f"{path}: the header has {width} fields, but {_list(ragged)}. Add what is missing, take out what is too "
            f"much, quote text with separators, and close each quote; the decimal sign is a point."
        )
    if repeated:
        refusals.append(
            f"{path}, row {_list(repeated)}: the header again, as joined files have it. Remove it, or name the files "
            f"by a pattern in quotes, as 'folder/*.csv'."
        )
    if refusals:
        raise DataError("\n".join(refusals))
    if spanning:
        warn_once(
            f"{path}: {len(spanning)} records run over several lines, because a quoted field holds a line end: rows "
            f"{_list(spanning)}. If these lines should be rows of their own, a stray quote joins them."
        )


def _read_cells(path: Path, delimiter: str) -> Iterator[_Cells]:
    reader = csv.reader((f"{line}\n" for _, line in read_lines(path)), delimiter=delimiter)
    first = 1
    try:
        for cells in reader:
            yield first, reader.line_num, cells
            first = reader.line_num + 1
    except csv.Error as error:  # a field beyond its limit, as none that is meant
        raise DataError(f"{path}, row {first}: {error}. Look for a quote that is never closed.") from error


def _name_columns(header: Sequence[str]) -> list[str]:
    return [cell.strip() or f"column_{number}" for number, cell in enumerate(header, 1)]


def _find_header(path: Path, records: Iterator[_Cells], needed: Collection[str]) -> tuple[list[str], list[_Cells]]:
    """The first record that is not blank, or the second where that has the needed columns and the first has not; and
    those that were read behind it.

    Raises:
        DataError: an empty file, another separator, a column twice, or needed ones that are missing.
    """
    read = list(islice(records, MAX_HEADER_ROW))
    written = [one for one in read if any(map(str.strip, one[2]))]
    if not written:
        raise DataError(f"{path}: the file is empty. It needs a header line and at least one row.")
    first = written[0]
    found = next((one for one in written if {*needed} <= {*_name_columns(one[2])}), first)
    _, row, header = found
    others = [word for sign, word in (("\t", "tab"), (",", "comma"), (";", "semicolon")) if sign in header[0]]
    if found is first and len(header) == 1 and others:
        raise DataError(f"{path}, row 1: the text is {others[0]}-separated; save it as .csv with commas, or as .tsv.")
    if found not in written[:2]:
        others = _name_columns(first[2])
        missing = missing_columns([name for name in needed if name not in others], others)
        shown = ", ".join(map(show_name, header[:MAX_LISTED]))
        raise DataError(f"{path}: {missing} Row {row} has them: {shown}. Remove the lines before it.")
    check_columns(_name_columns(header), needed, str(path))
    if found is not first:
        warn_once(f"{path}: the header is in row {row}; what stands before it is passed over.")
    return header, read[read.index(found) + 1 :]


def _check_spanning(path: Path, first: int, last: int, cells: Sequence[str], delimiter: str) -> str:
    """The lines of a record, as "5 to 7"; in a text that is meant, hardly ever do all have the header's separators."""
    lines = delimiter.join(cells).rstrip("\n").split("\n")
    if len(cells) > 1 and len(lines) > 1 and all(line.count(delimiter) == len(cells) - 1 for line in lines):
        raise DataError(
            f"{path}, rows {first} to {last}: two quotes make one record of these {len(lines)} lines, each of which "
            f"has the {len(cells)} fields of a row. Remove the stray quotes; if the text is meant, put it on one line."
        )
    return f"{first} to {last}"


def _list(found: Sequence[Any]) -> str:
    more = len(found) - MAX_LISTED
    return ", ".join(map(str, found[:MAX_LISTED])) + (f" and {more:,} more" if more > 0 else "")
