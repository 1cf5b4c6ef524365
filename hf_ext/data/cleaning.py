"""What happens to every row, in a table or in a stream: clean, parse the label, and refuse or drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from .arguments import DataArguments
from .columns import as_array, as_text, check_columns, distinct
from .labels import describe_classes, parse_labels
from .proteins import clean_chains, remedy_if_missing
from .reading import SOURCE_ROW
from .row_errors import NO_SPLIT, RowError, append_rejected, check_rejected, find_rows, refuse
from .splits import canonical_split


@dataclass(frozen=True)
class CleanRows:
    """The accepted rows as a `table`, and what was done to get there: `changes` counts rows by column and kind."""

    table: pa.Table
    num_read: int
    errors: list[RowError]
    changes: dict[str, dict[str, int]]


@dataclass(frozen=True)
class RowSchema:
    """Everything that decides about a single row; pure, and picklable for data-loader workers.

    Args:
        args: of the data.
        needs_labels: whether rows are read with their labels.
        needs_splits: False for rows that a model, which is trained already, predicts or is scored on.
    """

    args: DataArguments
    needs_labels: bool
    needs_splits: bool = True

    @property
    def groups(self) -> list[str]:
        """Columns that hold rows together, none of whose cells may be empty."""
        args = self.args
        is_resampled = args.interval_by != "rows" and (self.needs_splits or self.needs_labels)
        held_out = args.split_group_column if self.needs_splits else None
        names = (args.group_column, held_out, args.interval_by if is_resampled else None)
        return [name for name in dict.fromkeys(names) if name and name not in args.sequence_columns]

    @property
    def split_column(self) -> str | None:
        """The column that says train, validation or test, where rows are split."""
        return self.args.split_column if self.needs_splits else None

    @property
    def text_columns(self) -> list[str]:
        """Columns that are kept as text: groups, id and split."""
        names = (*self.groups, self.args.id_column, self.split_column)
        return [name for name in dict.fromkeys(names) if name and name not in self.args.sequence_columns]

    @property
    def needed(self) -> list[str]:
        """Every column that must be read."""
        labels = [self.args.label_column, self.args.censor_column] if self.needs_labels else []
        names = (*self.args.sequence_columns, *labels, *self.text_columns)
        return [name for name in dict.fromkeys(names) if name]

    def check_columns(self, names: Sequence[str], path: str) -> None:
        """DataError that names what is missing of `needed`, the nearest column and all that a table has."""
        check_columns([name for name in names if name != SOURCE_ROW], self.needed, path)

    def clean(self, table: pa.Table, path: str) -> CleanRows:
        """Cleans and parses; rows with any error are left out of `table` and listed in `errors`.

        Args:
            table: n rows with `needed` and `source_row`.
            path: the file, for messages.

        Raises:
            DataError: labels that are classes.
        """
        args, rows = self.args, table[SOURCE_ROW].to_numpy()
        chains = {name: table[name] for name in args.sequence_columns}
        remedy = remedy_if_missing(args.sequence_columns, self.needs_labels, self.needs_splits)
        columns, errors, changes = clean_chains(chains, args, rows, remedy)
        if self.needs_labels:
            errors += self._add_labels(columns, table, rows, path)
        for name in self.text_columns:
            columns[name] = as_text(table[name])
            errors += self._check_text(columns[name], name, rows)
        columns[SOURCE_ROW] = table[SOURCE_ROW].cast(pa.int64())
        errors.sort(key=lambda error: error.row)
        result = pa.table(columns)
        if errors:
            result = result.filter(pa.array(~np.isin(rows, [error.row for error in errors])))
        return CleanRows(result, len(table), errors, changes)

    def _add_labels(self, columns: dict[str, Any], table: pa.Table, rows: np.ndarray, path: str) -> list[RowError]:
        name, mark_column = self.args.label_column, self.args.censor_column
        marks = table[mark_column] if mark_column else None
        parsed = parse_labels(table[name], name, rows, marks=marks, mark_column=mark_column or "")
        if not np.isfinite(parsed.labels).any() and (problem := describe_classes(table[name])):
            raise DataError(f"{path}, column {name!r}: {problem}")
        columns |= {"label": pa.array(parsed.labels), "bound": pa.array(parsed.bounds)}
        return parsed.errors

    def _check_text(self, column: pa.ChunkedArray, name: str, rows: np.ndarray) -> list[RowError]:
        """Names are one line each: in a CSV, a line end is mostly what stray quotes made of several rows."""
        found, is_group, is_split = distinct(column), name in self.groups, name == self.split_column
        refused = {}
        for one, text in enumerate(found.cells.to_pylist()):
            if text and ("\n" in text or "\r" in text):
                refused[one] = ("a line end inside the text", "Write it on one line; look for stray quotes, too.")
            elif is_group and not (text and text.strip()):
                refused[one] = ("the group is missing", "Name the group, or leave the row out.")
            elif is_split and canonical_split(text) is None:
                remedy = "Use train, valid (or validation, val, dev) or test, or leave such rows out of the file."
                refused[one] = (NO_SPLIT, remedy)
        return find_rows(refused, found, name, rows)


class StreamRows:
    """`RowSchema` as the batched map function of a stream: raises at the first refused batch, or drops and records.

    With "drop", refused values are appended to the file `rejected` as they are met, each once per process
    (with several data-loader workers a row can be listed once per worker).
    """

    def __init__(self, schema: RowSchema, path: str, bad_rows: str, rejected: Path | None) -> None:
        self.schema, self.path, self.bad_rows = schema, path, bad_rows
        self.rejected = check_rejected(rejected, bad_rows)
        self.seen: set[tuple[int, str]] = set()

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        self.schema.check_columns([*batch], self.path)
        cleaned = self.schema.clean(pa.table({name: as_array(values) for name, values in batch.items()}), self.path)
        new = [(self.path, error) for error in cleaned.errors if (error.row, error.column) not in self.seen]
        self.seen.update((error.row, error.column) for _, error in new)
        refuse(new, self.bad_rows)
        if new and self.rejected is not None:
            append_rejected(self.rejected, new)
        return cleaned.table.to_pydict()
