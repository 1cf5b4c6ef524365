"""What happens to every row, in a table or in a stream: filter, clean, parse the label, and refuse or drop."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ArgumentError, DataError
from ..files import write_cell
from .arguments import DataArguments
from .filters import Predicate, check_names, parse_filter
from .labels import name_label_kind, parse_labels
from .missing_chains import find_bare_rows, remedy_if_missing
from .names import missing_columns
from .placeholders import find_placeholders
from .proteins import (
    LEAVE_OUT,
    CleanedColumn,
    Problem,
    ResiduePolicy,
    clean_sequences,
    format_located,
    rule_kind,
    shorten,
)
from .reading import SOURCE_ROW
from .splits import canonical_split

REJECTED_FILE = "rejected_rows.csv"
REJECTED_HEADER = ["row", "column", "value", "rule", "remedy", "file"]
Columns = dict[str, Sequence[Any]]
Located = tuple[str, Problem]  # (file, problem)


@dataclass
class PreparedRows:
    """Rows ready for splitting, and what was done to get there. `columns` hold the accepted rows only.

    `odd_splits` counts, over all rows, the values of the split column that name no split.
    """

    columns: Columns
    num_read: int
    num_filtered: int
    num_rejected: int
    problems: list[Problem] = field(default_factory=list)
    changes: dict[str, dict[str, int]] = field(default_factory=dict)
    odd_splits: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class RowRules:
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
    def from_arguments(cls, args: DataArguments, needs_labels: bool, needs_splits: bool = True) -> RowRules:
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

    def apply(self, columns: Mapping[str, Sequence[Any]], path: str) -> PreparedRows:
        """Filters, cleans and parses; rows with any problem are left out of `columns` and listed in `problems`.

        Args:
            columns: name -> [n] cells, with `needed` and `source_row`.
            path: the file, for messages.

        Raises:
            DataError: a missing column, or text in a column that the filter compares with numbers.
        """
        missing = [name for name in self.needed if name not in columns]
        if missing:
            raise DataError(f"{path}: {missing_columns(missing, list(columns))}")
        num_read = len(columns[SOURCE_ROW])
        if self.predicate is not None and num_read:
            check_names(self.predicate.names, list(columns), f"filter {self.predicate.text!r}")
            mask = self.predicate.mask(columns, rows=columns[SOURCE_ROW], path=path)
            columns = _keep(columns, mask)
        rows = columns[SOURCE_ROW]
        cleaned = {name: self._clean(columns[name], name, rows) for name in self.sequence_columns}
        result: Columns = {name: column.sequences for name, column in cleaned.items()}
        problems = [problem for column in cleaned.values() for problem in column.problems]
        if self.missing_chains:
            problems += find_bare_rows(result, problems, rows)
        if self.label_column is not None:
            problems += self._add_labels(columns, result, path)
        for name in self.text_columns:
            result[name] = [None if value is None else str(value) for value in columns[name]]
            problems += _find_line_ends(result[name], name, columns[SOURCE_ROW])
        problems += self._find_empty(columns)
        result[SOURCE_ROW] = rows
        problems.sort(key=lambda problem: problem.row)
        refused = {problem.row for problem in problems}
        if refused:
            result = _keep(result, np.array([row not in refused for row in rows], dtype=bool))
        changes = {name: column.changes for name, column in cleaned.items() if column.changes}
        num_filtered = num_read - len(rows)
        return PreparedRows(result, num_read, num_filtered, len(refused), problems, changes, self._odd_splits(columns))

    def _clean(self, cells: Sequence[Any], name: str, rows: Sequence[int]) -> CleanedColumn:
        may_be_missing = name in self.missing_chains
        return clean_sequences(
            cells, name, self.policy, rows, may_be_missing=may_be_missing, if_missing=self.if_missing
        )

    def _odd_splits(self, columns: Mapping[str, Sequence[Any]]) -> Counter[str]:
        if self.split_column is None:
            return Counter()
        counts = Counter("" if value is None else str(value) for value in columns[self.split_column])
        return Counter({value: num for value, num in counts.items() if canonical_split(value) is None})

    def _add_labels(self, columns: Mapping[str, Sequence[Any]], result: Columns, path: str) -> list[Problem]:
        censor = columns[self.censor_column] if self.censor_column else None
        label_column, rows = self.label_column or "", columns[SOURCE_ROW]
        parsed = parse_labels(
            columns[label_column],
            label_column,
            rows,
            censor_values=censor,
            censor_column=self.censor_column or "",
        )
        if not np.isfinite(parsed.labels).any() and (kind := name_label_kind(columns[label_column])):
            raise DataError(f"{path}, column {label_column!r}: {kind}, which hf_ext does not train yet. Give numbers.")
        result["label"], result["bound"] = parsed.labels.tolist(), parsed.bounds.tolist()
        found = find_placeholders(parsed.labels, parsed.bounds, label_column, rows, columns[label_column])
        return [*parsed.problems, *found]

    def _find_empty(self, columns: Mapping[str, Sequence[Any]]) -> list[Problem]:
        remedy = "Name the group, or leave the row out."
        return [
            Problem(row, name, "", "the group is missing", remedy)
            for name in self.required
            for row, value in zip(columns[SOURCE_ROW], columns[name])
            if value is None or not str(value).strip()
        ]


def _find_line_ends(texts: Sequence[str | None], name: str, rows: Sequence[int]) -> list[Problem]:
    """Names are one line each: in a CSV, a line end is mostly what stray quotes made of several rows."""
    remedy = "Write it on one line; look for stray quotes, too."
    return [
        Problem(row, name, shorten(text), "a line end inside the text", remedy)
        for row, text in zip(rows, texts)
        if text and ("\n" in text or "\r" in text)
    ]


def refuse_or_drop(located: Sequence[Located], bad_rows: str, rejected: Path | None, num_left: int) -> Path | None:
    """Raises for refused rows, or lists them in the file `rejected` and returns it (None where there are no problems).

    Raises:
        DataError: `bad_rows` is "error" (nothing is written), or dropping leaves no row.
        ArgumentError: "drop" without an output folder.
        OSError: the folder cannot be written.
    """
    if not located:
        return None
    if bad_rows == "error":
        raise DataError(f"{format_located(located)}\nMend these rows, or leave them out with --bad_rows drop.")
    if num_left == 0:
        raise DataError(f"--bad_rows drop would leave no row.\n{format_located(located)}")
    if rejected is None:
        raise ArgumentError(f"bad_rows='drop' needs an output folder for {REJECTED_FILE}.")
    rejected.parent.mkdir(parents=True, exist_ok=True)
    temporary = rejected.with_name(f".{rejected.name}.{os.getpid()}.tmp")
    _write_rejected(temporary, located, "w")
    os.replace(temporary, rejected)
    return rejected


def count_rules(problems: Iterable[Problem]) -> dict[str, int]:
    """Returns how many values each rule refused, numbers and quoted characters in the rule replaced by `...`."""
    return dict(Counter(rule_kind(problem.rule) for problem in problems).most_common())


class StreamRows:
    """`RowRules` as the batched map function of a stream: raises at the first refused batch, or drops and records.

    With "drop", refused values are appended to the file `rejected` as they are met, each once per process
    (with several data-loader workers a row can be listed once per worker).
    """

    def __init__(self, rules: RowRules, path: str, bad_rows: str, rejected: Path | None) -> None:
        if bad_rows == "drop" and rejected is None:
            raise ArgumentError(f"bad_rows='drop' needs an output folder for {REJECTED_FILE}.")
        self.rules, self.path, self.bad_rows = rules, path, bad_rows
        self.rejected = str(rejected or "")
        self.seen: set[tuple[int, str]] = set()

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> Columns:
        prepared = self.rules.apply(batch, self.path)
        if prepared.problems and self.bad_rows == "error":
            refuse_or_drop([(self.path, problem) for problem in prepared.problems], "error", None, 0)
        new = [problem for problem in prepared.problems if (problem.row, problem.column) not in self.seen]
        if new:
            self.seen.update((problem.row, problem.column) for problem in new)
            _write_rejected(Path(self.rejected), [(self.path, problem) for problem in new], "a")
        return prepared.columns


def _write_rejected(path: Path, located: Sequence[Located], mode: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode, encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        if handle.tell() == 0:
            writer.writerow(REJECTED_HEADER)
        rows = ([p.row, p.column, p.value, p.rule, p.remedy, file] for file, p in located)
        writer.writerows(map(write_cell, row) for row in rows)


def _keep(columns: Mapping[str, Sequence[Any]], mask: np.ndarray) -> Columns:
    flags = mask.tolist()
    return {name: list(compress(values, flags)) for name, values in columns.items()}
