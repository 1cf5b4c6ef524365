"""Row filters a user types (`pKd > 7 and antibody == 'S309'`), read word by word: nothing in them is ever executed."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, DataError
from .names import missing_columns
from .numbers import NUMBER, parse_number
from .proteins import is_missing, shorten

MAX_FILTER_CHARACTERS = 2000

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORD = re.compile(
    rf"""(?P<operator>[<>=!]=|[<>])
      | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<number>{NUMBER}(?![\w.]))
      | (?P<name>[^\W\d]\w*)
      | (?P<unclosed>['"].*)
      | (?P<other>\w[\w.]*|\S)""",
    re.VERBOSE,
)
_SHAPE = (
    "Write COLUMN OP VALUE, where OP is one of < <= > >= == != and VALUE a number or quoted text, and join several by "
    "'and'. For anything else ('or', 'not', 'in', sums, two columns) filter the file beforehand, or make a run for "
    "each part."
)
Columns = Mapping[str, Sequence[object]]


class Condition(NamedTuple):
    """`column operator value`; a value that is text is compared with text."""

    column: str
    operator: str
    value: float | str


@dataclass(frozen=True)
class Predicate:
    """A checked filter. Calling it with one row (a mapping) gives a bool; `mask` answers for many rows at once."""

    text: str
    conditions: tuple[Condition, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that are compared, each once."""
        return tuple(dict.fromkeys(condition.column for condition in self.conditions))

    def mask(self, columns: Columns, *, rows: Sequence[int] | None = None, path: str = "the data") -> np.ndarray:
        """Returns bool [n], True where the row stays.

        A column compared with a number is read as numbers; its missing cells match nothing but `!=`. A column compared
        with text is compared as text, a missing cell as ''.

        Args:
            columns: name -> [n] cells, at least `names`.
            rows: [n] 1-based file rows, for messages.
            path: the file, for messages.

        Raises:
            DataError: a column compared with a number holds text in some row (file, row, column and value are named).
        """
        kept = np.ones(len(next(iter(columns.values()))), dtype=bool)
        for name, op, value in self.conditions:
            cells = columns[name]
            read = _as_text(cells) if isinstance(value, str) else _as_numbers(cells, name, rows, path)
            kept &= np.asarray(_OPERATORS[op](read, value), dtype=bool)
        return kept

    def __call__(self, row: Mapping[str, object]) -> bool:
        return bool(self.mask({name: [row[name]] for name in self.names})[0])


def parse_filter(text: str, columns: Iterable[str] | None = None) -> Predicate:
    """Returns the checked form of a filter; nothing in it is ever executed.

    Args:
        text: `COLUMN OP VALUE`, several joined by `and`; at most 2,000 characters.
        columns: the names that exist, or None to leave that check to the table.

    Raises:
        ArgumentError: another form (what is wrong is named, and what to do instead), or an unknown column (nearest
            name given).
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise ArgumentError(f"filter has {len(text)} characters; at most {MAX_FILTER_CHARACTERS} are allowed.")
    parts: list[list[re.Match[str]]] = [[]]
    for word in _WORD.finditer(text):
        if word[0] == "and":
            parts.append([])
        else:
            parts[-1].append(word)
    predicate = Predicate(text, tuple(_read_condition(part, text) for part in parts))
    if columns is not None:
        check_names(predicate.names, list(columns), f"filter {text!r}")
    return predicate


def check_names(names: Iterable[str], columns: Sequence[str], where: str) -> None:
    """Raises ArgumentError for the first of `names` that is not in `columns`, with the nearest one."""
    for name in names:
        if name not in columns:
            raise ArgumentError(f"{where}: {missing_columns([name], list(columns))}")


def _read_condition(words: Sequence[re.Match[str]], text: str) -> Condition:
    for word in words:
        if word.lastgroup == "unclosed":
            raise ArgumentError(f"filter {text!r}: the quote before {word[0][1:]!r} is not closed.")
        if word.lastgroup == "other" or word[0] in ("or", "not", "in", "is"):
            raise ArgumentError(f"filter {text!r}: {word[0]!r} is not allowed. {_SHAPE}")
    kinds = [word.lastgroup for word in words]
    if kinds[:2] != ["name", "operator"] or len(words) != 3 or kinds[2] == "operator":
        part = " ".join(word[0] for word in words) or "nothing"
        raise ArgumentError(f"filter {text!r}: {part!r} is not a comparison. {_SHAPE}")
    column, op, value = (word[0] for word in words)
    if kinds[2] == "name":
        quoted = f"neither a number nor quoted text such as '{value}'"
        raise ArgumentError(f"filter {text!r}: {value!r} is {quoted}. {_SHAPE}")
    if kinds[2] == "text" and op not in ("==", "!="):
        raise ArgumentError(f"filter {text!r}: text has no order; leave out the quotes to compare numbers.")
    return Condition(column, op, _read_value(value, text))


def _read_value(word: str, text: str) -> float | str:
    if word[0] not in "'\"":
        if not math.isfinite(float(word)):
            raise ArgumentError(f"filter {shorten(text)!r}: a number is too large.")
        return float(word)
    try:
        return str(ast.literal_eval(word))  # for its escapes; a literal, as the pattern of words has it
    except (ValueError, SyntaxError) as error:
        reason = getattr(error, "msg", error)  # the text of a SyntaxError also names a line
        raise ArgumentError(f"filter {shorten(text)!r} cannot be read: {reason}. {_SHAPE}") from error


def _as_text(cells: Sequence[object]) -> np.ndarray:
    return np.array(["" if cell is None else str(cell) for cell in cells], dtype=object)


def _as_numbers(cells: Sequence[object], name: str, rows: Sequence[int] | None, path: str) -> np.ndarray:
    numbers = np.empty(len(cells), dtype=np.float64)
    for index, cell in enumerate(cells):
        try:
            numbers[index] = math.nan if cell is None or cell == "" else _number(cell)
        except (TypeError, ValueError, OverflowError) as error:
            if not is_missing(cell):
                where = f", row {rows[index]}" if rows is not None else ""
                raise DataError(
                    f"{path}{where}, column {name!r}, value '{shorten(cell)}': the filter compares this column with "
                    f"a number, but this is not one. Mend the value, or compare with quoted text."
                ) from error
            numbers[index] = math.nan
    return numbers


def _number(value: object) -> float:
    """The number in a cell; raises TypeError, ValueError or OverflowError where there is none."""
    if not isinstance(value, str):
        return float(value)  # type: ignore[arg-type]
    number = parse_number(value.strip())
    if number is None:
        raise ValueError("not a number")
    return number
