"""Reading whole columns out of map-style datasets, and numbering what stands in them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import datasets
import numpy as np
from torch.utils.data import IterableDataset as TorchIterableDataset

Value = TypeVar("Value", bound=Hashable)


def has_numbered_rows(dataset: Any) -> bool:
    """Whether rows can be had by number: not of streams, which may have a length, nor of a dictionary of datasets."""
    has_both = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return has_both and not isinstance(dataset, Mapping | TorchIterableDataset)


def reads_text(collator: Any) -> bool:
    """Whether a collator reads columns of text, which Trainer would remove since no model does."""
    return hasattr(collator, "columns")


def read_columns(dataset: Any, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of `dataset` as tuples of the given columns. Cost: one pass; Arrow datasets are read column by column."""
    if isinstance(dataset, datasets.Dataset):
        return list(zip(*(dataset[column][:] for column in columns)))
    return [tuple(dataset[i][column] for column in columns) for i in range(len(dataset))]


def column_values(data: datasets.Dataset, column: str) -> list[Any]:
    """Returns one column as Python values, through Arrow: 50 times faster than iterating over `data[column]`."""
    values: list[Any] = data.select_columns([column]).with_format("arrow")[:].column(column).to_pylist()
    return values


def factorize(values: Iterable[Value]) -> tuple[np.ndarray, list[Value]]:
    """Numbers equal values alike, from 0 in the order in which they first occur.

    Returns:
        The number of each value, (n,) int64, and the distinct values, which these numbers index.
    """
    numbers: dict[Value, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], np.int64), list(numbers)


def column_names(dataset: Any) -> list[str]:
    """Names of a dataset's columns; of a plain map-style dataset, the keys of its first row, if it has any."""
    names = getattr(dataset, "column_names", None)
    if names or len(dataset) == 0:
        return list(names or [])
    first = dataset[0]
    return list(first) if isinstance(first, Mapping) else []  # a number, say, from which the user's collator makes one


def row_lengths(dataset: Any, inputs: Mapping[str, Sequence[str]]) -> list[int]:
    """Residues per row over the columns of those encoder inputs that `dataset` has. Cost: one pass over them."""
    names = set(column_names(dataset))
    columns = [column for parts in inputs.values() for column in parts if column in names]
    return [sum(map(len, row)) for row in read_columns(dataset, columns)]
