"""What a cell of a table holds: nothing, a number, a bound, a list; read as a value, or refused by a rule."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import UNKNOWN

# Each spells a short peptide, but in a table it is what another program wrote for "no value".
MISSING_MARKERS = ("NA", "N/A", "#N/A", "<NA>", "NULL", "NAN", "NONE")
# ASCII digits, a point, an exponent; nothing else that Python would take for a number. Linear: no digit can be matched
# in two places.
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
MAX_ABS_LABEL = 1e30  # squared error of larger ones overflows float32
SIGNS = {"<": -1, "<=": -1, ">": 1, ">=": 1, "=": 0}
NOT_KNOWN = ("?", "X", "x", str(UNKNOWN))  # of a residue
MAX_NAMED = 5

_LABEL = re.compile(rf"(?:(<=|>=|<|>|=)\s*)?({NUMBER})").fullmatch  # of stripped text, and linear
_ITEMS = re.compile(r"[^\s,;\[\]\"']+").findall  # as CSV, JSON and Python write lists


class Judged(NamedTuple):
    """A cell as the `value` it is read as and the `changes` made for it; or the `rule` that refuses it."""

    value: Any
    rule: str = ""
    remedy: str = ""
    changes: tuple[str, ...] = ()


def is_missing(value: object) -> bool:
    """Says whether a cell holds nothing: None, NaN, blanks only, or a marker such as `NA` (any case)."""
    if value is None or (isinstance(value, float) and value != value):
        return True
    return isinstance(value, str) and (not value.strip() or value.strip().upper() in MISSING_MARKERS)


def is_unknown(item: object) -> bool:
    """Says whether an item of a list stands for a residue whose label nobody knows."""
    return is_missing(item) or write_name(item) in NOT_KNOWN


def shorten(value: object, limit: int = 40) -> str:
    """Returns `value` as printable ASCII text of at most `limit` characters, the cut shown as `...`."""
    text = "" if value is None else str(value)
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def show_names(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(map(shorten, names[:MAX_NAMED])) + (f" and {more:,} more" if more > 0 else "")


def write_name(cell: object) -> str:
    """A class as its name: text without blanks around it, whole numbers without a decimal point."""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()


def split_items(cell: Any) -> list[Any]:
    """A list, or text that lists things between spaces, commas or semicolons, in brackets or not."""
    if isinstance(cell, list | tuple):
        return [*cell]
    return _ITEMS(cell) if isinstance(cell, str) else [cell]


def split_letters(cell: Any) -> list[Any]:
    """As `split_items`, and a word alone as its letters."""
    items = split_items(cell)
    return [*items[0]] if isinstance(cell, str) and items == [cell.strip()] else items


def judge_label(cell: object) -> Judged:
    """A single cell as (label, bound), NaN where it is refused."""
    match = _LABEL(cell.strip().replace("\u2264", "<=").replace("\u2265", ">=")) if isinstance(cell, str) else None
    if match:
        bound, value = SIGNS.get(match[1], 0), float(match[2])
    elif is_missing(cell):
        return Judged((math.nan, 0), "the label is missing", "Fill it in, or leave the row out.")
    elif isinstance(cell, bool) or not isinstance(cell, int | float):
        remedy = (
            "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7; give --task "
            "classification for names, of one column."
        )
        return Judged((math.nan, 0), "the label is not a number", remedy)
    else:
        bound, value = 0, float(cell)
    if abs(value) > MAX_ABS_LABEL:
        return Judged((math.nan, 0), "the label is larger than 1e30", "Change the unit, or use a logarithm.")
    return Judged((value, bound))
