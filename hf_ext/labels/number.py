"""Labels that are one number of each row, which may be a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from .cells import SIGNS, Checked, check_label, is_missing, shorten, unwrap
from .columns import LabelTable, Read, RowError
from .facts import Facts
from .kind import LabelKind, ReadArguments
from .numbers import Numbers, NumericKind, find_placeholders
from .outputs import LABEL, PREDICTION, Array, BoolArray, Columns, FloatArray, Outputs

if TYPE_CHECKING:
    from pandas import Series

UNSAID = 2  # by a mark: whether its label is a bound
# 1 marks a label the assay could not go below, so the true value is at or below it.
MARKS = {"": UNSAID, "0": 0, "0.0": 0, "false": 0, "1": -1, "1.0": -1, "true": -1, **SIGNS}


class Number(NumericKind):
    """One number of each row, which may be a bound."""

    task = "regression"
    takes_columns = True
    takes_teacher = True
    skips_unknown = False
    why_no_intervals = ""
    output_shape = ()
    label_shape = ()
    is_one_number = True
    losses = ("mse", "huber", "tobit", "ranking")
    baselines = ("groups", "partners", "stream", "nearest", "kernel")
    repeats = True
    chart = "scatter"

    @classmethod
    def fits(cls, columns: Sequence[str], names: Sequence[str]) -> bool:
        return len(names) == 1

    @property
    def stored(self) -> dict[str, Any] | None:
        return None if type(self) is Number else self.state()

    @property
    def arrow_columns(self) -> dict[str, pa.DataType]:
        return {"label": pa.float64(), "bound": pa.int8()}

    def matches(self, other: LabelKind) -> bool:
        return self.task == other.task and other.is_one_number

    def find_names(
        self, cells: pa.ChunkedArray, sequences: pa.ChunkedArray, args: ReadArguments, notes: list[str]
    ) -> LabelKind:
        """Returns `Numbers` where cells list as many."""
        (name,) = self.columns
        facts = Facts.of(cells, None)
        if not facts.are_lists_of_numbers():
            return replace(self, names=(name,))
        return Numbers(self.columns, tuple(f"{name}_{i}" for i in range(1, 1 + facts.vector_length)))

    def check_cell(self, cell: object) -> Checked:
        """Returns a cell as (label, bound), NaN where it is refused."""
        return check_label(unwrap(cell))

    def read(self, table: LabelTable) -> Read:
        """Returns finite numbers and bounds; refuses what would poison a loss.

        Returns:
            `label`, float64 (n,), NaN where refused; `bound`, int8 (n,): -1 true value <= label, 0 exact, +1 >= label;
            and an error for each row that is refused: missing, other text (digits of other scripts and 1_000 too),
            beyond +-1e30, a missing value written as nines (`find_placeholders`), an unknown mark, and a mark that
            contradicts the label's own sign.

        Cost: each distinct cell is parsed once; 0.3 s for 100,000 distinct ones.
        """
        (name,) = self.columns
        rows = table.rows
        column = table.check(name, self.check_cell)
        errors = column.errors
        labels, bounds = column.numbers().reshape(-1, 2).T
        if mark_column := table.censor_column:
            marks = table.check(mark_column, _check_mark)
            given = marks.numbers()
            rule = "the censoring mark contradicts the sign written in the label"
            remedy = "Correct one of them."
            wrong = np.flatnonzero((given != UNSAID) & (bounds != 0) & (given != bounds))
            shown = [shorten(marks.found.cells[marks.found.number[i]].as_py()) for i in wrong]
            errors += marks.errors
            errors += [RowError(int(rows[i]), mark_column, mark, rule, remedy) for i, mark in zip(wrong, shown)]
            bounds = np.where(given == UNSAID, bounds, given)
        errors += find_placeholders(labels, bounds, name, rows)
        return {"label": pa.array(labels), "bound": pa.array(bounds.astype(np.int8))}, errors

    def read_items(self, cell: object) -> list[Any]:
        return [unwrap(cell)]

    def describe(self) -> str:
        return "a number"

    def describe_target(self, label: str, is_order: bool) -> str:
        return f"the order of rows by {label}, not its values," if is_order else f"{label}, in that column's unit,"

    def describe_returned(self, unit: str) -> str:
        return f"one number per row (float32, {unit})"

    def first_metrics(self, decided_by: str, scored: Sequence[str]) -> list[str]:
        return ["spearman", "rmse"]

    def constant_facts(self, labels: FloatArray) -> dict[str, float]:
        return {"mean": float(labels.mean())}

    def noise(self, labels: Series, means: Series, num_free: int) -> dict[str, float]:
        """Returns `noise`, the pooled standard deviation, and `share`, of the labels' variance."""
        noise = math.sqrt(float(((labels - means) ** 2).sum()) / num_free)
        return {"noise": noise, "share": min(1.0, noise**2 / float(labels.var(ddof=0)))}

    def as_columns(self, labels: Array, most: int, least: float) -> tuple[FloatArray, BoolArray]:
        return labels[:, None], np.ones((len(labels), 1), bool)

    def prediction_columns(self, predictions: Outputs) -> Columns:
        return {PREDICTION: np.reshape(predictions, -1)}

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        return {LABEL: labels}

    @property
    def score_columns(self) -> list[str]:
        return [PREDICTION]


def _check_mark(cell: object) -> Checked:
    mark = "" if is_missing(cell) else str(cell).strip().lower()
    if mark in MARKS:
        return Checked(MARKS[mark])
    remedy = "Use <, <=, >, >=, = or empty, or 0/1 where 1 means true value <= label."
    return Checked(UNSAID, "not a censoring mark", remedy)
