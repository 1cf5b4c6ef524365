"""What happens to every row, in a table or in a stream: clean its sequences, parse its label, and refuse or drop.

Labels are numbers, and numbers that are only known as a bound (`<=7`, `>10.5`); what stands for no value is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from ..errors import DataError
from .arguments import DataArguments
from .columns import as_array, as_text, check_columns, distinct
from .proteins import clean_chains
from .reading import SOURCE_ROW
from .row_errors import NO_SPLIT, Judged, RowError, append_rejected, is_missing, judge_cells, refuse, shorten
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
    def text_columns(self) -> list[str]:
        """Columns that are kept as text: groups, id and split."""
        names = (*self.groups, self.args.id_column, self.args.split_column if self.needs_splits else None)
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
        columns, errors, changes = clean_chains(chains, args, rows)
        if self.needs_labels:
            name, mark_column = args.label_column, args.censor_column
            marks = table[mark_column] if mark_column else None
            labels, bounds, refused = parse_labels(table[name], name, rows, marks, mark_column or "")
            if not np.isfinite(labels).any() and (problem := describe_classes(table[name])):
                raise DataError(f"{path}, column {name!r}: {problem}")
            columns |= {"label": pa.array(labels), "bound": pa.array(bounds)}
            errors += refused
        for name in self.text_columns:
            found, judged, refused = judge_cells(as_text(table[name]), partial(self._judge_text, name), name, rows)
            columns[name] = found.spread([one.value for one in judged], pa.string())
            errors += refused
        columns[SOURCE_ROW] = table[SOURCE_ROW].cast(pa.int64())
        errors.sort(key=lambda error: error.row)
        result = pa.table(columns)
        if errors:
            result = result.filter(pa.array(~np.isin(rows, [error.row for error in errors])))
        return CleanRows(result, errors, changes)

    def _judge_text(self, name: str, text: str | None) -> Judged:
        """Names are one line each: in a CSV, a line end is mostly what stray quotes made of several rows."""
        if text and ("\n" in text or "\r" in text):
            return Judged(text, "a line end inside the text", "Write it on one line; look for stray quotes, too.")
        if name in self.groups and not (text and text.strip()):
            return Judged(text, "the group is missing", "Name the group, or leave the row out.")
        if name == self.args.split_column and canonical_split(text) is None:
            remedy = "Use train, valid (or validation, val, dev) or test, or leave such rows out of the file."
            return Judged(text, NO_SPLIT, remedy)
        return Judged(text)


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


def parse_labels(
    values: pa.ChunkedArray | Sequence[Any],
    column: str,
    rows: np.ndarray,
    marks: pa.ChunkedArray | Sequence[Any] | None = None,
    mark_column: str = "",
) -> tuple[np.ndarray, np.ndarray, list[RowError]]:
    """Turns cells into finite numbers and bounds; refuses what would poison a loss, naming the row.

    Args:
        values: n cells; numbers, or text such as `7.3`, `<=7`, `>10.5`.
        column: the label column's name, used in errors.
        rows: (n,) the row of each value in its file.
        marks: n cells of the censor column, or None: `<`, `<=`, `>`, `>=`, `=`, empty, or 0/1, where 1 says that the
            true value is at or below the label.
        mark_column: its name.

    Returns:
        Labels, float64 (n,), NaN where refused; bounds, int8 (n,): -1 true value <= label, 0 exact, +1 >= label; and
        an error for each row that is refused: missing, other text (digits of other scripts and 1_000 too), beyond
        +-1e30, a missing value written as nines (`find_placeholders`), an unknown mark, and a mark that contradicts
        the label's own sign.

    Cost: each distinct cell is parsed once; 0.3 s for 100,000 distinct ones.
    """
    found, judged, errors = judge_cells(values, judge_label, column, rows)
    labels, bounds = np.array([one.value for one in judged], np.float64).reshape(-1, 2)[found.number].T
    if marks is not None:
        said, judged, refused = judge_cells(marks, _judge_mark, mark_column, rows)
        given = np.array([one.value for one in judged], np.float64)[said.number]
        rule, remedy = "the censoring mark contradicts the sign written in the label", "Correct one of them."
        wrong = np.flatnonzero((given != UNSAID) & (bounds != 0) & (given != bounds))
        shown = [shorten(said.cells[said.number[i]].as_py()) for i in wrong]
        errors += refused
        errors += [RowError(int(rows[i]), mark_column, mark, rule, remedy) for i, mark in zip(wrong, shown)]
        bounds = np.where(given == UNSAID, bounds, given)
    errors += find_placeholders(labels, bounds, column, rows)
    return labels, bounds.astype(np.int8), errors


def judge_label(cell: object) -> Judged:
    """A single cell as (label, bound), NaN where it is refused."""
    match = _LABEL(cell.strip().replace("\u2264", "<=").replace("\u2265", ">=")) if isinstance(cell, str) else None
    if match:
        bound, value = SIGNS.get(match[1], 0), float(match[2])
    elif is_missing(cell):
        return Judged((math.nan, 0), "the label is missing", "Fill it in, or leave the row out.")
    elif isinstance(cell, bool) or not isinstance(cell, int | float):
        remedy = "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7."
        return Judged((math.nan, 0), "the label is not a number", remedy)
    else:
        bound, value = 0, float(cell)
    if abs(value) > MAX_ABS_LABEL:
        return Judged((math.nan, 0), "the label is larger than 1e30", "Change the unit, or use a logarithm.")
    return Judged((value, bound))


def _judge_mark(cell: object) -> Judged:
    mark = "" if is_missing(cell) else str(cell).strip().lower()
    if mark in MARKS:
        return Judged(MARKS[mark])
    remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
    return Judged(UNSAID, "not a censoring mark", remedy)


def find_placeholders(labels: np.ndarray, bounds: np.ndarray, column: str, rows: np.ndarray) -> list[RowError]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels; a bound (`<=999`) is none.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels spread over two decades, as concentrations do.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    others = np.unique(labels[np.isfinite(labels) & ~is_nines]) if is_nines.any() else labels[:0]
    if len(others) < MIN_OTHERS:
        return []
    low, high = float(others[0]), float(others[-1])
    may_be_measured = (labels > 0) & (low > 0) & (high > MAX_RATIO * low)
    is_far = (np.maximum(labels - high, low - labels) > FAR * (high - low)) & ~may_be_measured
    rule = f"the label reads as a missing value, all others lie between {low:g} and {high:g}"
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    found = np.flatnonzero(is_nines & (is_far | ((labels < 0) & (low >= 0))))
    return [RowError(int(rows[i]), column, f"{labels[i]:g}", rule, remedy) for i in found]


def describe_classes(values: pa.ChunkedArray | Sequence[Any]) -> str:
    """What labels are that are no numbers, and what to do with them; empty where they seem to be meant as numbers."""
    texts = [str(cell) for cell in distinct(values).cells.to_pylist() if not is_missing(cell)]
    shown = " and ".join(shorten(text) for text in texts[:2])
    if not texts or any(map(_BEGINS_NUMBER, texts)):
        return ""
    return (
        f"{shown} look like names of classes, which `hf-ext train` does not train yet: it predicts numbers.\n"
        "  Two classes: write them as 0 and 1; --binder_threshold 0.5 adds recall, precision and F1.\n"
        "  Classes as such: FastTrainer trains them in Python, see docs/library.md."
    )
