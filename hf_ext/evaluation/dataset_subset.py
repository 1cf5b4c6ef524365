"""`choose_subset` for datasets and streams: the columns it needs are read, the rows of a stream are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.columns import column_names, has_numbered_rows, read_columns
from ..errors import DataError
from ._arrays import to_numpy
from .subset import IntArray, choose_subset

LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True)
class ChosenRows:
    """The rows of an evaluation set that a cheap evaluation looks at.

    Attributes:
        rows: their numbers, ascending, (k,) int64.
        num_rows: of the whole set.
        kept: of a stream, the rows themselves, in order; else None.
    """

    rows: IntArray
    num_rows: int
    kept: list[Any] | None = None

    @property
    def are_all(self) -> bool:
        """Whether there are no others."""
        return len(self.rows) == self.num_rows


def choose_rows(dataset: Any, *, size: int | float, group_column: str | None = None, seed: int = 42) -> ChosenRows:
    """Chooses rows by `choose_subset`: in proportion to labels and groups, the same whenever and wherever it is called.

    Labels are those of a column "label" or "labels" with one value per row. Without one, rows of every group are chosen
    at random.

    Args:
        dataset: map-style, or a stream; its rows are dictionaries where labels or groups are to be read.
        size, seed: see `choose_subset`.
        group_column: a column of names, or None.

    Raises:
        ArgumentError: see `choose_subset`.
        DataError: no rows, no such group column, labels that are missing or not finite, or a stream that cannot be
            read twice.

    Cost: one pass over two columns; a stream is read twice, and its chosen rows are kept in memory.
    """
    labels, groups, num_rows = (
        _read(dataset, group_column) if has_numbered_rows(dataset) else _read_stream(dataset, group_column)
    )
    if num_rows == 0:
        raise DataError("The evaluation set has no rows: give it some, or --eval_strategy no.")
    if labels is None:
        labels = np.zeros(num_rows)
    rows = choose_subset(labels, groups, size=size, seed=seed)
    return ChosenRows(rows, num_rows, None if has_numbered_rows(dataset) else _keep(dataset, rows))


def _read(dataset: Any, group_column: str | None) -> tuple[Any, Any, int]:
    num_rows = len(dataset)
    has_columns = num_rows > 0 and (hasattr(dataset, "column_names") or isinstance(dataset[0], Mapping))
    names = column_names(dataset) if has_columns else []
    wanted = _wanted(names, group_column) if num_rows else {}
    read = {key: [value for (value,) in read_columns(dataset, [name])] for key, name in wanted.items()}
    return one_per_row(read.get("label")), read.get("group"), num_rows


def _read_stream(stream: Any, group_column: str | None) -> tuple[Any, Any, int]:
    read: dict[str, list[Any]] = {}
    num_rows = 0
    wanted: dict[str, str] = {}
    for row in stream:
        if num_rows == 0:
            wanted = _wanted(list(row) if isinstance(row, Mapping) else [], group_column)
        num_rows += 1
        for key, name in wanted.items():
            read.setdefault(key, []).append(row[name])
    return one_per_row(read.get("label")), read.get("group"), num_rows


def _wanted(names: list[str], group_column: str | None) -> dict[str, str]:
    """Which columns to read, by what they are for."""
    if group_column is not None and group_column not in names:
        raise DataError(f"group_column={group_column!r}: the evaluation set has {', '.join(names) or 'no columns'}.")
    label = next((name for name in LABEL_COLUMNS if name in names), None)
    return {**({"label": label} if label else {}), **({"group": group_column} if group_column else {})}


def one_per_row(labels: list[Any] | None) -> list[Any] | None:
    """Plain values; None where a row has no single one, as in labels of tokens."""
    if labels is None or any(to_numpy(label).size != 1 for label in labels):
        return None
    return [label if isinstance(label, str) else _plain(label) for label in labels]


def _plain(label: Any) -> Any:
    while isinstance(label, list | tuple):
        (label,) = label
    return label.item() if hasattr(label, "item") else label


def _keep(stream: Any, rows: IntArray) -> list[Any]:
    wanted = set(rows.tolist())
    kept = [row for number, row in enumerate(stream) if number in wanted]
    if len(kept) != len(rows):
        raise DataError(
            f"The evaluation stream had {len(rows)} chosen rows when it was read first and {len(kept)} the second "
            "time: it must give the same rows whenever it is read. Read it into memory (list(stream)) beforehand."
        )
    return kept
