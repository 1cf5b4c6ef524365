"""Row filters a user types (`pKd > 7 and antibody == 'S309'`): Python's grammar is read, nothing of it is executed."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ArgumentError, DataError
from .columns import distinct
from .labels import parse_number
from .row_errors import is_missing, shorten

MAX_FILTER_CHARACTERS = 2000

# A cell and the values beside the sign, which are several after `in` alone.
_OPERATORS: dict[type[ast.cmpop], Callable[[Any, list[Any]], bool]] = {
    ast.Lt: lambda cell, values: cell < values[0],
    ast.LtE: lambda cell, values: cell <= values[0],
    ast.Gt: lambda cell, values: cell > values[0],
    ast.GtE: lambda cell, values: cell >= values[0],
    **dict.fromkeys((ast.Eq, ast.In), lambda cell, values: cell in values),
    **dict.fromkeys((ast.NotEq, ast.NotIn), lambda cell, values: cell not in values),
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
    try:
        if len(text) > MAX_FILTER_CHARACTERS:
            raise ValueError(f"{len(text)} characters are more than {MAX_FILTER_CHARACTERS}")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of 1and, and of escapes that are none
            tree = ast.parse(text.strip(), mode="eval").body
        _check(tree, text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError, Warning) as error:
        reason = getattr(error, "msg", None) or str(error) or "it is nested too deeply"
        raise ArgumentError(f"filter {shorten(text)!r}: {reason}. {_SHAPE}") from error
    return Predicate(text, tree)


def _check(node: ast.expr, text: str) -> None:
    """ValueError for anything but comparisons of a column with values, and what joins them."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            _check(part, text)
        return
    if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Name) and len(node.ops) == 1):
        raise ValueError(f"{shorten(ast.get_source_segment(text, node))!r} is not a comparison")
    compare, given = type(node.ops[0]), node.comparators[0]
    values = _values(given)
    kinds, is_list = {type(value) for value in values}, isinstance(given, ast.List | ast.Tuple)
    is_known = compare in _OPERATORS and is_list == (compare in (ast.In, ast.NotIn))
    if not is_known or kinds not in ({str}, {float}) or (kinds == {float} and not np.isfinite(values).all()):
        shown = shorten(ast.get_source_segment(text, given))
        raise ValueError(
            f"{shown!r} is neither a number nor quoted text such as 'S309', nor, after 'in', a list of either"
        )
    if kinds == {str} and compare in (ast.Lt, ast.LtE, ast.Gt, ast.GtE):
        raise ValueError("text has no order; leave out the quotes to compare numbers")


def _values(node: ast.expr) -> list[Any]:
    """What a column is compared with, numbers as float; None for what is no literal."""
    try:
        given = ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return [None]
    values = given if isinstance(given, list | tuple) else [given]
    return [float(str(value)) if type(value) is int else value for value in values]


def _evaluate(node: Any, table: pa.Table, rows: np.ndarray, path: str) -> np.ndarray:
    if isinstance(node, ast.BoolOp):
        join = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
        return join.reduce([_evaluate(part, table, rows, path) for part in node.values])
    name, compare, values = node.left.id, _OPERATORS[type(node.ops[0])], _values(node.comparators[0])
    found = distinct(table[name])
    cells = found.cells.to_pylist()
    if isinstance(values[0], str):
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
