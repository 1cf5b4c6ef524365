"""`--task auto`: what label columns seem to hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import TaskName
from .cells import NUMBER, is_missing, is_unknown, judge_label, split_items, split_letters, write_name
from .classes import SEPARATOR, as_bit

NUM_SEEN = 1000  # labels whose form is looked at
SOME, MOST, NEARLY_ALL = 0.1, 0.5, 0.95  # shares of them
MAX_LETTERS = 10  # of residue classes; residues are 20
LONG_NUMBER = 15  # digits; of more no float64 is made, so they stand for residues
MIN_CLASSES, MIN_ROWS = 3, 3  # of whole numbers that are taken for classes, and on average of each

# With a unit, a bound, a decimal comma.
_MEANT_AS_NUMBER = re.compile(rf"[<>=\u2264\u2265\s]*{NUMBER}(,[0-9]+)?(\s.*|%|[fpnum\u00b5]?M)?", re.DOTALL).fullmatch
_IS_DIGITS = re.compile("[0-9]+").fullmatch
AMOUNTS = "--task regression if they are amounts"


def choose_task(columns: Mapping[str, pa.ChunkedArray], sequences: pa.ChunkedArray | None) -> tuple[TaskName, str]:
    """The task that the cells seem to be meant for, and what to give if they are not ("" where nothing else fits).

    Args:
        columns: n cells each, by name.
        sequences: n; None where residues cannot have labels, since several columns hold sequences.

    Cost: form and lengths of the first 1,000 labels; the distinct ones of whole columns where these are numbers.
    """
    if len(columns) > 1:
        is_yes_no = all({*map(as_bit, _distinct(column))} <= {0.0, 1.0} for column in columns.values())
        return ("multilabel", AMOUNTS) if is_yes_no else ("regression", "")
    (column,) = columns.values()
    numbered = enumerate(chain.from_iterable(chunk.to_pylist() for chunk in column.chunks))
    seen = dict(islice(((i, cell) for i, cell in numbered if not is_missing(cell)), NUM_SEEN))
    cells = [*seen.values()]
    if sequences is not None and (task := _find_residues(cells, [sequences[i].as_py() for i in seen])):
        other = "residue_regression for amounts, --task classification if each cell is one name"
        return task, f"--task {other}" if task == "residue_classification" else ""
    if _share(cells, _is_meant_as_number) >= MOST:
        return _choose_of_numbers(column)
    if _share(cells, lambda cell: isinstance(cell, list) or SEPARATOR in str(cell) or str(cell)[:1] == "[") > SOME:
        return "multilabel", "--task classification if each cell is one name"
    return "classification", f"--task multilabel if a cell may name several, separated by {SEPARATOR}"


def _choose_of_numbers(column: pa.ChunkedArray) -> tuple[TaskName, str]:
    if pa.types.is_boolean(column.type):
        return "classification", ""
    found = {write_name(cell) for cell in _distinct(column)}
    num, is_whole = len(found), not pa.types.is_floating(column.type)
    is_counted = is_whole and num >= MIN_CLASSES and len(column) >= MIN_ROWS * num and found == {*map(str, range(num))}
    if is_counted or {*map(as_bit, found)} == {0.0, 1.0}:
        return "classification", AMOUNTS
    return "regression", "--task classification if they name classes"


def _find_residues(cells: Sequence[Any], sequences: Sequence[Any]) -> TaskName | None:
    """Labels of residues, if nearly all cells hold as many of them as the sequence has residues."""
    if not cells or all(isinstance(cell, bool | int | float) for cell in cells):
        return None
    split = [split_letters(cell) for cell in cells]
    lengths = [len(str(sequence or "").strip()) for sequence in sequences]
    fits = [len(one) == length > 1 for one, length in zip(split, lengths)]
    is_number = [len(str(cell)) <= LONG_NUMBER and not judge_label(cell).rule for cell in cells]
    if np.mean(fits) < NEARLY_ALL or np.mean(is_number) >= MOST:
        return None
    found = set().union(*(one for one, fit in zip(split, fits) if fit))
    items = {write_name(item) for item in found if not is_unknown(item)}
    if len(items) <= MAX_LETTERS and (all(map(_IS_DIGITS, items)) or not any(map(_is_meant_as_number, items))):
        return "residue_classification"
    is_list = any(split_items(cell) != [cell] for cell in cells)
    return "residue_regression" if is_list and _share([*items], _is_meant_as_number) >= MOST else None


def _is_meant_as_number(cell: Any) -> bool:
    return isinstance(cell, int | float) or (isinstance(cell, str) and bool(_MEANT_AS_NUMBER(cell.strip())))


def _share(cells: Sequence[Any], is_so: Any) -> float:
    return sum(map(bool, map(is_so, cells))) / max(1, len(cells))


def _distinct(column: pa.ChunkedArray) -> list[Any]:
    cells = column if pa.types.is_nested(column.type) else pc.unique(column)
    return [cell for cell in cells.to_pylist() if not is_missing(cell)]
