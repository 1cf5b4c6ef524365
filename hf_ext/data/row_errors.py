"""Rows that cannot be used: all of them in one error with file, row, column, value, rule and remedy, or in one file."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError, DataError
from ..files import write_cell
from .columns import Distinct

REJECTED_FILE = "rejected_rows.csv"
REJECTED_HEADER = ["row", "column", "value", "rule", "remedy", "file"]
# Each spells a short peptide, but in a table it is what another program wrote for "no value".
MISSING_MARKERS = ("NA", "N/A", "#N/A", "<NA>", "NULL", "NAN", "NONE")
MAX_LISTED = 20
MIN_LISTED = 3  # of each kind


class RowError(NamedTuple):
    """One refused value. `row` is the 1-based line of the file as an editor shows it (a CSV's header is line 1)."""

    row: int
    column: str
    value: str
    rule: str
    remedy: str


Located = tuple[str, RowError]  # (file, error)


def shorten(value: object, limit: int = 40) -> str:
    """Returns `value` as printable ASCII text of at most `limit` characters, the cut shown as `...`."""
    text = "" if value is None else str(value)
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_missing(value: object) -> bool:
    """Says whether a cell holds nothing: None, NaN, blanks only, or a marker such as `NA` (any case)."""
    if value is None or (isinstance(value, float) and value != value):
        return True
    return isinstance(value, str) and (not value.strip() or value.strip().upper() in MISSING_MARKERS)


def find_rows(
    refused: Mapping[int, tuple[str, str]], values: Distinct, column: str, rows: Sequence[int] | np.ndarray
) -> list[RowError]:
    """An error for each row that has one of the refused cells.

    Args:
        refused: number of a distinct cell -> (rule, remedy).
        values: of the column.
        column: its name.
        rows: (n,) the row of each value in its file.
    """
    if not refused:
        return []
    shown = {one: shorten(values.cells[one].as_py()) for one in refused}
    found = np.flatnonzero(np.isin(values.number, [*refused]))
    return [RowError(int(rows[i]), column, shown[one], *refused[one]) for i, one in zip(found, values.number[found])]


def format_errors(located: Iterable[Located]) -> str:
    """Returns the error text: a count, then each error with file, row, column, value, rule and remedy.

    Up to 20 are all listed. Of more, each kind (a rule in a column of a file) has its first ones listed, at least 3,
    and the others counted, so that one look at the text is enough to mend the file.
    """
    pairs = list(located)
    kinds: dict[tuple[str, str, str], list[RowError]] = {}
    for path, error in pairs:
        kinds.setdefault((path, error.column, _rule_kind(error.rule)), []).append(error)
    is_short = len(pairs) <= MAX_LISTED
    several = f", of {len(kinds)} kinds" if len(kinds) > 1 and not is_short else ""
    lines = [f"{len(pairs)} value{'s' if len(pairs) != 1 else ''} cannot be used{several}:"]
    if is_short:
        return "\n".join([*lines, *(_format(path, error) for path, error in pairs)])
    shown = max(MIN_LISTED, MAX_LISTED // len(kinds))
    for (path, column, kind), errors in [*kinds.items()][:MAX_LISTED]:
        lines += [_format(path, error) for error in errors[:shown]]
        if len(errors) > shown:
            of = f" in column {column!r}: {kind}" if several else ""
            lines.append(f"  ... and {len(errors) - shown:,} more{of}")
    if len(kinds) > MAX_LISTED:
        lines.append(f"  ... and {len(kinds) - MAX_LISTED} more kinds")
    return "\n".join(lines)


def _format(path: str, error: RowError) -> str:
    return f"  {path}, row {error.row}, column {error.column!r}, value '{error.value}': {error.rule}. {error.remedy}"


def count_rules(errors: Iterable[RowError]) -> dict[str, int]:
    """Returns how many values each rule refused, numbers and quoted characters in the rule replaced by `...`."""
    return dict(Counter(_rule_kind(error.rule) for error in errors).most_common())


def _rule_kind(rule: str) -> str:
    words = ["..." if any(c.isdigit() for c in word) or "'" in word else word for word in rule.split()]
    return " ".join(words)


def refuse_or_drop(located: Sequence[Located], bad_rows: str, rejected: Path | None, num_left: int) -> Path | None:
    """Raises for refused rows, or lists them in the file `rejected` and returns it (None where there are no errors).

    Raises:
        DataError: `bad_rows` is "error" (nothing is written), or dropping leaves no row.
        ArgumentError: "drop" without an output folder.
        OSError: the folder cannot be written.
    """
    if not located:
        return None
    if bad_rows == "error":
        raise DataError(f"{format_errors(located)}\nMend these rows, or leave them out with --bad_rows drop.")
    if num_left == 0:
        raise DataError(f"--bad_rows drop would leave no row.\n{format_errors(located)}")
    path = check_rejected(rejected)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # every process of a run writes the same
    append_rejected(draft, located)
    os.replace(draft, path)
    return path


def check_rejected(rejected: Path | None) -> Path:
    """The file that lists dropped rows; ArgumentError without a folder for it."""
    if rejected is None:
        raise ArgumentError(f"bad_rows='drop' needs an output folder for {REJECTED_FILE}.")
    return rejected


def append_rejected(path: Path, located: Sequence[Located]) -> None:
    """Adds refused values to a CSV, which begins with `REJECTED_HEADER`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle)
        if handle.tell() == 0:
            writer.writerow(REJECTED_HEADER)
        rows = ([error.row, error.column, error.value, error.rule, error.remedy, file] for file, error in located)
        writer.writerows(map(write_cell, row) for row in rows)
