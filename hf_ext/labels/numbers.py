"""Labels that are numbers; several of each row, in columns or in lists of one column."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from ..errors import ArgumentError
from ..files import Json
from .cells import UNKNOWN, Checked, check_label, is_missing, shorten, split_items
from .columns import LabelTable, Read, RowError, check_cells
from .kind import LabelKind
from .outputs import LABEL, PREDICTION, Array, Columns, IntArray, Outputs

# Numbers that other programs write where nothing was measured.
NINES = (99.0, 999.0, 9999.0, 99999.0, 999999.0, 99.9, 99.99, 999.9, 999.99, 9999.9, 9999.99)
MIN_OTHERS = 3  # distinct labels, which say where measurements lie
FAR = 10.0  # ranges of the other labels between them and a placeholder
MAX_RATIO = 100.0  # of positive labels: where they span more, such as Kd in nM, 999 may be measured
EMPTY = "Bounds can be read where one column is predicted; leave the cell empty where the value is not known."


class NumericKind(LabelKind):
    """Numbers on a scale, which the model standardises; NaN where one is not known."""

    arrow_type = pa.float64()
    can_stream = True
    has_probabilities = False
    losses: ClassVar[tuple[str, ...]] = ("mse", "huber")
    constant_name = "training mean"
    linear_name = "ridge"
    prior_rows = 0
    hub_task = "regression"
    hub_name = "Regression on protein sequences"

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as a number, NaN where it holds nothing."""
        if is_missing(cell):
            return Checked(math.nan)
        (value, bound), rule, remedy, _ = check_label(cell)
        if bound or value == UNKNOWN:
            rule = "a bound beside other values" if bound else f"{UNKNOWN} marks what is not known"
            return Checked(math.nan, rule, EMPTY)
        return Checked(value, rule, remedy)

    def read_items(self, cell: object) -> list[Any]:
        return split_items(cell)

    def facts(self, labels: Array) -> Json:
        """Returns how many rows or residues there are, and of each column how many numbers are known, and their range.

        Args:
            labels: (n,) or (n, columns); NaN is not known.
        """
        found = {}
        for name, column in zip(self.names, labels.reshape(len(labels), -1).T):
            known = column[np.isfinite(column)]
            measures = {key: float(getattr(known, key)()) for key in ("min", "max", "mean", "std") if len(known)}
            found[name] = {"n": len(known), **measures}
        return {"n": len(labels), "columns": found}

    def describe_facts(self, facts: Json) -> str:
        said = []
        for name, one in facts["columns"].items():
            shown = "{min:.4g} to {max:.4g}, mean {mean:.4g}, deviation {std:.4g}".format_map(one)
            lacking = facts["n"] - one["n"]
            said.append(f"{shorten(name)} {shown}" + (f", {lacking:,} not known" if lacking else ""))
        return "; ".join(said)

    def why_useless(self, facts: Json) -> str:
        for name, one in facts["columns"].items():
            if not one["n"] or one["min"] == one["max"]:
                value = f"{one['min']:g}" if one["n"] else "not known"
                return f"column {name!r}: all {facts['n']} training labels are {value}, so there is nothing to learn."
        return ""

    def scale(self, labels: Sequence[Any]) -> tuple[Any, Any]:
        values = self.flatten(labels)
        return np.nanmean(values, axis=0).tolist(), np.nanstd(values, axis=0).tolist()

    def to_predictions(self, logits: Outputs) -> Any:
        return logits

    def check_probabilities(self) -> None:
        raise ArgumentError(f"This model predicts numbers ({', '.join(self.names)}), which have no probabilities.")

    def decode(self, predictions: Outputs) -> Any:
        return predictions

    @property
    def score_columns(self) -> list[str]:
        return [f"{PREDICTION}_{name}" for name in self.names]


class ColumnKind(LabelKind):
    """Several values of each row, with a column for each in tables."""

    def read(self, table: LabelTable) -> Read:
        return self.read_values(table, {name: table.table[name] for name in self.columns}, [])

    def read_values(self, table: LabelTable, columns: Mapping[str, Any], errors: list[RowError]) -> Read:
        """Returns the column `label` with a value for each of `columns`, NaN where it is not known; and errors.

        Args:
            columns: cells by name.
            errors: found before.
        """
        values = []
        for name, column in columns.items():
            checked = check_cells(column, self.check_cell, name, table.rows)
            values.append(checked.numbers())
            errors = [*errors, *checked.errors, *self.find_wrong(values[-1], name, table.rows)]
        labels = np.stack(values, 1)
        named = {error.row for error in errors}
        rule = "no label of the row is known"
        remedy = "Fill in one of them, or leave the row out."
        bare = [row for row in table.rows[np.isnan(labels).all(1)].tolist() if row not in named]
        errors += [RowError(row, self.columns[0], "", rule, remedy) for row in bare]
        return {"label": pa.array([*labels], pa.list_(pa.float64()))}, errors

    @property
    def label_names(self) -> list[str]:
        return [f"{LABEL}_{name}" for name in self.names]

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        """Returns a column for each value, "" where it is not known."""
        return {name: np.where(row == UNKNOWN, "", row.astype(str)) for name, row in zip(self.label_names, labels.T)}


class Numbers(ColumnKind, NumericKind):
    """Several numbers of each row; a row has at least one of them."""

    task = "regression"
    takes_columns = True
    takes_teacher = True
    arrow_type = pa.list_(pa.float64())
    why_one_head = "here each row has several numbers"

    def read(self, table: LabelTable) -> Read:
        if len(self.columns) < self.num_outputs:
            return self.read_values(table, *self._split_lists(table))
        return super().read(table)

    def find_wrong(self, values: Any, name: str, rows: IntArray) -> list[RowError]:
        return find_placeholders(values, np.zeros(len(rows)), name, rows)

    def _split_lists(self, table: LabelTable) -> Read:
        """Returns a column for each number that cells list, by its name, and an error for each list of other length."""
        (name,) = self.columns
        nothing = [None] * self.num_outputs
        lists = []
        errors = []
        for row, cell in zip(table.rows.tolist(), table.table[name].to_pylist()):
            items = nothing if is_missing(cell) else split_items(cell)
            if len(items) != self.num_outputs:
                rule = f"{len(items)} numbers, not {self.num_outputs}"
                errors.append(RowError(row, name, shorten(cell), rule, "Write nan where one is not known."))
                items = nothing
            lists.append(items)
        return dict(zip(self.names, zip(*lists))), errors

    def describe(self) -> str:
        return f"{len(self.names):,} numbers"

    def describe_returned(self, unit: str) -> str:
        *most, last = self.names
        return f"an array with a column for each of {', '.join(most)} and {last}"

    def prediction_columns(self, predictions: Outputs) -> Columns:
        return dict(zip(self.score_columns, np.transpose(predictions)))


def find_placeholders(labels: Array, bounds: Array, column: str, rows: Array) -> list[RowError]:
    """Refuses nines (-999, 9999, ...) that stand far outside of all other labels; a bound (`<=999`) is none.

    Certain cases only: a negative one among labels of which none is negative, or one that is ten times the range of the
    other labels away from them; a positive one not where labels span two decades, as concentrations do.
    """
    is_nines = np.isin(np.abs(labels), NINES) & (bounds == 0)
    others = np.unique(labels[np.isfinite(labels) & ~is_nines]) if is_nines.any() else labels[:0]
    if len(others) < MIN_OTHERS:
        return []
    low = float(others[0])
    high = float(others[-1])
    may_be_measured = (labels > 0) & (low > 0) & (high > MAX_RATIO * low)
    is_far = (np.maximum(labels - high, low - labels) > FAR * (high - low)) & ~may_be_measured
    rule = f"the label reads as a missing value, all others lie between {low:g} and {high:g}"
    remedy = "Leave the row out (empty is not 0), or write the limit that was measured, such as <=5."
    found = np.flatnonzero(is_nines & (is_far | ((labels < 0) & (low >= 0))))
    return [RowError(int(rows[i]), column, f"{labels[i]:g}", rule, remedy) for i in found]
