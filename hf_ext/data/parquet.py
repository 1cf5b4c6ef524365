"""Parquet: damage is a DataError with file, row group and row, never an exception of Arrow's, and loses no row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import DataError
from .contents import NUM_FIRST_BYTES, other_content
from .names import check_columns, show_name

BATCH_ROWS = 4096
# What pyarrow 26 raises for damaged files; ValueError is also that of Python for text and dates that are none.
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)


def iter_parquet(path: Path, columns: Collection[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, {column: value}), rows counted from 1.

    Page checksums are verified where the file has them (`pyarrow.parquet.write_table(..., write_page_checksum=True)`).
    Without them a flipped bit of a stored number is another number, which nobody can see.

    Raises:
        DataError: damaged, encrypted, no Parquet at all, fewer or more rows than its footer says, text that is not
            UTF-8, or a wanted column that is missing or holds bytes.
    """
    place = _Place()
    with _open(path, place) as table:
        names = table.schema_arrow.names
        check_columns(names, columns, str(path))
        wanted = [name for name in names if columns is None or name in columns]
        if columns is not None:
            _check_types(table.schema_arrow, wanted, path)
        # `metadata.row_group(n).column(m)` is not looked at: of a damaged footer pyarrow 26 aborts the process.
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        if sum(sizes) != table.metadata.num_rows:
            raise ValueError(f"row groups of {sizes} rows for {table.metadata.num_rows} rows")
        for number, size in enumerate(sizes):
            place.group, end = f", row group {number + 1}", place.row + size
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[number], columns=wanted):
                batch.validate(full=True)
                for record in batch.to_pylist():
                    place.row += 1
                    yield place.row, record
            if place.row != end:
                raise ValueError(f"it ends after row {place.row}, the footer says {end}")


def parquet_columns(path: Path) -> list[str]:
    """Returns the names of a file's columns; DataError where its footer is damaged."""
    with _open(path, _Place()) as table:
        return list(table.schema_arrow.names)


@dataclass
class _Place:
    """How far reading has come."""

    group: str = ""
    row: int = 0


@contextmanager
def _open(path: Path, place: _Place) -> Iterator[pq.ParquetFile]:
    """The file, every damage found inside as a DataError that says how far reading had come."""
    try:
        with open(path, "rb") as file:
            if wrong := other_content(file.read(NUM_FIRST_BYTES), is_parquet=True):
                raise DataError(f"{path}: {wrong}")
        with pq.ParquetFile(path, page_checksum_verification=True) as table:
            yield table
    except DataError:
        raise
    except _DAMAGE as error:
        after = f" after row {place.row}" if place.row else ""
        raise DataError(
            f"{path}{place.group}: not a readable Parquet file{after} ({_one_line(error)}). Write or copy it again."
        ) from error


def _check_types(schema: pa.Schema, wanted: list[str], path: Path) -> None:
    for name in wanted:
        kind = schema.field(name).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            raise DataError(f"{path}: column '{show_name(name)}' holds bytes ({kind}). Store it as text (string).")


def _one_line(error: BaseException) -> str:
    return ascii(" ".join(str(error).split())[:200])[1:-1]
