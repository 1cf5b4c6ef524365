"""Readers of local files: each yields (row, {column: value}); structural faults are DataErrors with file and row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError
from .contents import check_regular
from .delimited import iter_delimited
from .json_list import iter_json_list
from .jsonl import iter_jsonl
from .lines import Lines
from .names import show_name
from .parquet import iter_parquet

Record = tuple[int, dict[str, Any]]
DELIMITERS = {".csv": ",", ".tsv": "\t"}
FASTA_SUFFIXES = (".fasta", ".fa", ".faa")
JSON_SUFFIXES = (".jsonl", ".ndjson")
JSON_LIST = ".json"
SUFFIXES = (*DELIMITERS, *FASTA_SUFFIXES, *JSON_SUFFIXES, JSON_LIST, ".parquet")


def file_format(path: Path) -> str:
    """Returns the format suffix of `path` (".csv" for `x.csv.gz`), or "" where it is none of `SUFFIXES`."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES and suffixes[-1] != ".parquet" else ""
    return suffixes[-1] if suffixes and suffixes[-1] in SUFFIXES else ""


def iter_records(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    """Yields every record as (row, {column: value}), reading in constant memory; a JSON list is read whole.

    Text formats give text; JSON and Parquet give their own types. `row` is the line where the record starts (the header
    of a CSV is line 1); for Parquet and a JSON list it counts records from 1.

    Args:
        path: a file whose `file_format` is known.
        columns: the columns wanted, or None for all. CSV, TSV and Parquet raise where one is missing; JSON and FASTA
            leave it out of the record.

    Raises:
        DataError: see `sources.read_parts`.
    """
    check_regular(path)
    kind = file_format(path)
    if kind in DELIMITERS:
        return iter_delimited(path, DELIMITERS[kind], columns)
    if kind in JSON_SUFFIXES:
        return iter_jsonl(path, columns)
    if kind == JSON_LIST:
        return iter_json_list(path, columns)
    if kind == ".parquet":
        return iter_parquet(path, columns)
    return _iter_fasta(path, columns)


def _iter_fasta(path: Path, columns: Collection[str] | None) -> Iterator[Record]:
    row, record, parts = 0, None, []  # type: int, dict[str, Any] | None, list[str]
    lines = Lines(path)
    for line in lines:
        text, number = line.strip(), lines.number
        if text.startswith(">"):
            if record is not None:
                yield row, _pick(record, "".join(parts), columns)
            lines.begin_record()
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
    if "\r" in text:
        raise DataError(f"{path}, row {row}: the line ends are CR; save the file with LF or CRLF.")
    tokens = text[1:].split()
    record: dict[str, Any] = {"id": tokens[0] if tokens else ""}
    for token in tokens[1:]:
        name, equals, value = token.partition("=")
        if not (equals and name):
            continue
        if name in record or name == "sequence":
            if columns is None or name in columns:
                raise DataError(
                    f"{path}, row {row}: column '{show_name(name)}' occurs more than once in '{show_name(text)}'."
                )
            continue
        record[name] = value
    return record
