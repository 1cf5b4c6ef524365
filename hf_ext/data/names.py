"""Names of columns: checked, and shown in messages so that they stay printable, short and on one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from ..errors import DataError

MAX_CHARACTERS = 60
MAX_LISTED = 30
MAX_COMPARED = 1000  # with a misspelt name; a comparison takes some 50 us


def show_name(name: str) -> str:
    """Returns a name on one line: control characters, invisible ones and lone surrogates are written as escapes."""
    text = name if name.isprintable() else repr(name)[1:-1]
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."


def show_names(names: Sequence[str]) -> str:
    """Returns the first 30 names, separated by commas."""
    return ", ".join(show_name(name) for name in names[:MAX_LISTED])


def missing_column(name: str, names: Sequence[str]) -> str:
    """Returns the sentence that there is no such column, with the nearest one and the list."""
    near = get_close_matches(name[:MAX_CHARACTERS], [show_name(other) for other in names[:MAX_COMPARED]], 1, 0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return f"there is no column '{show_name(name)}'.{hint} Columns: {show_names(names)}."


def check_columns(names: Sequence[str], wanted: Collection[str] | None, path: str) -> None:
    """Raises DataError where `names` has a duplicate or lacks one of `wanted`."""
    if len(set(names)) < len(names):
        repeated = min(name for name, num in Counter(names).items() if num > 1)
        raise DataError(
            f"{path}, row 1: column '{show_name(repeated)}' occurs more than once. Rename or remove one of them."
        )
    for name in wanted or ():
        if name not in names:
            raise DataError(f"{path}: {missing_column(name, names)}")
