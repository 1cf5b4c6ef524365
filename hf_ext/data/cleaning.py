"""What happens to every row, in a table or in a stream: filter, clean, parse the label, and refuse or drop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import DataError
from .arguments import DataArguments
from .columns import as_array, as_text, distinct
from .filters import Predicate, parse_filter
from .labels import name_label_kind, parse_labels
from .missing_chains import remedy_if_missing
from .names import missing_columns
from .proteins import LEAVE_OUT, ResiduePolicy, clean_chains
from .row_errors import RowError, append_rejected, check_rejected, find_rows, refuse_or_drop
from .sources import SOURCE_ROW
from .splits import canonical_split


@dataclass(frozen=True)
class CleanRows:
    """The accepted rows as a `table`, and what was done to get there.

    `changes` counts rows by column and kind; `odd_splits` counts, over all rows, the values of the split column that
    name no split.
    """

    table: pa.Table
    num_read: int
    num_filtered: int
    errors: list[RowError]
    changes: dict[str, dict[str, int]]
    odd_splits: Counter[str]


@dataclass(frozen=True)
class RowSchema:
    """Everything that decides about a single row; pure, and picklable for data-loader workers.

    Args:
        sequence_columns: cleaned with `policy`.
        text_columns: kept as text (id, group, split); those in `required` must not be empty.
        label_column: None where labels are not needed.
        missing_chains: sequence columns that may be empty.
        if_missing: the remedy told for those that may not.
    """

    sequence_columns: tuple[str, ...]
    text_columns: tuple[str, ...]
    required: tuple[str, ...]
    split_column: str | None
    label_column: str | None
    censor_column: str | None
    policy: ResiduePolicy
    predicate: Predicate | None
    missing_chains: tuple[str, ...] = ()
    if_missing: str = LEAVE_OUT

    @classmethod
    def from_arguments(cls, args: DataArguments, needs_labels: bool, needs_splits: bool = True) -> RowSchema:
        """Reads the rules off the arguments; raises ArgumentError for a malformed filter."""
        held_out = args.split_group_column if needs_splits else None
        resampled = args.interval_by if needs_splits or needs_labels else None
        groups = [name for name in (args.group_column, held_out, resampled if resampled != "rows" else None) if name]
        splits = [args.split_column] if args.split_column and needs_splits else []
        texts = [*groups, *([args.id_column] if args.id_column else []), *splits]
        # A masked language model does without no chain; predictions are made by a model that learned to, or did not.
        knows_chains = needs_labels or not needs_splits
        if_missing = remedy_if_missing(args.sequence_columns, is_trained=not (needs_labels and needs_splits))
        return cls(
            sequence_columns=tuple(args.sequence_columns),
            text_columns=tuple(name for name in dict.fromkeys(texts) if name not in args.sequence_columns),
            required=tuple(name for name in dict.fromkeys(groups) if name not in args.sequence_columns),
            split_column=args.split_column if needs_splits else None,
            label_column=args.label_column if needs_labels else None,
            censor_column=args.censor_column if needs_labels else None,
            policy=args.residue_policy,
            predicate=parse_filter(args.filter) if args.filter is not None else None,
            missing_chains=tuple(args.missing_chains),
            if_missing=if_missing if knows_chains else LEAVE_OUT,
        )

    @property
    def needed(self) -> tuple[str, ...]:
        """Every column that must be read."""
        labels = [name for name in (self.label_column, self.censor_column) if name]
        filtered = self.predicate.names if self.predicate else ()
        return tuple(dict.fromkeys([*self.sequence_columns, *labels, *self.text_columns, *filtered]))

    def check_columns(self, names: Sequence[str], path: str) -> None:
        """DataError that names what is missing of `needed`, the nearest column and all that a table has."""
        names = [name for name in names if name != SOURCE_ROW]
        if missing := [name for name in self.needed if name not in names]:
            raise DataError(f"{path}: {missing_columns(missing, names)}")

    def clean(self, table: pa.Table, path: str) -> CleanRows:
        """Filters, cleans and parses; rows with any error are left out of `table` and listed in `errors`.

        Args:
            table: n rows with `needed` and `source_row`.
            path: the file, for messages.

        Raises:
            DataError: text in a column that the filter compares with numbers, or labels that are classes.
        """
        num_read = len(table)
        if self.predicate is not None:
            mask = self.predicate.mask(table, table[SOURCE_ROW].to_numpy(), path)
            table = table.filter(pa.array(mask))
        rows = table[SOURCE_ROW].to_numpy()
        chains = {name: table[name] for name in self.sequence_columns}
        cleaned = clean_chains(
            chains, self.policy, rows, missing_chains=self.missing_chains, if_missing=self.if_missing
        )
        columns: dict[str, Any] = {name: one.sequences for name, one in cleaned.items()}
        errors = [error for one in cleaned.values() for error in one.errors]
        if self.label_column is not None:
            columns |= self._parse_labels(table, rows, path, errors)
        for name in self.text_columns:
            columns[name] = as_text(table[name])
            errors += self._check_text(columns[name], name, rows)
        columns[SOURCE_ROW] = table[SOURCE_ROW].cast(pa.int64())
        errors.sort(key=lambda error: error.row)
        result = pa.table(columns)
        if errors:
            refused = [*{error.row for error in errors}]
            result = result.filter(pa.array(~np.isin(rows, refused)))
        changes = {name: one.changes for name, one in cleaned.items() if one.changes}
        odd_splits = self._odd_splits(columns.get(self.split_column or ""))
        return CleanRows(result, num_read, num_read - len(rows), errors, changes, odd_splits)

    def _parse_labels(self, table: pa.Table, rows: np.ndarray, path: str, errors: list[RowError]) -> dict[str, Any]:
        name, marks = str(self.label_column), table[self.censor_column] if self.censor_column else None
        parsed = parse_labels(table[name], name, rows, marks=marks, mark_column=self.censor_column or "")
        if not np.isfinite(parsed.labels).any() and (kind := name_label_kind(table[name])):
            raise DataError(f"{path}, column {name!r}: {kind}, which hf_ext does not train yet. Give numbers.")
        errors += parsed.errors
        return {"label": pa.array(parsed.labels), "bound": pa.array(parsed.bounds)}

    def _check_text(self, column: pa.ChunkedArray, name: str, rows: np.ndarray) -> list[RowError]:
        """Names are one line each: in a CSV, a line end is mostly what stray quotes made of several rows."""
        found = distinct(column)
        refused = {}
        for one, text in enumerate(found.cells.to_pylist()):
            if text and ("\n" in text or "\r" in text):
                refused[one] = ("a line end inside the text", "Write it on one line; look for stray quotes, too.")
            elif name in self.required and not (text and text.strip()):
                refused[one] = ("the group is missing", "Name the group, or leave the row out.")
        return find_rows(refused, found, name, rows)

    def _odd_splits(self, column: pa.ChunkedArray | None) -> Counter[str]:
        if column is None:
            return Counter()
        found = distinct(column)
        counts = zip(found.cells.to_pylist(), np.bincount(found.number).tolist())
        return Counter({value or "": num for value, num in counts if canonical_split(value) is None})


class StreamRows:
    """`RowSchema` as the batched map function of a stream: raises at the first refused batch, or drops and records.

    With "drop", refused values are appended to the file `rejected` as they are met, each once per process
    (with several data-loader workers a row can be listed once per worker).
    """

    def __init__(self, schema: RowSchema, path: str, bad_rows: str, rejected: Path | None) -> None:
        self.schema, self.path, self.bad_rows = schema, path, bad_rows
        self.rejected = check_rejected(rejected) if bad_rows == "drop" else None
        self.seen: set[tuple[int, str]] = set()

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        self.schema.check_columns([*batch], self.path)
        cleaned = self.schema.clean(pa.table({name: as_array(values) for name, values in batch.items()}), self.path)
        if self.bad_rows == "error":
            refuse_or_drop([(self.path, error) for error in cleaned.errors], "error", None, 0)
        new = [error for error in cleaned.errors if (error.row, error.column) not in self.seen]
        if new:
            self.seen.update((error.row, error.column) for error in new)
            append_rejected(check_rejected(self.rejected), [(self.path, error) for error in new])
        return cleaned.table.to_pydict()
