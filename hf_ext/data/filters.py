"""Row filters a user types (`pKd > 7 and antibody == 'S309'`): Python's grammar is read, nothing of it is executed."""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ArgumentError, DataError
from .columns import distinct
from .numbers import parse_number
from .row_errors import is_missing, shorten

MAX_FILTER_CHARACTERS = 2000

_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda cell, values: cell in values,
    ast.NotIn: lambda cell, values: cell not in values,
}
_SHAPE = (
    "Write COLUMN OP VALUE, where OP is one of < <= > >= == != and VALUE a number or quoted text, or COLUMN in ['a', "
    "'b'], and join several by 'and', 'or' and brackets. For anything else (sums, two columns) filter the file "
    "beforehand."
)


@dataclass(frozen=True)
class Predicate:
    """A checked filter; `mask` answers for all rows of a table."""

    text: str
    tree: ast.expr

    @property
    def names(self) -> tuple[str, ...]:
        """Columns that are compared, each once."""
        return tuple(dict.fromkeys(node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)))

    def mask(self, table: pa.Table, rows: np.ndarray, path: str = "the data") -> np.ndarray:
        """Returns bool (n,), True where the row stays.

        A column compared with a number is read as numbers; its missing cells match nothing but `!=` and `not in`. A
        column compared with text is compared as text, a missing cell as ''.

        Args:
            table: n rows with at least `names`.
            rows: (n,) the row of each in its file, for messages.
            path: the file, for messages.

        Raises:
            DataError: a column compared with a number holds text in some row (file, row, column and value are named).
        """
        return _evaluate(self.tree, table, rows, path)


def parse_filter(text: str) -> Predicate:
    """Returns the checked form of a filter; nothing in it is ever executed.

    Args:
        text: `COLUMN OP VALUE` and `COLUMN in [VALUES]`, joined by `and`, `or` and brackets; at most 2,000 characters.

    Raises:
        ArgumentError: another form; what is wrong is named, and what to do instead.
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise ArgumentError(f"filter has {len(text)} characters; at most {MAX_FILTER_CHARACTERS} are allowed.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of 1and, and of escapes that are none
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError, Warning) as error:
        reason = getattr(error, "msg", None) or "it is nested too deeply, or holds what is no text"
        raise ArgumentError(f"filter {shorten(text)!r} cannot be read: {reason}. {_SHAPE}") from error
    _check(tree, text.strip())
    return Predicate(text, tree)


def _check(node: ast.expr, text: str) -> None:
    """ArgumentError for anything but comparisons of a column with values, and what joins them."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            _check(part, text)
        return
    if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and len(node.ops) == 1):
        shown = shorten(ast.get_source_segment(text, node))
        raise ArgumentError(f"filter {shorten(text)!r}: {shown!r} is not a comparison. {_SHAPE}")
    given = node.comparators[0]
    try:
        values = ast.literal_eval(given)
    except (ValueError, TypeError, MemoryError, RecursionError):
        values = None
    is_list = isinstance(values, list | tuple)
    kinds = {type(value) for value in (values if is_list else [values])}
    is_in = isinstance(node.ops[0], ast.In | ast.NotIn)
    if (
        is_list != is_in
        or type(node.ops[0]) not in _OPERATORS
        or not (kinds == {str} or (kinds and kinds <= {int, float}))
    ):
        shown = shorten(ast.get_source_segment(text, given))
        hint = f"{shown!r} is neither a number nor quoted text such as 'S309'"
        raise ArgumentError(f"filter {shorten(text)!r}: {hint}{', nor a list of them' * is_in}. {_SHAPE}")
    if kinds == {str} and not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
        raise ArgumentError(f"filter {text!r}: text has no order; leave out the quotes to compare numbers.")
    if kinds != {str} and not all(abs(value) < 1e300 for value in (values if is_list else [values])):
        raise ArgumentError(f"filter {shorten(text)!r}: a number is too large.")


def _evaluate(node: Any, table: pa.Table, rows: np.ndarray, path: str) -> np.ndarray:
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return join.reduce([_evaluate(part, table, rows, path) for part in node.values])
    name, compare, values = node.left.id, _OPERATORS[type(node.ops[0])], ast.literal_eval(node.comparators[0])
    found = distinct(table[name])
    cells = found.cells.to_pylist()
    first = values[0] if isinstance(values, list | tuple) else values
    if isinstance(first, str):
        read: list[Any] = ["" if cell is None else str(cell) for cell in cells]
    else:
        read = [_as_number(cell) for cell in cells]
        if None in read:
            row = int(np.argmax(np.isin(found.number, [i for i, number in enumerate(read) if number is None])))
            raise DataError(
                f"{path}, row {rows[row]}, column {name!r}, value '{shorten(cells[found.number[row]])}': the filter "
                "compares this column with a number, but this is not one. Mend the value, or compare with quoted text."
            )
    return np.array([compare(cell, values) for cell in read], bool)[found.number]


def _as_number(cell: object) -> float | None:
    """The number in a cell, NaN in one that is missing; None where there is something else."""
    if is_missing(cell):
        return math.nan
    if isinstance(cell, str):
        return parse_number(cell.strip())
    return float(cell) if isinstance(cell, int | float) else None
