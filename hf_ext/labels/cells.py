"""What a cell of a table holds: nothing, a number, a bound, a list, names; read as a value, or refused by a rule."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

UNKNOWN = -100  # in tensors of labels: no loss, no score
# Each spells a short peptide, but in a table it is what another program wrote for "no value".
MISSING_MARKERS = ("NA", "N/A", "#N/A", "<NA>", "NULL", "NAN", "NONE")
# ASCII digits, a point, an exponent; nothing else that Python would take for a number. Linear: no digit can be matched
# in two places.
NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
MAX_ABS_LABEL = 1e30  # squared error of larger ones overflows float32
SIGNS = {"<": -1, "<=": -1, ">": 1, ">=": 1, "=": 0}
NOT_KNOWN = ("?", "X", "x", str(UNKNOWN))  # of a residue
SEPARATOR = ";"  # between the labels of a cell
NO_LABEL = "-"  # a cell without any of the labels, or a residue whose label is not known beside digits
JOINTS = "|/,"  # separate labels where what they join are names
YES = ("true", "yes", "1", "positive", "pos")
BITS = {"0": 0.0, "false": 0.0, "f": 0.0, "no": 0.0, "1": 1.0, "true": 1.0, "t": 1.0, "yes": 1.0}

_LABEL = re.compile(rf"(?:(<=|>=|<|>|=)\s*)?({NUMBER})").fullmatch  # of stripped text, and linear
_IS_NUMBER = re.compile(NUMBER).fullmatch
IS_DIGITS = re.compile("[0-9]+").fullmatch
_ITEMS = re.compile(r"[^\s,;\[\]\"']+").findall  # between spaces, commas, semicolons, brackets, quotes
_IS_NUMERIC = re.compile(r"[\[\]\s,;0-9.eE+-]*").fullmatch
# What quotes hold, to the end of the text where they are not closed, so that no quote is looked at twice; or what
# stands between brackets, commas and semicolons.
_TOKENS = re.compile(r"""\"(?:[^"\\]|\\.)*(?:"|$)|'(?:[^'\\]|\\.)*(?:'|$)|[^\[\],;"']+""", re.DOTALL).findall
_NUMPY = re.compile(r"np\.\w+\(([^()]*)\)").sub  # `np.float64(0.5)`, as numpy 2 writes items of lists
_ZEROS = re.compile(r"(?<=[0-9])\.0*$")


class Checked(NamedTuple):
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
    """Says whether an item of a list stands for a residue whose label is not known."""
    return is_missing(item) or write_name(item) in NOT_KNOWN


def shorten(value: object) -> str:
    """Returns `value` as printable ASCII text of at most 40 characters, the cut shown as `...`."""
    text = "" if value is None else str(value)
    text = text if text.isascii() and text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 40 else text[:37] + "..."


def list_some(names: Sequence[str], most: int = 5) -> str:
    """Names the first, and says how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def show_names(names: Sequence[str]) -> str:
    """Names the first in short."""
    return list_some([*map(shorten, names)])


def write_name(cell: object) -> str:
    """Writes a class as its name: text without blanks around it, whole numbers without a decimal point."""
    return str(int(cell) if isinstance(cell, float) and cell.is_integer() else cell).strip()


def drop_zeros(name: str) -> str:
    """Returns the name of a whole number without its decimals: `1.0` and `1` are one class, `1.10` is another."""
    return _ZEROS.sub("", name)


def is_number(item: object) -> bool:
    """Says whether an item of a list is a number, or stands for one that is missing."""
    return isinstance(item, int | float) or is_missing(item) or bool(_IS_NUMBER(str(item)))


def read_list(cell: object, of_names: bool = False) -> list[Any] | None:
    """Returns the items of a list, also of one that JSON, Python or numpy wrote as text; None of any other cell.

    Quotes decide where an item ends, then commas and semicolons, then, between numbers alone, spaces. One name in
    brackets without quotes, such as `[NiFe]`, is a name, unless the column has lists (`of_names`).
    """
    if isinstance(cell, list | tuple):
        return [*cell]
    text = cell.strip() if isinstance(cell, str) else ""
    if not (text.startswith("[") and text.endswith("]")):
        return None
    text = _NUMPY(r"\1", text)
    if _IS_NUMERIC(text):
        return _ITEMS(text)
    items = []
    for token in filter(None, map(str.strip, _TOKENS(text))):
        if token[0] in "\"'":
            items.append(_unquote(token))
        elif all(map(is_number, words := token.split())):
            items += words
        else:
            items.append(token)
    is_name = not of_names and items == [text[1:-1].strip()] and not is_number(items[0])
    return None if is_name else items


def _unquote(token: str) -> str:
    """Returns the text between quotes: JSON's escapes, else a backslash before each character that needs one."""
    if token[0] == '"':
        try:
            return json.loads(token)
        except ValueError:
            pass
    return re.sub(r"\\(.)", r"\1", token[1:].removesuffix(token[0]))


def unwrap(cell: object) -> Any:
    """Returns the item of a list of one, None of an empty list, any other cell as it is."""
    items = read_list(cell)
    if items is None or len(items) > 1:
        return cell
    return items[0] if items else None


def split_items(cell: object) -> list[Any]:
    """Returns the items of a list, or of text that lists things between spaces, commas or semicolons."""
    items = read_list(cell)
    if items is not None:
        return items
    return _ITEMS(cell) if isinstance(cell, str) else [cell]


def split_letters(cell: object) -> list[Any]:
    """Splits as `split_items` does, and a word alone into its letters."""
    items = split_items(cell)
    return [*items[0]] if isinstance(cell, str) and items == [cell.strip()] else items


def check_label(cell: object) -> Checked:
    """Checks a single cell as (label, bound), NaN where it is refused."""
    match = _LABEL(cell.strip().replace("\u2264", "<=").replace("\u2265", ">=")) if isinstance(cell, str) else None
    if match:
        bound = SIGNS.get(match[1], 0)
        value = float(match[2])
    elif is_missing(cell):
        return Checked((math.nan, 0), "the label is missing", "Fill it in, or leave the row out.")
    elif isinstance(cell, bool) or not isinstance(cell, int | float):
        remedy = (
            "Write a number such as 7.3 (digits 0 to 9, decimal point), or a bound such as <=7; give --task "
            "classification for names, of one column."
        )
        return Checked((math.nan, 0), "the label is not a number", remedy)
    else:
        bound = 0
        value = float(cell)
    if abs(value) > MAX_ABS_LABEL:
        return Checked((math.nan, 0), "the label is larger than 1e30", "Change the unit, or use a logarithm.")
    return Checked((value, bound))


def check_number(cell: object) -> Checked:
    """Checks a cell beside sequences: a number, no bound; NaN where it is empty or refused."""
    if is_missing(cell):
        return Checked(math.nan)
    value, bound = check_label(cell).value
    if bound or math.isnan(value):
        remedy = "Write digits with a decimal point, such as 7.4, or leave the cell empty."
        return Checked(math.nan, "not a number within +-1e30", remedy)
    return Checked(value)


# --- names ------------------------------------------------------------------------------------------------------------


def order_names(names: Iterable[str]) -> tuple[str, ...]:
    """Sorts numbers by size, else by the alphabet.

    Of two the one that means yes, or to which the other adds `non-`, last.
    """
    found = sorted({*names})
    try:
        return tuple(sorted(found, key=lambda name: (float(name), name)))
    except ValueError:
        if len(found) == 2 and (found[0].lower() in YES or found[1].lower().endswith(found[0].lower())):
            found.reverse()
        return tuple(found)


def as_bit(cell: object) -> float | None:
    """Reads 1 or 0 from a cell that says yes or no; None from others."""
    return BITS.get(drop_zeros(write_name(cell)).lower())


def split_joined(name: str, sign: str) -> list[str]:
    """Returns what `sign` joins."""
    return [part for part in map(str.strip, name.split(sign)) if part]


def find_joints(names: Collection[str]) -> str:
    """Returns those signs of `|/,` that separate labels: what they join are mostly names that also stand alone.

    None where `+` joins names, too: `a/b` beside `a+b`, as SCOP has it, is another class, not both.
    """
    if any("+" in name and all(part in names for part in split_joined(name, "+")) for name in names):
        return ""
    found = ""
    for sign in JOINTS:
        joined = [split_joined(name, sign) for name in names if sign in name]
        known = [all(part in names for part in parts) for parts in joined]
        if known and sum(known) * 2 >= len(known):
            found += sign
    return found


def drop_dash(names: Collection[str]) -> set[str]:
    """Returns labels of residues without `-` where all others are digits: CAID's references write it for not known."""
    rest = {*names} - {NO_LABEL}
    return rest if all(map(IS_DIGITS, rest)) else {*names}


def beside_minus_1(names: Collection[str]) -> set[str]:
    """Returns the names beside -1, which may be a label or mean that it is not known; none where there is no -1."""
    rest = {*names} - {"-1"}
    return rest if len(rest) < len(names) else set()


def count_names(names_of: Callable[[Any], list[str]], cells: Sequence[Any], nums: Sequence[int]) -> Counter[str]:
    """Returns in how many rows each name stands, of distinct cells and how many rows have each."""
    counts: Counter[str] = Counter()
    for cell, num in zip(cells, nums):
        counts.update(dict.fromkeys(names_of(cell), num))
    return counts


def join_decimals(counts: Counter[str]) -> None:
    """Adds the rows of `1.0` to those of `1`, where both are names."""
    for name in [*counts]:
        whole = drop_zeros(name)
        if whole != name and whole in counts:
            counts[whole] += counts.pop(name)
