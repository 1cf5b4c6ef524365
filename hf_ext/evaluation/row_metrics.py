"""What evaluations look at while training: which rows, and every metric of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from ..data import column_names, has_numbered_rows, read_column
from ..errors import ArgumentError, DataError
from ..labels import LabelKind, Number
from .kind_rows import KindRows
from .kinds import metrics_of
from .metrics.arrays import (
    Array,
    FloatArray,
    IntArray,
    as_column,
    as_groups,
    count_not_finite,
    to_numpy,
)
from .metrics.rows import THRESHOLD_METRICS, Rows

LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True)
class RowMetrics:
    """`compute_metrics` for labels of a kind: each metric over all rows at once, NaN where it has no value.

    Names and values are those of `score_predictions` without groups; beside them, of one number per row, stands
    `num_distinct`, how many predictions differ.

    Args:
        threshold: labels at or above it are binders, in the unit of the labels; None: no metrics of binders.
        group_column: of the evaluation set, such as the antigen, in proportion to which `eval_subset` takes rows.
        kind: of label.
    """

    threshold: float | None = None
    group_column: str | None = None
    kind: LabelKind = field(default_factory=Number)

    @property
    def names(self) -> tuple[str, ...]:
        """What an evaluation logs that can choose the best model, with the loss that Trainer adds."""
        return ("loss", *self._metrics.logged)

    @property
    def _metrics(self) -> KindRows:
        return metrics_of(self.kind, self.threshold)

    @property
    def mean_metrics(self) -> tuple[str, ...]:
        """Of another kind than one number: the metrics in which early stopping compares two evaluations."""
        return metrics_of(self.kind).means

    def __call__(self, prediction: Any) -> dict[str, float]:
        return self._metrics.measure(self.rows_of(prediction.predictions, prediction.label_ids))

    def rows_of(self, outputs: Any, labels: Any) -> Rows:
        """Makes rows of what the model puts out, and of labels as it got them; of tuples the first."""
        metrics = self._metrics
        return metrics.rows(self.kind.to_predictions(metrics.unpack(outputs)), metrics.unpack(labels))

    def summed(self, metric: str, outputs: Any, labels: Any) -> tuple[FloatArray, FloatArray]:
        """Sums up one of `mean_metrics`: how many values each row holds and their sum, (n,) each."""
        mean = self.rows_of(outputs, labels).means[metric]
        return mean.numbers, mean.sums

    def spell_out(self, name: str) -> str:
        """Names a metric, prefixes included, with the threshold that decides its value: "recall at 9"."""
        is_cut = name.endswith(THRESHOLD_METRICS) and self.threshold is not None
        return f"{name} at {self.threshold:g}" if is_cut else name

    def why_undefined(self, metric: str, dataset: Any, rows: IntArray | None) -> str | None:
        """Returns why a metric will have no value on these rows, whatever is predicted.

        None where nothing speaks against it.

        Args:
            metric: one of `names`.
            dataset: the evaluation set.
            rows: numbers; None: all.
        """
        if metric not in THRESHOLD_METRICS or self.threshold is None or not has_numbered_rows(dataset):
            return None
        labels = _read_labels(dataset)
        if labels is None or not all(isinstance(label, Real) for label in labels):
            return None
        if np.any(np.asarray(labels)[slice(None) if rows is None else rows] >= self.threshold):
            return None
        return f"no label of the evaluation rows is at or above the threshold {self.threshold:g}"


def unpack_labelled(output: Any, kind: LabelKind) -> tuple[Array, Array]:
    """Unpacks predictions and labels of an `EvalPrediction` or `PredictionOutput`.

    One number per row: (n,) float64 each.

    Where a model returns several outputs, or rows hold several labels (a bound too), the first of each.
    """
    metrics = metrics_of(kind)
    return metrics.unpack(output.predictions), metrics.unpack(output.label_ids)


def unpack_std(output: Any) -> FloatArray | None:
    """Unpacks standard deviations, (n,), of rows predicted with `ignore_keys=[]`; None where the model has none."""
    several = isinstance(output.predictions, tuple)
    return np.asarray(output.predictions[1], np.float64) if several else None


# --- a subset of the rows --------------------------------------------------------------------------------------------


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
        DataError: no rows, no such group column, or labels that are missing or not finite.

    Cost: one pass over two columns; a stream is read into memory, and its chosen rows are kept there.
    """
    is_stream = not has_numbered_rows(dataset)
    table = [*dataset] if is_stream else dataset
    if len(table) == 0:
        raise DataError("The evaluation set has no rows: give it some, or --eval_strategy no.")
    names = column_names(table)
    if group_column is not None and group_column not in names:
        raise DataError(f"group_column={group_column!r}: the evaluation set has {', '.join(names) or 'no columns'}.")
    groups = None if group_column is None else read_column(table, group_column)
    labels = _read_labels(table)
    rows = choose_subset(np.zeros(len(table)) if labels is None else labels, groups, size=size, seed=seed)
    return ChosenRows(rows, len(table), [table[i] for i in rows] if is_stream else None)


def choose_subset(
    labels: Any,
    groups: Sequence[Any] | None = None,
    *,
    size: int | float,
    seed: int = 42,
) -> IntArray:
    """Chooses rows that stand for all of them; the same labels, groups, size and seed give the same rows.

    A systematic sample: rows are put in order by group, within it by label, equal ones at random, and from a random
    start every (n / size)-th is taken. So each row has the same chance, and of each run of this order (a class, the
    rows of a group, those of its lower labels) as many are taken as are its share, rounded up or down. Groups too small
    for a row of their own are one group in this. Text and booleans are classes.

    Args:
        labels: (n,) or (n, 1) finite numbers, or (n,) class names or booleans.
        groups: (n,) names (antibody, assay, ...), compared as text; None for no groups.
        size: a count (int, 1 or more; all rows where there are fewer) or a share (float, above 0, at most 1).
        seed: 0 or more.

    Returns:
        Row numbers, ascending and distinct, int64: exactly min(size, n), or n times the share, rounded.

    Raises:
        ArgumentError: size is out of range, or the share is less than half a row.
        DataError: no rows, a label that is missing or not finite, or another number of groups than rows.

    Cost: two sorts; 0.2 s for 100,000 rows in 1,000 groups.
    """
    rank = _rank_labels(labels)
    num_rows = len(rank)
    num_wanted = _num_wanted(size, num_rows)
    names = np.zeros(num_rows) if groups is None else as_groups(groups, num_rows)
    _, group, counts = np.unique(names, return_inverse=True, return_counts=True)
    group = np.where((counts * num_wanted >= num_rows)[group], group, -1)
    rank = np.where(group % 2, -rank, rank)  # up one group and down the next: neighbours in this order are alike
    generator = np.random.default_rng(seed)
    order = np.lexsort((generator.random(num_rows), rank, group))
    return np.sort(order[(np.arange(num_wanted) * num_rows + generator.integers(num_rows)) // num_wanted])


def _rank_labels(labels: Any) -> IntArray:
    """Ranks each row's label among the distinct ones, (n,)."""
    values = to_numpy(labels)
    if values.size == 0:
        raise DataError("labels: no rows to choose from; give at least one.")
    if isinstance(values.reshape(-1)[0], str):
        values = as_groups(values, len(values))
    else:
        values = as_column(values, "labels")
        if problem := count_not_finite(values, "labels"):
            raise DataError(f"{problem}: leave such rows out before a subset is chosen.")
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _num_wanted(size: int | float, num_rows: int) -> int:
    allowed = "give a count of 1 or more (50) or a share above 0 and at most 1.0 (0.05)"
    is_count = isinstance(size, int) and not isinstance(size, bool)
    if not (is_count and size >= 1) and not (isinstance(size, float) and 0.0 < size <= 1.0):
        raise ArgumentError(f"size={size!r} (eval_subset): {allowed}.")
    num = min(size, num_rows) if is_count else round(size * num_rows)
    if num == 0:
        raise ArgumentError(f"size={size} (eval_subset): less than one of {num_rows} rows; {allowed}.")
    return int(num)


# --- columns of an evaluation set -----------------------------------------------------------------------------------


def _read_labels(dataset: Any) -> list[Any] | None:
    """Reads labels of a map-style set, plain values, (n,).

    None without a column of one per row, as labels of tokens are.
    """
    name = next((name for name in LABEL_COLUMNS if name in column_names(dataset)), None)
    values = [] if name is None else read_column(dataset, name)
    if not values or any(to_numpy(value).size != 1 for value in values):
        return None
    return [to_numpy(value).reshape(-1).tolist()[0] for value in values]
