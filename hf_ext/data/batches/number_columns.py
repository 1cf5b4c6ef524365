"""Columns beside sequences, as the numbers that a head reads: standardised, or one-hot, by the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...errors import DataError
from ...files import Facts, Json
from ...labels import (
    Array,
    Float32Array,
    FloatArray,
    RowError,
    check_number,
    drop_zeros,
    is_missing,
    show_names,
    write_name,
)
from ..cleaning import format_errors
from ..columns import RowNumbers, read_column, read_columns
from ..reading import SOURCE_ROW

MAX_CATEGORIES = 100


@dataclass(frozen=True)
class NumberColumns(RowNumbers):
    """What training rows have in columns beside their sequences, and the numbers that rows become by it.

    Attributes:
        numeric: column -> `mean`, `std`, `low` and `high` of the training rows, and how many of these are `missing`.
        categories: column -> the names that training rows have, sorted; "" is an empty cell.
    """

    numeric: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def fit(cls, train: Any, numeric: Sequence[str], categories: Sequence[str]) -> NumberColumns:
        """Measures columns of the training rows, map-style; nothing of others enters.

        Raises:
            DataError: a column that all rows lack; more than 100 categories, or a row for each.
        """
        measured = {}
        for name in numeric:
            values = _read_numbers(train, name)
            known = values[np.isfinite(values)]
            if not len(known):
                raise DataError(f"column {name!r}: all {len(train):,} training rows lack it. Leave it out.")
            measured[name] = {
                "mean": float(known.mean()),
                "std": float(known.std()) if known.min() < known.max() else 1.0,
                "low": float(known.min()),
                "high": float(known.max()),
                "missing": len(values) - len(known),
            }
        named = {name: sorted({*_read_names(train, name)}) for name in categories}
        for name, names in named.items():
            if len(names) > min(MAX_CATEGORIES, len(train) - 1):
                raise DataError(
                    f"column {name!r}: {len(names):,} categories in {len(train):,} training rows; {MAX_CATEGORIES} are "
                    "allowed, and fewer than rows. Join rare ones, or name amounts in --numeric_columns."
                )
        return cls(measured, named)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that rows must have."""
        return [*self.numeric, *self.categories]

    def matrix(self, rows: Any) -> Float32Array:
        """Computes the numbers of rows, map-style or a list: (n, `len(self)`).

        Of each numeric column the value less the mean, by the standard deviation, 0 where it is missing; then, where
        training rows lack some, 1 where it is missing. Of each category 1 in the rows that have it.
        """
        blocks: list[Array] = [np.zeros((len(rows), 0))]
        for name, one in self.numeric.items():
            values = _read_numbers(rows, name)
            blocks.append(np.nan_to_num((values - one["mean"]) / one["std"])[:, None])
            if one["missing"]:
                blocks.append(np.isnan(values)[:, None])
        for name, known in self.categories.items():
            place = {category: i for i, category in enumerate(known)}
            codes = [place.get(category, -1) for category in _read_names(rows, name)]
            blocks.append(np.eye(len(known) + 1, len(known))[codes])
        return np.concatenate(blocks, axis=1).astype(np.float32)

    def check(self, splits: Facts, source: str | None = None) -> dict[str, Json]:
        """Returns by column what of it is not read, a sentence: categories that training rows lack.

        Raises:
            DataError: rows lack what all training rows have.
        """
        located = []
        unread = {}
        for name in self.columns:
            known = self.categories.get(name, ())
            may_lack = self.numeric[name]["missing"] > 0 if name in self.numeric else "" in known
            unknown: Counter[str] = Counter()
            for split in splits.values():
                for cell, row in read_columns(split, [name, SOURCE_ROW]):
                    category = _name(cell)
                    if not category and not may_lack:
                        remedy = f"Fill it in, or leave such rows out: --filter '{name} is not None'."
                        error = RowError(int(row), name, "", "missing, which no training row shows", remedy)
                        located.append((source or "rows", error))
                    elif name in self.categories and category not in known:
                        unknown[category] += 1
            if unknown:
                text = f"rows with categories that no training row has ({show_names([*unknown])}): {unknown.total():,}"
                unread[name] = {"cut": f"{text}; they are read as none of those that it has."}
        if located:
            raise DataError(format_errors(located))
        return unread

    def describe(self) -> list[str]:
        """Describes what each column is read as, a sentence each."""
        lines = []
        for name, one in self.numeric.items():
            gaps = f"; {one['missing']:,} lack it" if one["missing"] else ""
            lines.append(f"column {name!r} is read as a number, {one['low']:g} to {one['high']:g} in training{gaps}")
        for name, known in self.categories.items():
            shown = show_names([category or "(empty)" for category in known])
            lines.append(f"column {name!r} is read as one of {len(known)} categories of training: {shown}")
        return lines


def _name(cell: object) -> str:
    """Returns the category of a cell: `1.0` and `1` are one; "" where it is empty."""
    return "" if is_missing(cell) else drop_zeros(write_name(cell))


def _read_names(rows: Any, name: str) -> list[str]:
    return [_name(cell) for cell in read_column(rows, name)]


def _read_numbers(rows: Any, name: str) -> FloatArray:
    """Reads a column, (n,), NaN where it is missing."""
    return np.array([check_number(cell).value for cell in read_column(rows, name)], np.float64)
