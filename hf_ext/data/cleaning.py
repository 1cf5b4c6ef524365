"""What happens to every row, in a table or in a stream: clean its sequences, parse its label, and refuse or drop.

Labels are numbers, and numbers that are only known as a bound (`<=7`, `>10.5`); what stands for no value is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from ..errors import DataError
from .arguments import DataArguments
from .columns import Distinct, as_array, as_text, check_columns, distinct
from .proteins import clean_chains, remedy_if_missing
from .reading import SOURCE_ROW
from .row_errors import NO_SPLIT, RowError, append_rejected, find_rows, is_missing, refuse, shorten
from .splits import canonical_split

# ASCII digits, a point, an exponent; nothing else that Python would take for a number. Linear: no digit can be matched
# in two places.
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
MAX_ABS_LABEL = 1e30  # squared error of larger ones overflows float32
UNSAID = 2  # by a mark: whether its label is a bound
SIGNS = {"<": -1, "<=": -1, ">": 1, ">=": 1, "=": 0}
# 1 marks a label the assay could not go below, so the true value is at or below it.
MARKS = {"": UNSAID, "0": 0, "0.0": 0, "false": 0, "1": -1, "1.0": -1, "true": -1, **SIGNS}

# Numbers that other programs write where nothing was measured.
NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 99.99, 999.9, 999.99, 9999.9, 9999.99)
MIN_OTHERS = 3  # distinct labels, which say where measurements lie
FAR = 10.0  # ranges of the other labels between them and a placeholder
MAX_RATIO = 100.0  # of positive labels: where they spread further, such as Kd in nM, 999 may be measured

_LABEL = re.compile(rf"(?:(<=|>=|<|>|=)\s*)?({NUMBER})").fullmatch  # of stripped text, and linear
_BEGINS_NUMBER = re.compile(r"\s*[0-9<>=+.\u2264\u2265-]").match


@dataclass(frozen=True)
class CleanRows:
    """The accepted rows as a `table`, and what was done to get there: `changes` counts rows by column and kind."""

    table: pa.Table
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
        names = (args.group_column, args.split_group_column if self.needs_splits else None)
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

    def clean(self, data: Dataset | pa.Table, path: str) -> CleanRows:
        """Cleans and parses; rows with any error are left out of `table` and listed in `errors`.

        Args:
            data: n rows with `needed` and `source_row`.
            path: the file, for messages.

        Raises:
            DataError: a column is missing, or labels are classes.
        """
        check_columns([name for name in data.column_names if name != SOURCE_ROW], self.needed, path)
        args, names = self.args, [*self.needed, SOURCE_ROW]
        table = data.select(names) if isinstance(data, pa.Table) else data.select_columns(names).with_format("arrow")[:]
        rows = table[SOURCE_ROW].to_numpy()
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
        return CleanRows(result, errors, changes)

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


def clean_stream(schema: RowSchema, stream: IterableDataset, path: str, rejected: Path | None) -> IterableDataset:
    """`RowSchema.clean` as a map over a stream, which raises at the first refused batch, or drops and records.

    With "drop", refused values are appended to the file `rejected` as they are met, each once per process (with several
    data-loader workers a row can be listed once per worker).
    """
    types = {name: Value("string") for name in schema.args.sequence_columns}
    if schema.needs_labels:
        types |= {"label": Value("float64"), "bound": Value("int8")}
    types |= {name: Value("string") for name in schema.text_columns} | {SOURCE_ROW: Value("int64")}
    function = _StreamRows(schema, path, rejected)
    return stream.map(function, batched=True, remove_columns=[*schema.needed, SOURCE_ROW], features=Features(types))


class _StreamRows:
    """A class so that data-loader workers can receive it."""

    def __init__(self, schema: RowSchema, path: str, rejected: Path | None) -> None:
        self.schema, self.path, self.rejected = schema, path, rejected
        self.seen: set[tuple[int, str]] = set()

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        table = pa.table({name: as_array(values) for name, values in batch.items()})
        cleaned = self.schema.clean(table, self.path)
        new = [(self.path, error) for error in cleaned.errors if (error.row, error.column) not in self.seen]
        self.seen.update((error.row, error.column) for _, error in new)
        refuse(new, self.schema.args.bad_rows)
        if new and self.rejected is not None:
            append_rejected(self.rejected, new)
        return cleaned.table.to_pydict()


class ParsedLabels(NamedTuple):
    """`labels` float64 (n,), NaN where refused; `bounds` int8 (n,): -1 true value <= label, 0 exact, +1 >= label."""

    labels: np.ndarray
    bounds: np.ndarray
    errors: list[RowError]


class Label(NamedTuple):
    """A cell as `value` (NaN where refused) and `bound`; or the `rule` that refuses it."""

    value: float = math.nan
    bound: int = 0
    rule: str = ""
    remedy: str = ""


def parse_labels(
    values: pa.ChunkedArray | Sequence[Any],
    column: str,
    rows: np.ndarray,
    *,
    marks: pa.ChunkedArray | Sequence[Any] | None = None,
    mark_column: str = "",
) -> ParsedLabels:
    """Turns cells into finite numbers and bounds; refuses what would poison a loss, naming the row.

    Args:
        values: n cells; numbers, or text such as `7.3`, `<=7`, `>10.5`.
        column: the label column's name, used in errors.
        rows: (n,) the row of each value in its file.
        marks: n cells of the censor column, or None: `<`, `<=`, `>`, `>=`, `=`, empty, or 0/1, where 1 says that the
            true value is at or below the label.
        mark_column: its name.

    Returns:
        `ParsedLabels`. Refused per row: missing, other text (digits of other scripts and 1_000 too), beyond +-1e30, a
        missing value written as nines (`find_placeholders`), an unknown mark, and a mark that contradicts the label's
        own sign.

    Cost: each distinct cell is parsed once; 0.3 s for 100,000 distinct ones.
    """
    found = distinct(values)
    judged = [judge_label(cell) for cell in found.cells.to_pylist()]
    labels = np.array([one.value for one in judged], np.float64)[found.number]
    bounds = np.array([one.bound for one in judged], np.int8)[found.number]
    refused = {number: (one.rule, one.remedy) for number, one in enumerate(judged) if one.rule}
    errors = find_rows(refused, found, column, rows)
    if marks is not None:
        bounds, of_marks = _merge_marks(distinct(marks), bounds, np.isfinite(labels), mark_column, rows)
        errors += of_marks
    return ParsedLabels(labels, bounds, errors + find_placeholders(labels, bounds, found, column, rows))


def judge_label(cell: object) -> Label:
    """A single cell by the rules of `parse_labels` that need no other one."""
    match = _LABEL(cell.strip().replace("\u2264", "<=").replace("\u2265", ">=")) if isinstance(cell, str) else None
    if match:
        bound, value = SIGNS.get(match[1], 0), float(match[2])
    elif is_missing(cell):
        return Label(rule="the label is missing", remedy="Fill it in, or leave the row out.")
    elif isinstance(cell, bool) or not isinstance(cell, int | float):
        remedy = "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7."
        return Label(rule="the label is not a number", remedy=remedy)
    else:
        bound, value = 0, float(cell)
    if abs(value) > MAX_ABS_LABEL:
        return Label(rule="the label is larger than 1e30", remedy="Change the unit, or use a logarithm.")
    return Label(value, bound)


def _merge_marks(
    marks: Distinct, bounds: np.ndarray, is_label: np.ndarray, column: str, rows: np.ndarray
) -> tuple[np.ndarray, list[RowError]]:
    """The bounds by label and mark together, and errors of marks that are none, or say otherwise than the label."""
    cells = marks.cells.to_pylist()
    known = [MARKS.get("" if is_missing(cell) else str(cell).strip().lower()) for cell in cells]
    given = np.array([UNSAID if one is None else one for one in known], np.int8)[marks.number]
    is_unknown = np.array([one is None for one in known], bool)[marks.number] & is_label
    contradicts = (given != UNSAID) & (bounds != 0) & (given != bounds) & is_label
    remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
    errors = [
        RowError(int(rows[row]), column, shorten(cells[marks.number[row]]), rule, remedy)
        for is_wrong, rule in (
            (is_unknown, "not a censoring mark"),
            (contradicts, "the censoring mark contradicts the sign written in the label"),
        )
        for row in np.flatnonzero(is_wrong)
    ]
    return np.where(given == UNSAID, bounds, given), errors


def find_placeholders(
    labels: np.ndarray, bounds: np.ndarray, values: Distinct, column: str, rows: np.ndarray
) -> list[RowError]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels; a bound (`<=999`) is none.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels spread over two decades, as concentrations do.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    others = np.unique(labels[np.isfinite(labels) & ~is_nines]) if is_nines.any() else labels[:0]
    if len(others) < MIN_OTHERS:
        return []
    low, high = float(others[0]), float(others[-1])
    is_outside = (labels < low) | (labels > high)
    may_be_measured = (labels > 0) & (low > 0) & (high > MAX_RATIO * low)
    is_far = (np.maximum(labels - high, low - labels) > FAR * (high - low)) & ~may_be_measured
    rule = f"the label reads as a missing value, all others lie between {low:g} and {high:g}"
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    found = np.flatnonzero(is_nines & is_outside & (is_far | ((labels < 0) & (low >= 0))))
    texts = [str(values.cells[values.number[i]].as_py()).strip() for i in found]
    return [RowError(int(rows[i]), column, text, rule, remedy) for i, text in zip(found, texts)]


def describe_classes(values: pa.ChunkedArray | Sequence[Any]) -> str:
    """What labels are that are no numbers, and what to do with them; empty where they seem to be meant as numbers."""
    texts = [str(cell) for cell in distinct(values).cells.to_pylist() if not is_missing(cell)]
    shown = " and ".join(shorten(text) for text in texts[:2])
    if any(re.search(r"[;|\[]|[A-Za-z],", text) for text in texts):
        return f"{shown} look like several labels in one cell. Give a column with one number per row."
    if not texts or any(map(_BEGINS_NUMBER, texts)):
        return ""
    return (
        f"{shown} look like names of classes, which `hf-ext train` does not train yet: it predicts numbers.\n"
        "  Two classes: write them as 0 and 1; --binder_threshold 0.5 adds recall, precision and F1.\n"
        "  Classes as such: FastTrainer trains them in Python, see docs/library.md."
    )
