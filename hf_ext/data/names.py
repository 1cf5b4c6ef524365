"""Names of columns: checked, and shown in messages so that they stay printable, short and on one line."""

from __future__ import annotations

import re
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


def missing_columns(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Returns the sentence that there are no such columns, with the nearest one of each and the list.

    Args:
        wanted: the names that are missing, at least one.
        names: those that are there.
    """
    near = {name: _nearest(name, names) for name in wanted[:MAX_LISTED]}
    if len(wanted) > 1:
        hints = (f" (did you mean '{one}'?)" if one else "" for one in near.values())
        listed = ", ".join(f"'{show_name(name)}'{hint}" for name, hint in zip(near, hints))
        return f"there are no columns {listed}. Columns: {show_names(names)}."
    hint = f" Did you mean '{near[wanted[0]]}'?" if near[wanted[0]] else ""
    parts = re.split(r"[,+;|\s]+", wanted[0])
    if len(parts) > 1 and set(parts) <= set(names):
        hint = f" Write several with a blank between: --sequence_columns {' '.join(map(show_name, parts))}."
    return f"there is no column '{show_name(wanted[0])}'.{hint} Columns: {show_names(names)}."


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """The same but for case, blanks, `_` and `-`; else what is alike: so, `pkd` is as near to `kd` as to `pKd`."""
    shown = [show_name(other) for other in names[:MAX_COMPARED]]
    same = [other for other in shown if _fold(other) == _fold(show_name(name))]
    return next(iter(same or get_close_matches(name[:MAX_CHARACTERS], shown, 1, 0.5)), None)


def _fold(name: str) -> str:
    return re.sub("[ _-]", "", name.casefold())


def check_columns(names: Sequence[str], wanted: Collection[str] | None, path: str) -> None:
    """Raises DataError where `names` has a duplicate or lacks some of `wanted`, all of which are named."""
    if len(set(names)) < len(names):
        repeated = min(name for name, num in Counter(names).items() if num > 1)
        raise DataError(
            f"{path}, row 1: column '{show_name(repeated)}' occurs more than once. Rename or remove one of them."
        )
    missing = [name for name in wanted or () if name not in names]
    if missing:
        raise DataError(f"{path}: {missing_columns(missing, names)}")
