"""CSV and TSV: strict, and every line of the file is accounted for."""

from __future__ import annotations

import csv
import logging
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import DataError
from .lines import Lines
from .names import check_columns

MAX_LISTED = 5  # records over several lines, in a warning
MAX_RAGGED = 20  # rows listed in an error

logger = logging.getLogger(__name__)


def iter_delimited(path: Path, delimiter: str, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, {column: text}) of every record; the header is row 1, and a record counts by its first line.

    A line end inside quotes is legal, and it is also what two stray quotes make of the rows between them. Records over
    several lines are announced in one warning; where each of their lines could be a row, they are refused.

    Raises:
        DataError: see `sources.read_parts`.
    """
    lines, record_lines, joined = Lines(path), [], []  # type: Lines, list[str], list[tuple[int, int]]
    reader = csv.reader(_kept(lines, record_lines), delimiter=delimiter, strict=True)
    row, blank, names = 1, 0, None  # type: int, int, list[str] | None
    ragged: list[tuple[int, int]] = []  # (row, fields); after the first no row is given out, but all are counted
    try:
        for record in reader:
            if len(record_lines) > 1:
                _refuse_joined_rows(path, row, record_lines, delimiter, len(names or record))
                joined.append((row, lines.number))
            if names is None:
                if any(cell.strip() for cell in record):
                    names = _check_header(record, delimiter, columns, path)
                    wanted = [(index, name) for index, name in enumerate(names) if columns is None or name in columns]
            elif not record:  # blank lines are accepted at the end of the file only
                blank = blank or row
            else:
                if blank:
                    ragged.append((blank, 0))
                    blank = 0
                if len(record) != len(names):
                    ragged.append((row, len(record)))
                elif not ragged:
                    yield row, {name: record[index] for index, name in wanted}
            row = lines.number + 1
            record_lines.clear()
            lines.begin_record()
    except csv.Error as error:
        message = str(error).replace("\t", "\\t")  # the separator of a TSV
        raise DataError(
            f"{path}, row {row}: {message}. Look for a quote that is opened and never closed, or for line ends that "
            f"are neither LF nor CRLF."
        ) from error
    finally:
        if joined:
            _warn_once(_joined_text(path, joined))
    if names is None:
        raise DataError(f"{path}: the file is empty. It needs a header line and at least one row.")
    if ragged:
        _refuse_ragged(path, ragged, len(names))


def _kept(lines: Iterable[str], kept: list[str]) -> Iterator[str]:
    for line in lines:
        kept.append(line)
        yield line


def _refuse_ragged(path: Path, ragged: list[tuple[int, int]], expected: int) -> None:
    """All of them at once: who mends one row at a time has to run as often as there are rows."""
    row, found = ragged[0]
    others = [f"{row} ({found} fields)" if found else f"{row} (blank)" for row, found in ragged[1:MAX_RAGGED]]
    num_more = len(ragged) - MAX_RAGGED
    more = f" So are rows {', '.join(others)}{f' and {num_more:,} more' if num_more > 0 else ''}." if others else ""
    if not found:
        raise DataError(f"{path}, row {row}: blank line between rows. Fill it in or remove it.{more}")
    action = "Add the missing ones" if found < expected else "Remove the extra ones"
    raise DataError(
        f"{path}, row {row}: {found} fields where the header has {expected}. {action}, or quote text with separators."
        f"{more}"
    )


def _refuse_joined_rows(path: Path, row: int, texts: list[str], delimiter: str, num_fields: int) -> None:
    """In a quoted text that is meant, hardly ever do all lines have just as many separators as the header."""
    if num_fields > 1 and all(text.count(delimiter) == num_fields - 1 for text in texts):
        raise DataError(
            f"{path}, rows {row} to {row + len(texts) - 1}: two quotes make one record of these {len(texts)} lines, "
            f"each of which has the {num_fields} fields of a row. Remove the stray quotes; if the text is meant, put "
            f"it on one line."
        )


def _joined_text(path: Path, joined: list[tuple[int, int]]) -> str:
    listed = ", ".join(f"{first} to {last}" for first, last in joined[:MAX_LISTED])
    more = f" and {len(joined) - MAX_LISTED} more" if len(joined) > MAX_LISTED else ""
    plural = "s run" if len(joined) > 1 else " runs"
    return (
        f"{path}: {len(joined)} record{plural} over several lines, because a quoted field holds a line end: rows "
        f"{listed}{more}. If these lines should be rows of their own, a stray quote joins them."
    )


@lru_cache(maxsize=1000)
def _warn_once(text: str) -> None:
    """Streams read their file in every pass."""
    logger.warning("%s", text)


def _check_header(header: list[str], delimiter: str, columns: Collection[str] | None, path: Path) -> list[str]:
    if len(header) == 1:
        others = (("\t", "tab", ".tsv"), (",", "comma", ".csv"), (";", "semicolon", ".csv with commas"))
        for other, word, suffix in others:
            if other != delimiter and other in header[0]:
                raise DataError(f"{path}, row 1: the text is {word}-separated; save it as {suffix}.")
    names = [name.strip() or f"column_{number}" for number, name in enumerate(header, 1)]
    check_columns(names, columns, str(path))
    return names
