"""Rows of a split that deserve a score apart: those that show a model something new, those with an exact label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import read_columns

MIN_ROWS = 30  # new ones, and others: below this a score apart says nothing


@dataclass(frozen=True)
class Slice:
    """`rows`: (n,) bool, those that `name` describes."""

    name: str
    rows: NDArray[np.bool_]


def find_slices(train: Any, asked: Any, columns: Sequence[str]) -> tuple[list[Slice], list[str]]:
    """Rows of `asked` whose sequence in a column is not in `train`, for each column, and for all columns together.

    Args:
        train, asked: map-style datasets with these columns.
        columns: the sequence columns that the model reads.

    Returns:
        Slices where both the new rows and the others are 30 or more, each set of rows once; and a sentence for every
        column that has none: all of its rows are new, none is, too few are, or it holds a single value.

    Cost: one pass over the columns.
    """
    known, rows = read_columns(train, columns), read_columns(asked, columns)
    slices: list[Slice] = []
    all_new, none_new, notes = [], [], []
    for places, name in _parts(columns):
        seen = {tuple(row[i] for i in places) for row in known}
        is_new = np.array([tuple(row[i] for i in places) not in seen for row in rows])
        num_new, num_rows = int(is_new.sum()), len(is_new)
        if num_new == num_rows:
            all_new.append(name)
            if num_rows > 1 and len(places) == 1 and len({row[places[0]] for row in rows}) == 1:
                notes.append(f"Every row has the same {name}: nothing here speaks about another.")
        elif num_new == 0 and len(seen) == 1:
            notes.append(f"Every row has the same {name}: nothing here speaks about another.")
        elif num_new == 0:
            none_new.append(name)
        elif min(num_new, num_rows - num_new) < MIN_ROWS:
            notes.append(_describe_few(name, num_new, num_rows))
        elif not any(np.array_equal(one.rows, is_new) for one in slices):
            slices.append(Slice(f"rows whose {name} is not in training", is_new))
    if len(all_new) > 1:
        all_new = [name for name in all_new if "together" not in name]  # new in one column is new together
    if none_new:
        notes.insert(0, f"No row is new to training in {', '.join(none_new)}: nothing here speaks about new ones.")
    if all_new:
        notes.insert(0, f"Every row is new to training in {', '.join(all_new)}: these scores are for new ones.")
    return slices, notes


def find_exact(bounds: Any) -> list[Slice]:
    """The rows whose label is a number and not a bound, where these and the others are 30 or more.

    `bounds`: (n,) of -1, 0, 1; None where there are none.
    """
    if bounds is None:
        return []
    is_exact = np.asarray(bounds) == 0
    enough = MIN_ROWS <= is_exact.sum() <= len(is_exact) - MIN_ROWS
    return [Slice("rows whose label is no bound", is_exact)] if enough else []


def _describe_few(name: str, num_new: int, num_rows: int) -> str:
    """Why rows new in `name` are not scored apart: which of the two kinds is too small."""
    num_known = num_rows - num_new
    text = f"{num_new:,} of {num_rows:,} rows are new to training in {name}"
    if num_new < MIN_ROWS and num_known < MIN_ROWS:
        return f"{text}, {num_known:,} are not: both are too few to be scored apart (it takes {MIN_ROWS} of each)."
    if num_new < MIN_ROWS:
        return f"{text}: these {num_new:,} are too few to be scored apart (it takes {MIN_ROWS})."
    return (
        f"{text}, so these scores are for new ones: the other {num_known:,} are too few to be scored apart (it takes "
        f"{MIN_ROWS})."
    )


def _parts(columns: Sequence[str]) -> list[tuple[list[int], str]]:
    """Each column, then all together: their positions and a name."""
    alone = [([i], column) for i, column in enumerate(columns)]
    together = [([*range(len(columns))], f"{' + '.join(columns)} together")] if len(columns) > 1 else []
    return [*alone, *together]
