"""Readers of local files: each yields (row, {column: value}); structural faults are DataErrors with file and row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError

Record = tuple[int, dict[str, Any]]
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*DELIMITERS, *FASTA_SUFFIXES, *JSON_SUFFIXES, ".parquet")
PARQUET_BATCH_ROWS = 4096


def file_format(path: Path) -> str:
    """Returns the format suffix of `path` (".csv" for `x.csv.gz`), or "" where it is none of `SUFFIXES`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES and suffixes[-1] != ".parquet" else ""
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def iter_records(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    """Yields every record as (row, {column: value}), reading in constant memory.

    Text formats give text; JSON Lines and Parquet give their own types. `row` is the line where the record starts (the
    header of a CSV is line 1); for Parquet it counts records from 1.

    Args:
        path: a file whose `file_format` is known.
        columns: the columns wanted, or None for all. CSV, TSV and Parquet raise where one is missing; JSON Lines and
            FASTA leave it out of the record.

    Raises:
        DataError: see `sources.read_table`.
    """
    kind = file_format(path)
    if kind in DELIMITERS:
        return _iter_delimited(path, DELIMITERS[kind], columns)
    if kind in JSON_SUFFIXES:
        return _iter_jsonl(path, columns)
    if kind == ".parquet":
        return _iter_parquet(path, columns)
    return _iter_fasta(path, columns)


def check_columns(names: Sequence[str], wanted: Collection[str] | None, path: str) -> None:
    """Raises DataError where `names` has a duplicate or lacks one of `wanted` (with the nearest name and the list)."""
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise DataError(f"{path}, row 1: column {repeated[0]!r} occurs more than once. Rename or remove one of them.")
    for name in wanted or ():
        if name not in names:
            near = get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(f"{path}: there is no column {name!r}.{hint} Columns: {', '.join(names[:30])}.")


def _iter_lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with _open(path) as lines:
            for number, raw in enumerate(lines, 1):
                if number == 1:
                    raw = _check_start(raw, path)
                yield raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row {number}: not UTF-8 (byte 0x{error.object[error.start]:02x} at byte {error.start + 1} of the "
            f"line). Save the file as UTF-8."
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path}: the gzip data is damaged or cut off after row {number} ({error}). Copy or download it again."
        ) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return io.BufferedReader(gzip.open(path, "rb"), 1 << 20)
    return open(path, "rb")


def _check_start(raw: bytes, path: Path) -> bytes:
    if raw.startswith(b"\x1f\x8b"):
        raise DataError(f"{path}, row 1: the file is gzip-compressed; add .gz to its name.")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}, row 1: not UTF-8 but UTF-16. Save the file as UTF-8.")
    return raw.removeprefix(b"\xef\xbb\xbf")


def _iter_delimited(path: Path, delimiter: str, columns: Collection[str] | None) -> Iterator[Record]:
    reader = csv.reader(_iter_lines(path), delimiter=delimiter, strict=True)
    row = 1
    try:
        header = next((record for record in reader if any(cell.strip() for cell in record)), None)
        if header is None:
            raise DataError(f"{path}: the file is empty. It needs a header line and at least one row.")
        names = _check_header(header, delimiter, columns, path)
        wanted = [(index, name) for index, name in enumerate(names) if columns is None or name in columns]
        blank = 0
        row = reader.line_num + 1
        for record in reader:
            if not record:  # blank lines are accepted at the end of the file only
                blank = blank or row
            elif blank or len(record) != len(names):
                _refuse_ragged(path, blank or row, 0 if blank else len(record), len(names))
            else:
                yield row, {name: record[index] for index, name in wanted}
            row = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, row {row}: {error}. Look for a quote that is opened and never closed, or for line ends that are "
            f"neither LF nor CRLF."
        ) from error


def _refuse_ragged(path: Path, row: int, found: int, expected: int) -> None:
    if not found:
        raise DataError(f"{path}, row {row}: blank line between rows. Fill it in or remove it.")
    action = "Add the missing ones" if found < expected else "Remove the extra ones"
    raise DataError(
        f"{path}, row {row}: {found} fields where the header has {expected}. {action}, or quote text with separators."
    )


def _check_header(header: list[str], delimiter: str, columns: Collection[str] | None, path: Path) -> list[str]:
    if len(header) == 1:
        others = (("\t", "tab", ".tsv"), (",", "comma", ".csv"), (";", "semicolon", ".csv with commas"))
        for other, word, suffix in others:
            if other != delimiter and other in header[0]:
                raise DataError(f"{path}, row 1: the text is {word}-separated; save it as {suffix}.")
    names = [name.strip() or f"column_{number}" for number, name in enumerate(header, 1)]
    check_columns(names, columns, str(path))
    return names


def _iter_jsonl(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) < len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{path}, row {row}: column {repeated!r} occurs more than once. Remove one of them.")
        return record

    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    row = 0
    for row, line in enumerate(_iter_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line.strip())
        except DataError:
            raise
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, row {row}: not valid JSON ({error.msg} at character {error.colno}).") from error
        except (ValueError, RecursionError) as error:  # an endless number, or endless nesting
            raise DataError(f"{path}, row {row}: the JSON cannot be read ({error}).") from error
        if not isinstance(record, dict):
            raise DataError(f'{path}, row {row}: a JSON object such as {{"sequence": "MKT"}} is needed on each line.')
        yield row, record if columns is None else {name: record[name] for name in columns if name in record}


def _iter_fasta(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    row, record, parts = 0, None, []  # type: int, dict[str, Any] | None, list[str]
    for number, line in enumerate(_iter_lines(path), 1):
        text = line.strip()
        if text.startswith(">"):
            if record is not None:
                yield row, _pick(record, "".join(parts), columns)
            row, record, parts = number, _parse_header(text, columns, path, number), []
        elif text and record is None:
            raise DataError(f"{path}, row {number}: FASTA records start with '>'; this line belongs to none.")
        elif text:
            parts.append(text)
    if record is not None:
        yield row, _pick(record, "".join(parts), columns)


def _pick(record: dict[str, Any], sequence: str, columns: Collection[str] | None) -> dict[str, Any]:
    record["sequence"] = sequence
    return record if columns is None else {name: record[name] for name in columns if name in record}


def _parse_header(text: str, columns: Collection[str] | None, path: Path, row: int) -> dict[str, Any]:
    tokens = text[1:].split()
    record: dict[str, Any] = {"id": tokens[0] if tokens else ""}
    for token in tokens[1:]:
        name, equals, value = token.partition("=")
        if not (equals and name):
            continue
        if name in record or name == "sequence":
            if columns is None or name in columns:
                raise DataError(f"{path}, row {row}: column {name!r} occurs more than once in {text[:60]!r}.")
            continue
        record[name] = value
    return record


def _iter_parquet(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        check_columns(names, columns, str(path))
        wanted = [name for name in names if columns is None or name in columns]
        row = 0
        for batch in file.iter_batches(PARQUET_BATCH_ROWS, columns=wanted):
            for record in batch.to_pylist():
                row += 1
                yield row, record
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: not a readable Parquet file ({str(error)[:200]}). Write or copy it again.") from error
