"""What happens to every row, in a table or in a stream: clean its sequences, read its label, and refuse or drop.

Rows that cannot be used are all in one error, with file, row, column, value, rule and remedy, or in one file.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from ..errors import DataError
from ..files import write_cell
from ..labels import (
    Checked,
    LabelKind,
    LabelTable,
    Number,
    RowError,
    as_array,
    as_text,
    check_cells,
    check_number,
)
from .arguments import KEPT, DataArguments
from .columns import check_columns, read_table
from .proteins import Changes, clean_chains
from .reading import SOURCE_ROW
from .splits import canonical_split
from .variants.wild_type import read_mutations, read_wild_type

REJECTED_FILE = "rejected_rows.csv"
REJECTED_HEADER = ["row", "column", "value", "rule", "remedy", "file"]
NO_SPLIT = "names no split"
MASKS = "--mask_file"  # what the column of its masks is called
MAX_LISTED = 20
MIN_LISTED = 3  # of each kind

Located = tuple[str, RowError]  # (file, error)


@dataclass(frozen=True)
class CleanRows:
    """The accepted rows as a `table`, and what was done to get there: `changes` counts rows by column and kind."""

    table: pa.Table
    errors: list[RowError]
    changes: Changes


@dataclass(frozen=True)
class RowSchema:
    """Everything that decides about a single row; pure, and picklable for data-loader workers.

    Args:
        args: of the data.
        needs_labels: whether rows are read with their labels.
        needs_splits: False for rows that a model, which is trained already, predicts or is scored on.
        kind: of the labels, before rows are cleaned.
    """

    args: DataArguments
    needs_labels: bool
    needs_splits: bool = True
    kind: LabelKind = field(default_factory=Number)

    @property
    def groups(self) -> list[str]:
        """Columns that hold rows together, none of whose cells may be empty."""
        args = self.args
        names = [args.group_column]
        if self.needs_splits:
            names += [args.split_group_column, args.fold.column if args.fold else None]
        return [name for name in dict.fromkeys(names) if name and name not in args.sequence_columns]

    @property
    def text_columns(self) -> list[str]:
        """Columns that are kept as text: groups, id, split, and those that a model reads beside sequences."""
        names = [*self.groups, self.args.id_column, *self.args.number_columns]
        if self.needs_splits:
            names.append(self.args.split_column)
        return [name for name in dict.fromkeys(names) if name and name not in self.args.sequence_columns]

    @property
    def mask_column(self) -> str | None:
        """Column of masks of residues, or None."""
        return MASKS if self.args.mask_file else self.args.mask_column

    @property
    def needed(self) -> list[str]:
        """Every column that must be read."""
        args = self.args
        labels = [*args.label_column, args.censor_column, self.mask_column] if self.needs_labels else []
        filtered = [name for one in args.read_filters().values() for name in one.columns]
        made, *sequences = args.sequence_columns
        names = (args.mutation_column or made, *sequences, *labels, *self.text_columns, *filtered)
        return [name for name in dict.fromkeys(names) if name and name != SOURCE_ROW]

    def clean(self, data: Dataset | pa.Table, path: str) -> CleanRows:
        """Cleans and parses; rows with any error are left out of `table` and listed in `errors`.

        Args:
            data: n rows with `needed` and `source_row`.
            path: the file, for messages.

        Raises:
            DataError: a column is missing, or what should be numbers are names, for labels or a filter.
        """
        check_columns([name for name in data.column_names if name != SOURCE_ROW], self.needed, path)
        args = self.args
        names = [*self.needed, SOURCE_ROW]
        table = data.select(names) if isinstance(data, pa.Table) else read_table(data, names)
        rows = table[SOURCE_ROW].to_numpy()
        made = args.mutation_column and args.sequence_columns[0]
        chains = {name: table[name] for name in args.sequence_columns if name != made}
        columns, errors, changes = clean_chains(chains, args, rows)
        if made and args.mutation_column:
            substitute = partial(read_mutations, wild_type=read_wild_type(args.wild_type))
            mutated = check_cells(as_text(table[args.mutation_column]), substitute, args.mutation_column, rows)
            columns[made] = mutated.to_rows(pa.string())
            errors += mutated.errors
        if self.needs_labels:
            read = LabelTable(table, rows, columns[args.sequence_columns[0]], self.mask_column, args.censor_column)
            labels, refused = self.kind.read(read)
            columns |= labels
            errors += refused
        for name in self.text_columns:
            check = partial(self._check_text, name)
            checked = check_cells(as_text(table[name]), check, name, rows)
            columns[name] = checked.to_rows(pa.string())
            errors += checked.errors
        if one := args.read_filters().get("filter_train"):
            columns[KEPT] = one.find(table, rows, path)
        columns[SOURCE_ROW] = table[SOURCE_ROW].cast(pa.int64())
        errors.sort(key=lambda error: error.row)
        result = pa.table(columns)
        if errors:
            is_sound = ~np.isin(rows, [error.row for error in errors])
            result = result.filter(pa.array(is_sound))
        return CleanRows(result, errors, changes)

    def _check_text(self, name: str, text: str | None) -> Checked:
        """Names are one line each: in a CSV, a line end is mostly what stray quotes made of several rows."""
        if text and ("\n" in text or "\r" in text):
            return Checked(text, "a line end inside the text", "Write it on one line; look for stray quotes, too.")
        if name in self.groups and not (text and text.strip()):
            return Checked(text, "the group is missing", "Name the group, or leave the row out.")
        if name == self.args.split_column and canonical_split(text) is None:
            remedy = "Use train, valid (or validation, val, dev), test, or unused, which leaves the row out."
            return Checked(text, NO_SPLIT, remedy)
        if name in self.args.numeric_columns:
            return check_number(text)._replace(value=text)
        return Checked(text)


def clean_stream(schema: RowSchema, stream: IterableDataset, path: str, rejected: Path | None) -> IterableDataset:
    """Maps `RowSchema.clean` over a stream; raises at the first refused batch, or drops and records.

    With "drop", refused values are appended to the file `rejected` as they are met, each once per process (with several
    data-loader workers a row can be listed once per worker).
    """
    types = {name: Value("string") for name in schema.args.sequence_columns}
    if schema.needs_labels:
        types |= Features.from_arrow_schema(pa.schema([*schema.kind.arrow_columns.items()]))
    types |= {name: Value("string") for name in schema.text_columns}
    types[SOURCE_ROW] = Value("int64")
    function = _StreamRows(schema, path, rejected)
    return stream.map(function, batched=True, remove_columns=[*schema.needed, SOURCE_ROW], features=Features(types))


@dataclass
class _StreamRows:
    """A class so that data-loader workers can receive it."""

    schema: RowSchema
    path: str
    rejected: Path | None
    seen: set[tuple[int, str]] = field(default_factory=set)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        table = pa.table({name: as_array(values) for name, values in batch.items()})
        cleaned = self.schema.clean(table, self.path)
        new = [(self.path, error) for error in cleaned.errors if (error.row, error.column) not in self.seen]
        self.seen.update((error.row, error.column) for _, error in new)
        refuse(new, self.schema.args.bad_rows)
        if new and self.rejected is not None:
            append_rejected(self.rejected, new)
        return cleaned.table.to_pydict()


def format_errors(located: Sequence[Located]) -> str:
    """Returns the error text: a count, then each error with file, row, column, value, rule and remedy.

    Each kind (a rule in a column of a file) has its first ones listed, 20 in all but at least 3, and the others
    counted, so that one look at the text is enough to fix the file.
    """
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for path, error in located:
        kind = (path, error.column, _rule_kind(error.rule))
        place = f"  {path}, row {error.row}, column {error.column!r}, value '{error.value}'"
        kinds.setdefault(kind, []).append(f"{place}: {error.rule}. {error.remedy}")
    lines = [f"{len(located)} value{'s' if len(located) != 1 else ''} cannot be used:"]
    shown = max(MIN_LISTED, MAX_LISTED // max(1, len(kinds)))
    for (_, column, rule), texts in [*kinds.items()][:MAX_LISTED]:
        lines += texts[:shown]
        if len(texts) > shown:
            lines.append(f"  ... and {len(texts) - shown:,} more in column {column!r}: {rule}")
    if len(kinds) > MAX_LISTED:
        lines.append(f"  ... and {len(kinds) - MAX_LISTED} more kinds")
    return "\n".join(lines)


def count_rules(errors: Iterable[RowError]) -> dict[str, int]:
    """Returns how many values each rule refused, numbers and quoted characters in the rule replaced by `...`."""
    return dict(Counter(_rule_kind(error.rule) for error in errors).most_common())


def _rule_kind(rule: str) -> str:
    words = []
    for word in rule.split():
        varies = "'" in word or any(c.isdigit() for c in word)
        words.append("..." if varies else word)
    return " ".join(words)


def refuse(located: Sequence[Located], bad_rows: str) -> None:
    """Raises DataError with all refused rows where `bad_rows` is "error"; else with those that name no split, if any.

    Which rows are tested is not for `drop` to change.
    """
    kept = [one for one in located if one[1].rule == NO_SPLIT]
    shown = located if bad_rows == "error" else kept
    if shown:
        hint = "\nFix these rows, or leave them out with --bad_rows drop." if len(kept) < len(shown) else ""
        raise DataError(format_errors(shown) + hint)


def write_rejected(path: Path, located: Sequence[Located]) -> None:
    """Lists refused values in a CSV that takes the place of an older one; OSError where it cannot be written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # every process of a run writes the same
    append_rejected(draft, located)
    os.replace(draft, path)


def append_rejected(path: Path, located: Sequence[Located]) -> None:
    """Adds refused values to a CSV, which begins with `REJECTED_HEADER`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        if handle.tell() == 0:
            writer.writerow(REJECTED_HEADER)
        for file, error in located:
            row = [error.row, error.column, error.value, error.rule, error.remedy, file]
            writer.writerow(map(write_cell, row))
