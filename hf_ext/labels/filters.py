"""Which rows a user's words keep: `pKd > 7 and species == 'human'`, in Python's grammar, as an expression of Arrow's.

Nothing of the text is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from contextlib import suppress
from functools import partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ArgumentError, DataError
from .cells import Checked, check_label, is_missing, write_name
from .columns import check_cells


def _is_in(column: pc.Expression, values: list[Any]) -> pc.Expression:
    """Returns null for null, which Arrow takes for a value that is in no list."""
    return column.isin(values) | (column != column)


JOINED = {ast.And: operator.and_, ast.Or: operator.or_}
EQUAL = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
ORDER = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, **EQUAL}
MEMBER = {ast.In: _is_in, ast.NotIn: lambda column, values: ~_is_in(column, values)}
NOTHING = {ast.Is: lambda column, _: column.is_null(), ast.IsNot: lambda column, _: column.is_valid()}
HOW = (
    "Write COLUMN OP VALUE, where OP is == or !=, of numbers also < <= > or >=, and VALUE a number or quoted text; "
    "COLUMN in ['a', 'b'], not in [1, 2], is None or is not None; join them by and, or, not and brackets. A name "
    "that is no single word stands in backticks."
)


def _read_cell(cell: object, is_number: bool) -> Checked:
    """Reads a cell as labels are read, of a bound its limit, or as text; None where it is empty."""
    if is_missing(cell):
        return Checked(None)
    checked = check_label(cell)
    return checked._replace(value=checked.value[0]) if is_number else Checked(write_name(cell))


class RowFilter:
    """A condition that a row meets or not, or of which that is not known, since a cell of the row is empty.

    Args:
        text: comparisons of a column with a number or quoted text, joined by `and`, `or`, `not` and brackets.
        told: flag and text, for messages.

    Attributes:
        columns: that are compared.

    Raises:
        ArgumentError: the text is anything else; with the part that is wrong.
    """

    def __init__(self, text: str, told: str):
        self.told = told
        self._compared: dict[tuple[str, bool], None] = {}  # name, and whether its cells are numbers
        # Python has no backticks, and a filter no sets: a name in backticks becomes a set of one text.
        named = re.sub("`([^`]+)`", lambda match: f"{{{match[1]!r}}}", text.strip())
        try:
            self._condition = self._read(ast.parse(named, mode="eval").body)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError, OverflowError) as error:
            raise ArgumentError(f"{told}: {getattr(error, 'msg', error)}. {HOW}") from error
        self.columns = [*dict.fromkeys(name for name, _ in self._compared)]

    def find(self, table: pa.Table, rows: np.ndarray, path: str) -> pa.ChunkedArray:
        """Returns for each row true, false, or null where it is not known.

        Args:
            table: n rows with `columns`.
            rows: (n,) the row of each in its file, and `path`, the file, for messages.

        Raises:
            DataError: a cell that is compared with a number is none.

        Cost: each distinct cell is read once.
        """
        import pyarrow.dataset  # here, since no --help needs it

        cells = {}
        for name, is_number in self._compared:
            checked = check_cells(table[name], partial(_read_cell, is_number=is_number), name, rows)
            for error in checked.errors:
                raise DataError(
                    f"{path}, row {error.row}, column {name!r}, value '{error.value}': {self.told} compares it with a "
                    "number, and it is none. Compare the column with quoted text, or fix the value."
                )
            cells[f"{is_number} {name}"] = checked.to_rows(pa.float64() if is_number else pa.string())
        found = pyarrow.dataset.dataset(pa.table(cells)).to_table({"kept": self._condition}, use_threads=False)
        return found["kept"]

    def _read(self, node: ast.AST) -> pc.Expression:
        match node:
            case ast.BoolOp(sign, parts):
                return reduce(JOINED[type(sign)], map(self._read, parts))
            case ast.UnaryOp(ast.Not(), part):
                return ~self._read(part)
            case ast.Compare(
                ast.Name(name) | ast.Set([ast.Constant(str(name))]),
                [sign],
                [ast.Constant() | ast.List() | ast.UnaryOp() as given],
            ):
                with suppress(ValueError):  # of names and sums in a list
                    value = ast.literal_eval(given)
                    values = value if isinstance(value, list) else [value]
                    types = {type(one) for one in values}
                    is_number = types in ({int}, {float}, {int, float})
                    if is_number:  # as cells are: Arrow has no integer of any size
                        value = [*map(float, values)] if isinstance(value, list) else float(value)
                    signs = ORDER if is_number else EQUAL
                    if isinstance(value, list):
                        signs = MEMBER
                    elif value is None:
                        signs = NOTHING
                    if type(sign) in signs and (is_number or types == {str} or value is None):
                        self._compared[name, is_number] = None
                        return signs[type(sign)](pc.field(f"{is_number} {name}"), value)
        raise ValueError(f"{ast.unparse(node)!r} is no comparison of a column with a value")
