"""Rows that cannot be used: all of them in one error with file, row, column, value, rule and remedy, or in one file."""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..errors import DataError
from ..files import write_cell
from ..labels import RowError

REJECTED_FILE = "rejected_rows.csv"
REJECTED_HEADER = ["row", "column", "value", "rule", "remedy", "file"]
NO_SPLIT = "names no split"
MAX_LISTED = 20
MIN_LISTED = 3  # of each kind


Located = tuple[str, RowError]  # (file, error)


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
