"""Readers of local files: each yields tables and the number of each of their rows; faults are DataErrors with both."""

from __future__ import annotations

import csv
import gzip
import logging
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Features

from ..errors import DataError
from ..files import parse_json
from ..labels import as_array, list_some, shorten
from .columns import SET, VALIDATION, check_columns, hold_out, name_classes

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
SUFFIXES = (*DELIMITERS, *FASTA_SUFFIXES, ".jsonl", ".json", ".parquet")
BATCH_ROWS = 1_000  # of a table; with ten times as many, reading a CSV takes a third longer
MAX_LISTED = 20
WRAPS = (*range(40, 130, 10), 72, 75)  # letters in a line of FASTA, as programs wrap sequences

_KEY = re.compile(r"(?:^|\s)([^\s=]+)=")
# What pyarrow 26 raises for damaged files; ValueError is also that of Python for text and dates that are none.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)

Record = tuple[int, dict[str, Any]]  # number of the row, its cells
Lines = tuple[int, str, list[str]]  # number of the row, header, what stands below it
Columns = tuple[np.ndarray, Mapping[str, Any]]  # numbers of the rows, the cells of each column

logger = logging.getLogger(__name__)


def file_format(path: Path) -> str:
    """Returns the format suffix of `path` (".csv" for `x.csv.gz`), or "" where it is none of `SUFFIXES`."""
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    if suffixes[-1] == ".gz" and suffixes[-2] != ".parquet":
        suffixes.pop()
    return suffixes[-1] if suffixes[-1] in SUFFIXES else ""


def irregular_kind(path: Path) -> str:
    """Returns what `path` is, or links to, if not a regular file, else "": a pipe or a device may never end."""
    if path.is_file() or not path.exists():
        return ""
    return "a folder" if path.is_dir() else "a named pipe, a socket or a device"


def iter_tables(path: Path, columns: Collection[str] | None = None) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yields (rows, table) of 1,000 rows at most until the file ends, in constant memory but for a JSON list.

    CSV, TSV and FASTA give text; JSON and Parquet their own numbers and truth values, and text for all else. `rows` is
    the line where each record starts (a CSV's header is line 1), of Parquet and JSON lists a count; `set`: `hold_out`.

    Args:
        path: a file whose `file_format` is known.
        columns: those that must be there, and no others; where JSON or FASTA lacks one in all records of a table, so
            does the table. None: all that are.

    Raises:
        DataError: see `read_parts`.
    """
    kind = file_format(path)
    if kind == ".parquet":
        tables = _read_parquet(path, columns)
    elif kind in DELIMITERS:
        tables = _to_columns(_read_delimited(path, DELIMITERS[kind], columns or ()))
    elif kind in FASTA_SUFFIXES:
        tables = _to_columns(_read_fasta(path))
    else:
        tables = _to_columns(_read_json(path))
    for rows, read in tables:
        asked = read if columns is None else {name: read[name] for name in read if name in columns}
        named = {name.lower(): name for name in read}
        if columns is not None and named.get(SET) in asked and VALIDATION in named:
            asked = {**asked, named[SET]: hold_out(read[named[SET]], read[named[VALIDATION]])}
        yield rows, pa.table({name: as_array(cells) for name, cells in asked.items()})


def _to_columns(records: Iterator[Record]) -> Iterator[Columns]:
    while chunk := list(islice(records, BATCH_ROWS)):
        names = dict.fromkeys(name for _, record in chunk for name in record)
        columns = {name: [record.get(name) for _, record in chunk] for name in names}
        yield np.array([row for row, _ in chunk]), columns


def _check_regular(path: Path) -> None:
    if kind := irregular_kind(path):
        raise DataError(f"{path}: is {kind}, not a regular file. Save the rows in a file, and name that.")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, text) of every line, without its end; unpacked where the name ends in .gz, no byte order mark.

    Raises:
        DataError: not a regular file, damaged or cut gzip data, unreadable, or not UTF-8 text; with file and row.
    """
    number = 0
    try:
        _check_regular(path)
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if "\0" in text:  # UTF-16, and nearly all that is no text
                    raise UnicodeDecodeError("utf-8", b"\0", 0, 1, "")
                yield number, text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {number}: not UTF-8 text (byte 0x{error.object[error.start]:02x}). Save the file as UTF-8; "
            f"of a workbook or an archive (Excel, zip), save or unpack the table as CSV; name gzip .gz and Parquet "
            ".parquet."
        ) from error
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(
            f"{path}: cannot be read after row {number} ({error}). If the gzip data is damaged or cut off, copy or "
            f"download it again; if it is not packed, take .gz off its name."
        ) from error


def _read_delimited(path: Path, delimiter: str, needed: Collection[str]) -> Iterator[Record]:
    """Yields the line where each record begins, and its cells as they are written; rows without any text are left out.

    No row comes after the first that has other fields than the header, and all such rows are named. Records over
    several lines, which a stray quote makes of rows, are announced in one warning.
    """
    reader = csv.reader((f"{line}\n" for _, line in read_lines(path)), delimiter=delimiter)
    names: list[str] = []
    ragged = []
    spanning = []
    first = 1
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                if not names:
                    names = _check_header(path, first, cells, needed)
                elif len(cells) != len(names):
                    ragged.append(f"row {first} has {len(cells)}")
                elif not ragged:
                    yield first, dict(zip(names, cells))
                if reader.line_num > first:
                    spanning.append(f"{first} to {reader.line_num}")
            first = reader.line_num + 1
    except csv.Error as error:  # a field beyond its limit, as none that is meant; or CR alone as the end of lines
        raise DataError(f"{path}, row {first}: {error}. Close each quote, and end lines with LF or CRLF.") from error
    if not names:
        raise DataError(f"{path}: the file is empty. It needs a header line and at least one row.")
    if ragged:
        raise DataError(
            f"{path}: the header has {len(names)} fields, but {list_some(ragged, MAX_LISTED)}. Add what is missing, "
            "take out what is too much, quote text with separators, and close each quote; the decimal sign is a point."
        )
    if spanning:
        _warn_once(
            f"{path}: {len(spanning)} records run over several lines, because a quoted field holds a line end: rows "
            f"{list_some(spanning, MAX_LISTED)}. If these lines should be rows of their own, a stray quote joins them."
        )


def _check_header(path: Path, row: int, cells: list[str], needed: Collection[str]) -> list[str]:
    signs = {"\t": "tab", ",": "comma", ";": "semicolon"}
    others = [word for sign, word in signs.items() if sign in cells[0]]
    if len(cells) == 1 and others:
        text = f"the text is {others[0]}-separated; save it as .csv with commas, or as .tsv."
        raise DataError(f"{path}, row {row}: {text}")
    names = [cell.strip() or f"column_{number}" for number, cell in enumerate(cells, 1)]
    check_columns(names, needed, str(path))
    return names


@lru_cache(maxsize=1000)
def _warn_once(text: str) -> None:
    """Streams read their file in every pass."""
    logger.warning("%s", text)


def _read_fasta(path: Path) -> Iterator[Record]:
    """Yields id, sequence, and one column per key of a header such as `>P1 name OS=Homo sapiens OX=9606`; of a key that
    comes twice, the first value."""
    records = _split_fasta(path)
    first = [*islice(records, BATCH_ROWS)]
    _refuse_annotations(path, first)
    for row, header, lines in chain(first, records):
        name, rest = (*header.split(None, 1), "", "")[:2]
        record = {"id": name}
        found = _KEY.split(rest)[1:]
        for key, value in zip(found[::2], found[1::2]):
            record.setdefault(key, value.strip())
        yield row, {**record, "sequence": "".join(map(str.strip, lines))}


def _split_fasta(path: Path) -> Iterator[Lines]:
    row = 0
    header = None
    lines = []
    for number, line in chain(read_lines(path), [(0, ">")]):
        text = line.strip()
        if not text.startswith(">"):
            lines += [line] if text else []
            continue
        if header is not None:
            yield row, header, lines
        elif lines:
            raise DataError(f"{path}, row 1: FASTA records start with '>'; the first lines belong to none.")
        row = number
        header = text[1:]
        lines = []


def _refuse_annotations(path: Path, records: Sequence[Lines]) -> None:
    """Raises DataError where most records have as many letters again below their sequence, and these are no part of it.

    Of wrapped sequences only those do that fill whole lines. These have one width, and their last lines about as many
    different letters as their first ones; states, topologies and signals have few.
    """
    doubled = [(row, lines) for row, _, lines in records if _is_doubled([*map(len, lines)])]
    widths = {len(line) for _, lines in doubled for line in lines}
    first = {letter for _, lines in doubled for letter in lines[0]}
    last = {letter for _, lines in doubled for letter in lines[-1]}
    is_wrapped = len(widths) == 1 and widths <= {*WRAPS} and 2 * len(last) > len(first)
    if is_wrapped or 2 * len(doubled) <= len(records):
        return
    row, lines = doubled[0]
    raise DataError(
        f"{path}, row {row}: below the sequence stand as many letters again ({shorten(lines[-1])}), here and in most "
        "records. These are annotations, and would be read as residues. Take them out, or write them into the headers "
        "(>P1 TARGET=HHHEEC, which makes a column TARGET) or into a table. If they are residues, write each sequence "
        "on one line."
    )


def _is_doubled(lengths: list[int]) -> bool:
    """Returns whether lines have the lengths of some of them 2, 3 or 4 times over: (28, 28), (60, 31, 60, 31)."""
    return any(lengths == lengths[: len(lengths) // times] * times for times in (2, 3, 4) if lengths)


def _read_json(path: Path) -> Iterator[Record]:
    """Yields the objects of JSON lines, or of a list."""
    if file_format(path) == ".json":
        found = _decode("\n".join(line for _, line in read_lines(path)), str(path))
        numbered: Iterable[tuple[int, Any]] = enumerate(found if isinstance(found, list) else [None], 1)
    else:
        numbered = ((row, _decode(line, f"{path}, row {row}")) for row, line in read_lines(path) if line.strip())
    for row, record in numbered:
        if not isinstance(record, dict):
            raise DataError(f'{path}, row {row}: a JSON object such as {{"sequence": "MKT"}} is needed.')
        yield row, record


def _decode(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:  # an endless number, or endless nesting, too
        hint = "A .json file holds one list, a .jsonl file one object a line."
        raise DataError(f"{where}: not valid JSON ({error}). {hint}") from error


def _read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[Columns]:
    """Yields batches of rows; damage is a DataError with the row, never an exception of Arrow's, and loses no row.

    Page checksums are verified where the file has them (`pyarrow.parquet.write_table(..., write_page_checksum=True)`).
    Without them a flipped bit of a stored number is another number, which cannot be seen.
    """
    row = 0
    try:
        _check_regular(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            check_columns(names, columns or (), str(path))
            kept = [name for name in names if columns is None or name in columns]
            wrote = file.schema_arrow.metadata or {}
            features = Features.from_arrow_schema(file.schema_arrow) if b"huggingface" in wrote else {}  # by `datasets`
            for batch in file.iter_batches(BATCH_ROWS, columns=kept):
                batch.validate(full=True)
                read = {name: name_classes(batch.column(name), features.get(name)) for name in kept}
                yield np.arange(row + 1, row + 1 + len(batch)), read
                row += len(batch)
            if row != file.metadata.num_rows:
                raise ValueError(f"it ends after row {row}, the footer says {file.metadata.num_rows}")
    except DataError:
        raise
    except _DAMAGE as error:
        after = f" after row {row}" if row else ""
        text = ascii(" ".join(str(error).split())[:200])[1:-1]
        message = f"{path}: not a readable Parquet file{after} ({text}). Write or copy it again."
        raise DataError(message) from error
