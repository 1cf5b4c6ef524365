"""Columns: their names, whole columns out of map-style datasets, and numbering what stands in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from itertools import islice
from typing import Any, Self, TypeVar
from uuid import uuid4

import datasets
import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset as TorchIterableDataset

from ..errors import DataError
from ..labels import UNKNOWN, FloatArray, IntArray, LabelKind, as_bit

Report = dict[str, Any]  # JSON-able, by name
Value = TypeVar("Value", bound=Hashable)
TEACHER = "teacher"  # column, and part of a batch: logits of another model, see `AffinityModel.forward`
SET = "set"  # columns of biotrainer and FLIP, in any case: what a row is for,
VALIDATION = "validation"  # and whether a training row validates
MAX_CHARACTERS = 60  # of a name in a message
MAX_NAMED = 30
BLOCK_ROWS = 65_536  # whose text is held as Python's strings, several times the size of Arrow's, at a time


class RowNumbers:
    """A dataclass of what training rows have, by which rows become numbers; what it holds is what a model stores."""

    matrix: Any  # from rows, map-style or a list, to their numbers, (n, `len(self)`)

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Self:
        """Reads back what `state` returned; None: there are no numbers."""
        return cls(**(state or {}))

    def state(self: Any) -> Report | None:
        """Returns what a model stores, JSON-able; None where there are no numbers."""
        return asdict(self) if len(self) else None

    def __len__(self) -> int:
        """Counts the numbers of a row."""
        return self.matrix([]).shape[1]


def has_numbered_rows(dataset: Any) -> bool:
    """Returns whether rows have numbers: no stream's, even if it has a length, nor a dictionary's of datasets."""
    is_other = isinstance(dataset, Mapping | TorchIterableDataset)
    return not is_other and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def reads_text(collator: Any) -> bool:
    """Returns whether a collator reads columns of text, which Trainer would remove since no model does."""
    return hasattr(collator, "columns")


def read_columns(dataset: Any, columns: Sequence[str], most: int | None = None) -> list[tuple[str, ...]]:
    """Reads rows of `dataset`, of a stream the first `most`, as tuples of the given columns.

    Cost: one pass, of Arrow datasets column by column.
    """
    if isinstance(dataset, datasets.Dataset):
        return list(zip(*(dataset[column][:] for column in columns)))
    rows = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else islice(dataset, most)
    return [tuple(row[column] for column in columns) for row in rows]


def iter_blocks(dataset: Any) -> Iterator[Any]:
    """Yields the rows of an Arrow dataset in blocks of `BLOCK_ROWS`, of which none is a copy; another as it is."""
    if not isinstance(dataset, datasets.Dataset):
        yield dataset
        return
    rows = range(len(dataset))
    for start in range(0, max(1, len(rows)), BLOCK_ROWS):
        yield dataset.select(rows[start : start + BLOCK_ROWS])


def read_column(dataset: Any, name: str) -> list[Any]:
    """Reads one column of `dataset`, as `read_columns` does."""
    return [value for (value,) in read_columns(dataset, [name])]


def factorize(values: Iterable[Value]) -> tuple[np.ndarray, list[Value]]:
    """Gives equal values equal numbers, from 0 in the order in which they first occur.

    Returns:
        The number of each value, (n,) int64, and the distinct values, which these numbers index.
    """
    numbers: dict[Value, int] = {}
    found = [numbers.setdefault(value, len(numbers)) for value in values]
    return np.array(found, np.int64), list(numbers)


def column_names(dataset: Any) -> list[str]:
    """Names of a dataset's columns; of a plain map-style dataset, the keys of its first row, if it has any."""
    names = getattr(dataset, "column_names", None)
    if names or len(dataset) == 0:
        return list(names or [])
    first = dataset[0]
    return list(first) if isinstance(first, Mapping) else []  # a number, say, from which the user's collator makes one


def row_lengths(dataset: Any, inputs: Mapping[str, Sequence[str]]) -> list[int]:
    """Counts residues per row over the columns of those encoder inputs that `dataset` has. Cost: one pass over them."""
    names = set(column_names(dataset))
    columns = [column for parts in inputs.values() for column in parts if column in names]
    return [sum(map(len, row)) for row in read_columns(dataset, columns)]


def as_dataset(table: pa.Table) -> datasets.Dataset:
    """Makes a table a dataset under a name of its own, for which `Dataset` would hash all that it holds."""
    return datasets.Dataset(table, fingerprint=uuid4().hex[:16])


def read_table(data: datasets.Dataset, names: Sequence[str]) -> pa.Table:
    """Returns columns of `data`, classes by their names (`name_classes`)."""
    table = data.select_columns([*names]).with_format("arrow")[:]
    columns = {name: name_classes(table[name], data.features[name]) for name in table.column_names}
    return pa.table(columns)


def name_classes(column: Any, feature: Any) -> Any:
    """Returns the names that a `ClassLabel`, or a list of one, numbers: coded text (`pa.dictionary`), or lists of text.

    -1 is missing. Columns of another feature are returned as they are.
    """
    label = getattr(feature, "feature", feature)
    if not isinstance(label, datasets.ClassLabel):
        return column
    called = dict(enumerate(label.names))
    cells = column.to_pylist()
    if label is feature:
        return pa.array(map(called.get, cells), pa.string()).dictionary_encode()
    return pa.array([cell and [*map(called.get, cell)] for cell in cells], pa.list_(pa.string()))


def hold_out(cells: Iterable[object], flags: Iterable[object]) -> list[object]:
    """Returns the cells of a column `set`, validation in place of train where that of `validation` is true."""
    return [
        VALIDATION if as_bit(flag) == 1 and str(cell).strip().lower() == "train" else cell
        for cell, flag in zip(cells, flags)
    ]


def show_name(name: str) -> str:
    """Returns a name on one line: control characters, invisible ones and lone surrogates are written as escapes."""
    text = name if name.isprintable() else repr(name)[1:-1]
    if len(text) <= MAX_CHARACTERS:
        return text
    return text[: MAX_CHARACTERS - 3] + "..."


def missing_columns(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Returns the sentence that there are no such columns, with the nearest one of each and the list.

    Args:
        wanted: the names that are missing, at least one.
        names: those that are there.
    """
    named = []
    for name in wanted[:MAX_NAMED]:
        near = _nearest(name, names)
        parts = re.split(r"[,+;|\s]+", name)
        hint = f" (did you mean '{near}'?)" if near else ""
        if len(parts) > 1 and set(parts) <= set(names):
            hint = f" (write several with a blank between: {' '.join(map(show_name, parts))})"
        named.append(f"'{show_name(name)}'{hint}")
    what = f"are no columns {', '.join(named)}" if len(named) > 1 else f"is no column {named[0]}"
    return f"there {what}. Columns: {', '.join(map(show_name, names[:MAX_NAMED]))}."


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Finds the name that is alike but for case, blanks, `_` and `-`."""
    folded = {re.sub("[ _-]", "", other.casefold()): other for other in names}
    near = get_close_matches(re.sub("[ _-]", "", name.casefold()), folded, 1, 0.5)
    return show_name(folded[near[0]]) if near else None


def check_columns(names: Sequence[str], wanted: Collection[str], path: str, hint: str = "") -> None:
    """Raises DataError where `names` has a duplicate or lacks some of `wanted`, all of which are named; then `hint`."""
    if len(set(names)) < len(names):
        repeated = min(name for name, num in Counter(names).items() if num > 1)
        raise DataError(
            f"{path}, row 1: column '{show_name(repeated)}' occurs more than once. Rename or remove one of them."
        )
    if missing := [name for name in wanted if name not in names]:
        raise DataError(f"{path}: {missing_columns(missing, names)}{hint}")


def label_array(rows: Any, kind: LabelKind | None = None) -> FloatArray:
    """Returns labels of a map-style split as a batch of all rows has them, float64: (n,), (n, k) or (n, longest).

    What is not known is `UNKNOWN`.
    """
    labels = rows["label"][:]
    labels = labels if kind is None else kind.unpack(labels)
    if len(labels) == 0 or not isinstance(labels[0], list):
        return np.asarray(labels, np.float64)
    found = np.full((len(labels), max(map(len, labels))), np.nan)
    for row, values in zip(found, labels):
        row[: len(values)] = values
    return np.nan_to_num(found, nan=UNKNOWN)


def read_bounds(rows: Any) -> IntArray | None:
    """Reads for each row -1 (the truth is at or below its label), 1 (at or above) or 0 (exact), (n,).

    None without bounds.
    """
    if not hasattr(rows, "__len__") or "bound" not in column_names(rows):
        return None
    return np.asarray(rows["bound"][:], np.int64)
