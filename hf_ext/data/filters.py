"""Row filters a user types (`pKd > 7 and antibody == 'S309'`), checked and run without executing any code."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError, DataError
from .names import missing_column
from .numbers import parse_number
from .proteins import is_missing, shorten

MAX_FILTER_CHARACTERS = 2000

_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDERINGS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SHAPE = "Use column names, numbers and quoted text with < <= > >= == != in [...], joined by and, or, not."
Columns = Mapping[str, Sequence[object]]


@dataclass(frozen=True)
class Predicate:
    """A checked filter. Calling it with one row (a mapping) gives a bool; `mask` answers for many rows at once."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]

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
        return _Evaluation(columns, rows, path).run(self.tree)

    def __call__(self, row: Mapping[str, object]) -> bool:
        return bool(self.mask({name: [row[name]] for name in self.names})[0])


def parse_filter(text: str, columns: Iterable[str] | None = None) -> Predicate:
    """Returns the checked form of a filter expression; nothing in it is ever executed.

    Args:
        text: comparisons (chained too), `and`/`or`/`not`, `in [...]`, column names, number and text constants, unary
            minus; at most 2,000 characters.
        columns: the names that exist, or None to leave that check to the table.

    Raises:
        ArgumentError: not an expression, disallowed syntax (named), or an unknown column (nearest name given).
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise ArgumentError(f"filter has {len(text)} characters; at most {MAX_FILTER_CHARACTERS} are allowed.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        names: list[str] = []
        _check_condition(tree, text, names)
    except SyntaxError as error:
        raise ArgumentError(f"filter {text!r} is not an expression: {error.msg}. {_SHAPE}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"filter {shorten(text)!r} cannot be read: {error}. {_SHAPE}") from error
    if columns is not None:
        check_names(names, list(columns), f"filter {text!r}")
    return Predicate(text, tree, tuple(dict.fromkeys(names)))


def check_names(names: Iterable[str], columns: Sequence[str], where: str) -> None:
    """Raises ArgumentError for the first of `names` that is not in `columns`, with the nearest one."""
    for name in names:
        if name not in columns:
            raise ArgumentError(f"{where}: {missing_column(name, columns)}")


def _check_condition(node: ast.expr, text: str, names: list[str]) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _check_condition(value, text, names)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _check_condition(node.operand, text, names)
    elif isinstance(node, ast.Compare):
        _check_comparison(node, text, names)
    elif isinstance(node, ast.Name):
        raise ArgumentError(f"filter {text!r}: write what {node.id!r} is compared with, for example {node.id} == 1.")
    else:
        raise _disallowed(node, text)


def _check_comparison(node: ast.Compare, text: str, names: list[str]) -> None:
    operands = [node.left, *node.comparators]
    found = [operand.id for operand in operands if isinstance(operand, ast.Name)]
    for index, operand in enumerate(operands):
        membership = index > 0 and isinstance(node.ops[index - 1], (ast.In, ast.NotIn))
        if membership and isinstance(operand, (ast.List, ast.Tuple)):
            kinds = {isinstance(_constant(item, text), str) for item in operand.elts}
            if len(kinds) != 1:
                raise ArgumentError(f"filter {text!r}: a list must hold only numbers or only quoted text.")
            if not isinstance(operands[index - 1], ast.Name):
                raise ArgumentError(f"filter {text!r}: the left side of 'in' must be a column.")
        elif membership:
            raise ArgumentError(f"filter {text!r}: 'in' needs a list such as ['a', 'b'].")
        elif not isinstance(operand, ast.Name):
            _constant(operand, text)
    for left, op, right in zip(operands, node.ops, node.comparators):
        if not isinstance(op, (*_OPERATORS, ast.In, ast.NotIn)):
            raise ArgumentError(f"filter {text!r}: {type(op).__name__} is not allowed. {_SHAPE}")
        if not isinstance(left, ast.Name) and not isinstance(right, ast.Name):
            raise ArgumentError(f"filter {text!r}: a comparison names no column. Text needs quotes, columns do not.")
        quoted = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right))
        if quoted and isinstance(op, _ORDERINGS):
            raise ArgumentError(f"filter {text!r}: text has no order; leave out the quotes to compare numbers.")
    names.extend(found)


def _constant(node: ast.expr, text: str) -> float | str:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _constant(node.operand, text)
        if isinstance(value, str):
            raise ArgumentError(f"filter {text!r}: minus before text.")
        return -value
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, str):
        return node.value if isinstance(node.value, str) else _as_float(node.value, text)
    raise _disallowed(node, text)


def _as_float(value: object, text: str) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ArgumentError(f"filter {shorten(text)!r}: a number is too large.") from error


def _disallowed(node: ast.AST, text: str) -> ArgumentError:
    return ArgumentError(f"filter {text!r}: {type(node).__name__} is not allowed. {_SHAPE}")


def _number(value: object) -> float:
    """The number in a cell; raises TypeError, ValueError or OverflowError where there is none."""
    if not isinstance(value, str):
        return float(value)  # type: ignore[arg-type]
    number = parse_number(value.strip())
    if number is None:
        raise ValueError("not a number")
    return number


class _Evaluation:
    """Runs a checked tree over columns, turning each column into numbers or text at most once."""

    def __init__(self, columns: Columns, rows: Sequence[int] | None, path: str) -> None:
        self.columns, self.rows, self.path = columns, rows, path
        self.numbers: dict[str, np.ndarray] = {}
        self.texts: dict[str, np.ndarray] = {}

    def run(self, node: ast.expr) -> np.ndarray:
        if isinstance(node, ast.BoolOp):
            combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return np.asarray(combine.reduce([self.run(value) for value in node.values]), dtype=bool)
        if isinstance(node, ast.UnaryOp):
            return ~self.run(node.operand)
        if not isinstance(node, ast.Compare):
            raise ValueError(f"unchecked node {type(node).__name__}")
        operands = [node.left, *node.comparators]
        parts = [self.compare(left, op, right) for left, op, right in zip(operands, node.ops, operands[1:])]
        return np.asarray(np.logical_and.reduce(parts), dtype=bool)

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> np.ndarray:
        if isinstance(right, (ast.List, ast.Tuple)) and isinstance(left, ast.Name):
            items = [_constant(item, "") for item in right.elts]
            column = self.as_text(left.id) if isinstance(items[0], str) else self.as_numbers(left.id)
            inside = np.logical_or.reduce([np.asarray(column == item, dtype=bool) for item in items])
            return ~inside if isinstance(op, ast.NotIn) else inside
        use_text = self.needs_text(left, op, right)
        values = [self.operand(node, use_text) for node in (left, right)]
        result = _OPERATORS[type(op)](values[0], values[1])
        return np.broadcast_to(np.asarray(result, dtype=bool), (self.num_rows,))

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def needs_text(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool:
        constants = [_constant(node, "") for node in (left, right) if not isinstance(node, ast.Name)]
        if constants:
            return isinstance(constants[0], str)
        try:  # two columns: numbers where both are numbers throughout, otherwise text
            for node in (left, right):
                self.operand(node, use_text=False)
        except DataError:
            if isinstance(op, _ORDERINGS):
                raise
            return True
        return False

    def operand(self, node: ast.expr, use_text: bool) -> np.ndarray | float | str:
        if isinstance(node, ast.Name):
            return self.as_text(node.id) if use_text else self.as_numbers(node.id)
        return _constant(node, "")

    def as_text(self, name: str) -> np.ndarray:
        if name not in self.texts:
            values = self.columns[name]
            self.texts[name] = np.array(["" if value is None else str(value) for value in values], dtype=object)
        return self.texts[name]

    def as_numbers(self, name: str) -> np.ndarray:
        if name not in self.numbers:
            values = self.columns[name]
            try:
                numbers = [np.nan if value is None or value == "" else _number(value) for value in values]
            except (TypeError, ValueError, OverflowError):
                numbers = [self.as_number(index, name) for index in range(len(values))]
            self.numbers[name] = np.array(numbers, dtype=np.float64)
        return self.numbers[name]

    def as_number(self, index: int, name: str) -> float:
        value = self.columns[name][index]
        if is_missing(value):
            return float("nan")
        try:
            return _number(value)
        except (TypeError, ValueError, OverflowError) as error:
            where = f", row {self.rows[index]}" if self.rows is not None else ""
            raise DataError(
                f"{self.path}{where}, column {name!r}, value '{shorten(value)}': the filter compares this column with "
                f"a number, but this is not one. Mend the value, or compare with quoted text."
            ) from error
