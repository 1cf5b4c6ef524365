"""What every evaluation of a regression computes while training: for rows that are known, also by groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.columns import has_numbered_rows
from ..errors import DataError
from . import metrics
from ._arrays import FloatArray, as_groups
from .metrics import GROUP_METRIC, MIN_GROUP_ROWS, THRESHOLD_METRICS, Regression, score_names
from .subset import read_group_column, read_labels

CLOSE = 0.01  # of the largest label: what labels of one row may differ by after half precision


@dataclass(frozen=True)
class RowMetrics:
    """`compute_metrics` for one number per row: each metric over all rows at once, NaN where it has no value.

    Names and values are those of `score_predictions`; beside them stand `num_distinct`, how many predictions differ,
    and with groups `num_defined_groups`, over how many the mean of the groups' correlations is.

    A `FastTrainer` tells it the rows of each evaluation of a map-style set with `of_rows`, of a subset too and on
    several processes. Called without knowing them (in `predict`, by stock `Trainer`, on streams) it leaves groups out.

    Args:
        threshold: labels at or above it are binders, in the unit of the labels; None: no metrics of binders.
        group_column: of the evaluation set, such as the antigen; None: no metric by groups.
        groups, labels: (n,) of the rows that it will be called with, in their order; `of_rows` sets them.

    Raises (from a call):
        DataError: the predictions are of other rows than it was told.
    """

    threshold: float | None = None
    group_column: str | None = None
    groups: NDArray[np.str_] | None = None
    labels: FloatArray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What an evaluation logs that can choose the best model, with the loss that Trainer adds."""
        return ("loss", *score_names(self.threshold, self.group_column is not None), "num_distinct")

    def __call__(self, prediction: Any) -> dict[str, float]:
        predicted, measured = unpack_labelled(prediction)
        rows = Regression(predicted, measured, self.threshold)
        found = {name: rows.value(name).value for name in score_names(self.threshold)}
        if self.groups is not None:
            self._check_rows(measured, self.groups)
            of_groups = metrics.per_group_spearman(predicted, measured, self.groups)
            found[GROUP_METRIC] = metrics.mean_of_groups(of_groups).value
            found["num_defined_groups"] = len(metrics.defined_values(of_groups))
        found["num_distinct"] = len(np.unique(predicted))
        return {name: float(value) for name, value in found.items()}

    def of_rows(self, dataset: Any, rows: NDArray[np.int64] | None) -> RowMetrics:
        """The same for predictions of these rows, in this order; as it is where there are no groups, or of a stream.

        Args:
            dataset: the evaluation set.
            rows: numbers; None: all.

        Raises:
            DataError: no such column, or a row without a group.
        """
        if self.group_column is None or not has_numbered_rows(dataset):
            return self
        groups = as_groups(read_group_column(dataset, self.group_column), len(dataset))
        labels = _read_numbers(dataset)
        chosen: Any = slice(None) if rows is None else rows
        return replace(self, groups=groups[chosen], labels=None if labels is None else labels[chosen])

    def spell_out(self, name: str) -> str:
        """A metric's name, prefixes included, with what else decides its value: "recall at 9"."""
        if name.endswith(THRESHOLD_METRICS) and self.threshold is not None:
            return f"{name} at {self.threshold:g}"
        return f"{name} by {self.group_column}" if name.endswith(GROUP_METRIC) and self.group_column else name

    def why_undefined(self, metric: str, dataset: Any, rows: NDArray[np.int64] | None) -> str | None:
        """Why a metric will have no value on these rows, whatever is predicted; None where nothing speaks against it.

        Args:
            metric: one of `names`.
            dataset, rows: as of `of_rows`.
        """
        if metric == GROUP_METRIC and not has_numbered_rows(dataset):
            return "a stream has no groups"
        if metric == GROUP_METRIC and self.count_groups(dataset, rows) == 0:
            return f"no {self.group_column} has {MIN_GROUP_ROWS} of the evaluation rows"
        if metric in THRESHOLD_METRICS and self.threshold is not None and has_numbered_rows(dataset):
            labels = _read_numbers(dataset)
            if labels is not None and not np.any(labels[slice(None) if rows is None else rows] >= self.threshold):
                return f"no label of the evaluation rows is at or above the threshold {self.threshold:g}"
        return None

    def count_groups(self, dataset: Any, rows: NDArray[np.int64] | None) -> int:
        """How many groups have rows enough for a correlation of their own; 0 of a stream."""
        groups = self.of_rows(dataset, rows).groups
        sizes = np.zeros(0) if groups is None else np.unique(groups, return_counts=True)[1]
        return int(np.count_nonzero(sizes >= MIN_GROUP_ROWS))

    def _check_rows(self, measured: FloatArray, groups: NDArray[np.str_]) -> None:
        """Groups are told by place: rows in another order would get those of others, and nobody would notice."""
        known = measured if self.labels is None else self.labels
        close = CLOSE * float(np.abs(known).max(initial=0.0))
        is_right = len(known) == len(measured) == len(groups)
        if not is_right or not np.allclose(measured, known, rtol=0.0, atol=close, equal_nan=True):
            raise DataError(
                f"group_column={self.group_column!r}: the labels of this evaluation are not those of the evaluation "
                "set, row by row, so that groups cannot be told. Let loader and collator keep rows and labels as they "
                "are, or leave the groups out."
            )


def _read_numbers(dataset: Any) -> FloatArray | None:
    """Labels of a map-style dataset, (n,); None without a column of plain numbers."""
    values = read_labels(dataset)
    are_numbers = values is not None and all(isinstance(value, Real) for value in values)
    return np.asarray(values, np.float64) if are_numbers else None


def unpack_labelled(output: Any) -> tuple[FloatArray, FloatArray]:
    """Predictions and labels, (n,) float64 each, of an `EvalPrediction` or `PredictionOutput`.

    Where a model returns several outputs, or rows hold several labels (a bound too), the first of each.
    """
    return _first_column(output.predictions), _first_column(output.label_ids)


def _first_column(values: Any) -> FloatArray:
    return np.asarray(values[0] if isinstance(values, tuple) else values, np.float64).reshape(-1)
