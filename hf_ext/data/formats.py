"""Readers of local files: each yields tables and the number of each of their rows; faults are DataErrors with both."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from .columns import as_array, check_columns, show_name
from .text_files import Record, check_regular, read_delimited, read_lines

DELIMITERS = {".csv": ",", ".tsv": "\t"}
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
SUFFIXES = (*DELIMITERS, *FASTA_SUFFIXES, ".jsonl", ".ndjson", ".json", ".parquet")
BATCH_ROWS = 1_000  # of a table; with ten times as many, reading a CSV takes a third longer

_KEY = re.compile(r"(?:^|\s)([^\s=]+)=")
# What pyarrow 26 raises for damaged files; ValueError is also that of Python for text and dates that are none.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)

Columns = tuple[np.ndarray, Mapping[str, Any]]  # numbers of the rows, the cells of each column


def file_format(path: Path) -> str:
    """Returns the format suffix of `path` (".csv" for `x.csv.gz`), or "" where it is none of `SUFFIXES`."""
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    found = before if last == ".gz" and before != ".parquet" else last
    return found if found in SUFFIXES else ""


def iter_tables(
    path: Path, needed: Collection[str] = (), *, reads_all: bool = True
) -> Iterator[tuple[np.ndarray, pa.Table]]:
    """Yields (rows, table) of 1,000 rows at most until the file ends, in constant memory but for a JSON list.

    CSV, TSV and FASTA give text; JSON and Parquet their own numbers and truth values, and text for all else. `rows` is
    the line where each record starts (the header of a CSV is line 1); for Parquet and a JSON list it counts from 1.

    Args:
        path: a file whose `file_format` is known.
        needed: columns that must be there; where JSON or FASTA lacks one in all records of a table, so does the table.
        reads_all: the other columns, too.

    Raises:
        DataError: see `read_parts`.
    """
    check_regular(path)
    kind = file_format(path)
    if kind == ".parquet":
        tables = _read_parquet(path, needed, reads_all)
    elif kind in DELIMITERS:
        tables = _to_columns(read_delimited(path, DELIMITERS[kind], needed))
    else:
        tables = _to_columns(_read_fasta(path) if kind in FASTA_SUFFIXES else _read_json(path))
    for rows, columns in tables:
        try:
            yield rows, pa.table({n: as_array(cells) for n, cells in columns.items() if reads_all or n in needed})
        except UnicodeEncodeError as error:
            text = f"the text '{show_name(error.object)}' holds half of a character (a lone surrogate)"
            raise DataError(f"{path}: {text}. Write the whole character, or leave it out.") from error


def _to_columns(records: Iterator[Record]) -> Iterator[Columns]:
    while chunk := list(islice(records, BATCH_ROWS)):
        names = dict.fromkeys(name for _, record in chunk for name in record)
        columns = {name: [record.get(name) for _, record in chunk] for name in names}
        yield np.array([row for row, _ in chunk]), columns


def _read_fasta(path: Path) -> Iterator[Record]:
    """Columns id, sequence, and one per key of a header such as `>P1 name OS=Homo sapiens OX=9606`; of a key that comes
    twice, the first value."""
    row, record, parts = 0, None, []  # type: int, dict[str, Any] | None, list[str]
    for number, line in read_lines(path):
        text = line.strip()
        if text.startswith(">"):
            if record is not None:
                yield row, {**record, "sequence": "".join(parts)}
            name, rest = (*text[1:].split(None, 1), "", "")[:2]
            row, record, parts = number, {"id": name}, []
            found = _KEY.split(rest)[1:]
            for key, value in zip(found[::2], found[1::2]):
                record.setdefault(key, value.strip())
        elif text and record is None:
            raise DataError(f"{path}, row {number}: FASTA records start with '>'; this line belongs to none.")
        else:
            parts.append(text)
    if record is not None:
        yield row, {**record, "sequence": "".join(parts)}


def _read_json(path: Path) -> Iterator[Record]:
    """The objects of JSON lines, or of a list."""
    if file_format(path) == ".json":
        found = _decode("\n".join(line for _, line in read_lines(path)), str(path))
        if not isinstance(found, list):
            raise DataError(f"{path}: a list of objects is needed, or one a line in a .jsonl file.")
        numbered: Iterator[tuple[int, Any]] = enumerate(found, 1)
    else:
        numbered = ((row, _decode(line, f"{path}, row {row}")) for row, line in read_lines(path) if line.strip())
    for row, record in numbered:
        if not isinstance(record, dict):
            raise DataError(f'{path}, row {row}: a JSON object such as {{"sequence": "MKT"}} is needed.')
        yield row, record


def _decode(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # an endless number, or endless nesting, too
        hint = " One object a line is JSON Lines: name the file .jsonl." if "Extra data" in str(error) else ""
        raise DataError(f"{where}: not valid JSON ({error}).{hint}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last value of a name that an object has twice, without a word."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"column '{show_name(max(names, key=names.count))}' occurs more than once")
    return dict(pairs)


def _read_parquet(path: Path, needed: Collection[str], reads_all: bool) -> Iterator[Columns]:
    """Damage is a DataError with row group and row, never an exception of Arrow's, and loses no row.

    Page checksums are verified where the file has them (`pyarrow.parquet.write_table(..., write_page_checksum=True)`).
    Without them a flipped bit of a stored number is another number, which nobody can see.
    """
    row, group = 0, ""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            check_columns(names, needed, str(path))
            # `metadata.row_group(n).column(m)` is not looked at: of a damaged footer pyarrow 26 aborts the process.
            sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            if sum(sizes) != file.metadata.num_rows:
                raise ValueError(f"row groups of {sizes} rows for {file.metadata.num_rows} rows")
            kept = [name for name in names if reads_all or name in needed]
            for number, size in enumerate(sizes):
                group, end = f", row group {number + 1}", row + size
                for batch in file.iter_batches(BATCH_ROWS, row_groups=[number], columns=kept):
                    batch.validate(full=True)
                    yield np.arange(row + 1, row + 1 + len(batch)), {name: batch.column(name) for name in kept}
                    row += len(batch)
                if row != end:
                    raise ValueError(f"it ends after row {row}, the footer says {end}")
    except DataError:
        raise
    except _DAMAGE as error:
        after = f" after row {row}" if row else ""
        text = ascii(" ".join(str(error).split())[:200])[1:-1]
        message = f"{path}{group}: not a readable Parquet file{after} ({text}). Write or copy it again."
        raise DataError(message) from error
