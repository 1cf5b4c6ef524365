"""Reading whole columns out of map-style datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import datasets


def read_columns(dataset: Any, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of `dataset` as tuples of the given columns. Cost: one pass; Arrow datasets are read column by column."""
    if isinstance(dataset, datasets.Dataset):
        return list(zip(*(dataset[column][:] for column in columns)))
    return [tuple(dataset[i][column] for column in columns) for i in range(len(dataset))]


def column_names(dataset: Any) -> list[str]:
    """Names of a dataset's columns; of a plain map-style dataset, the keys of its first row."""
    names = getattr(dataset, "column_names", None)
    return list(names) if names else list(dataset[0])


def row_lengths(dataset: Any, inputs: Mapping[str, Sequence[str]]) -> list[int]:
    """Residues per row over the columns of those encoder inputs that `dataset` has. Cost: one pass over them."""
    names = set(column_names(dataset))
    columns = [column for parts in inputs.values() for column in parts if column in names]
    return [sum(map(len, row)) for row in read_columns(dataset, columns)]
