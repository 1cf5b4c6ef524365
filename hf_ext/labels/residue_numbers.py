"""Labels that are a number for each residue of a sequence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from .cells import UNKNOWN, Checked, is_missing, is_unknown, shorten, split_items
from .columns import RowError
from .kind import LabelKind
from .number import Number
from .numbers import NumericKind, find_placeholders
from .outputs import LABEL, PREDICTION, Array, Columns, IntArray, Outputs
from .residues import MISSING, ResidueKind

LIST_REMEDY = "Write a number for each residue, separated by spaces; nan where it is not known."


class ResidueNumbers(ResidueKind, NumericKind):
    """A number for each residue, in a list; NaN where it is not known."""

    task = "residue_regression"
    arrow_type = pa.list_(pa.float64())
    unknown = math.nan
    output_shape = ()
    hub_name = "Regression on residues"
    returns = "a number for each residue of a row"

    @property
    def of_rows(self) -> LabelKind:
        return Number(self.columns, self.names)

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as a list of numbers."""
        if is_missing(cell):
            return MISSING
        items = [None if is_unknown(item) else item for item in split_items(cell)]
        checked = [*map(super().check_cell, items)]
        for place, one in enumerate(checked):
            if one.rule:
                rule = f"'{shorten(items[place])}' at position {place + 1} of {len(items)} is not a number"
                return Checked([], rule, LIST_REMEDY)
        return Checked([one.value for one in checked])

    def find_wrong(self, values: Any, name: str, rows: IntArray) -> list[RowError]:
        flat = np.concatenate([*values, []])
        of_row = np.repeat(rows, [*map(len, values)])
        nines = {error.row: error for error in find_placeholders(flat, np.zeros(len(flat)), name, of_row)}
        return [RowError(row, name, error.value, error.rule, LIST_REMEDY) for row, error in nines.items()]

    def describe(self) -> str:
        return "a number for each residue"

    def prediction_columns(self, predictions: Outputs) -> Columns:
        return {PREDICTION: join_numbers(predictions)}

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        rows = self.split_rows(np.where(labels == UNKNOWN, np.nan, labels), [*map(len, predictions)])
        return {LABEL: join_numbers(rows)}

    def join_cells(self, values: Sequence[Any]) -> Any:
        return [np.asarray(value) for value in values]


def join_numbers(rows: Iterable[Iterable[float]]) -> Array:
    """Returns numbers with spaces between, (n,); no list, whose text a CSV guards against being a formula."""
    return np.array([" ".join(map(str, row)) for row in rows], object)
