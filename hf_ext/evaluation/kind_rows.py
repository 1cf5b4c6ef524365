"""What scores, verdicts and evaluations ask of a kind of label: its metrics, and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from ..errors import DataError
from ..files import Facts, Json
from ..labels import UNKNOWN, Array, FloatArray, IntArray, LabelKind, Outputs
from .alarms import Examined
from .metrics.arrays import to_numpy
from .metrics.classes import find_shares
from .metrics.rows import Rows

if TYPE_CHECKING:
    from datasets import Dataset

Names = tuple[str, ...]  # of metrics
MAX_SHOWN = 6  # metrics on a screen


class Known(NamedTuple):
    """Predictions beside their labels.

    Of classes and residues `values` are (n, outputs), their `truth` is (n,); of several numbers or labels both are
    (n, k), with NaN where it is not known. `row`, (n,), is that of each of `num_rows`.
    """

    values: Array
    truth: FloatArray
    row: IntArray
    num_rows: int


class KindRows:
    """The metrics of a kind of label, and its rows, which have them.

    Args:
        kind: of label.
        threshold: of one number per row: rows at or above it are binders.

    Attributes:
        decides: the metric that the verdict compares in.
        chooses: the one by which checkpoints are chosen; `by_loss`: where `--loss` is another.
        means: those that are means of what rows hold, which early stopping compares; none of one number per row.
        of_threshold: those that need a threshold; `of_hits`: that also need predictions in its unit.
        of_groups: the one within groups.
        more_logged: what evaluations log besides.
        more_compared: of rows that hold sums by numbers (`Summed`), in which two models may be compared besides.
        first: those that a screen shows.
        orders: the one of the order of rows, which must be above 0; `chance` is said where it is not.
        beats_constant: the one in which the model must first be better than a constant.
    """

    decides: ClassVar[str]
    chooses: ClassVar[str]
    by_loss: ClassVar[Mapping[str, str]] = {}
    means: ClassVar[Names] = ()
    of_threshold: ClassVar[Names] = ()
    of_hits: ClassVar[Names] = ()
    of_groups: ClassVar[Names] = ()
    more_logged: ClassVar[Names] = ()
    more_compared: ClassVar[Names] = ()
    first: ClassVar[Names] = ()
    orders: ClassVar[str] = ""
    chance: ClassVar[str] = ""
    beats_constant: ClassVar[str] = ""

    def __init__(self, kind: LabelKind, threshold: float | None = None):
        self.kind = kind
        self.threshold = threshold

    @property
    def names(self) -> Names:
        """Returns the metrics that rows are scored by."""
        raise NotImplementedError

    @property
    def logged(self) -> Names:
        """Returns what an evaluation logs, beside the loss."""
        return (*self.names, *self.more_logged)

    @property
    def compared(self) -> Names:
        """Returns the metrics in which two models may be compared."""
        return (*self.names, *self.more_compared)

    @property
    def drawn(self) -> Names:
        """Returns the metrics that have an interval.

        The binned error of a resample is larger than that of all rows, by as much as it is meant to show.
        """
        return tuple(name for name in self.names if name != "calibration_error")

    def scored(self, has_groups: bool) -> Names:
        """Returns the metrics of final scores, with groups or without."""
        return (*self.names, *self.of_groups) if has_groups else self.names

    def shown(self, scores: Facts) -> Sequence[str]:
        """Returns the metrics among `scores` that a screen has room for."""
        return self.first or [*scores][:MAX_SHOWN]

    def verdict_metric(self, name: str, is_asked: bool) -> str | None:
        """Returns what the verdict compares in: the metric that chooses checkpoints, where the user asked for it.

        The log loss, which chooses them otherwise, is no reader's question.
        """
        return name if is_asked and name in self.names else self.decides

    def describe_verdict(self, metric: str) -> str:
        """Returns what a run says beforehand of its verdict in `metric`."""
        return f"verdict in {metric}, against {self.kind.constant_name} and linear models."

    def rows(self, predictions: Outputs, labels: Outputs, metric: str = "") -> Rows:
        """Returns the rows, see `rows_for`."""
        return self.make_rows(self.known(predictions, labels))

    def make_rows(self, known: Known) -> Rows:
        """Returns the rows of what is known."""
        raise NotImplementedError

    def measure(self, rows: Rows) -> dict[str, float]:
        """Returns the values of what is `logged`."""
        return {name: float(rows.value(name).value) for name in self.names}

    def unpack(self, values: Any) -> Array:
        """Returns what models put out, or labels, from an evaluation: of several the first."""
        return values[0] if isinstance(values, tuple) else values

    def known(self, predictions: Outputs, labels: Outputs) -> Known:
        """Returns predictions beside their labels, with what is not known left out.

        Raises:
            DataError: see `rows_for`.
        """
        kind = self.kind
        if len(predictions) != len(labels):
            raise DataError(f"{len(predictions)} predictions for {len(labels)} references: one per row is needed.")
        values, truth, row = kind.line_up(predictions, labels, to_numpy)
        num = len(row)
        width = len(kind.names)
        for name, found, needed in (
            ("predictions", values.shape, (num, width)),
            ("labels", truth.shape, (num, *kind.label_shape)),
        ):
            if found != needed:
                raise DataError(f"{name}: shape {found} given; {needed} is needed, for {width:,} names.")
        self.check(truth, row)
        return Known(values, np.where(truth == UNKNOWN, np.nan, truth), row, len(labels))

    def check(self, truth: FloatArray, row: IntArray) -> None:
        """Raises DataError where labels, (values,) with the row of each, cannot be of this kind."""

    def constant(self, truth: FloatArray) -> FloatArray:
        """Returns the best prediction that is the same for all rows, see `find_shares`."""
        return find_shares(truth, self.kind.num_classes)

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        """Returns what `collapse_report` does, and its alarms by what they are about."""
        raise NotImplementedError

    def can_examine(self, predictions: Outputs, labels: Outputs) -> bool:
        """Says whether what an evaluation has is of this kind."""
        return True

    def audit(self, rows: Dataset, bounds: IntArray | None) -> Json:
        """Returns what the labels of a split, whose `read_bounds` these are, hold, JSON-able, with `alarms`."""
        return {**self.kind.facts_of(rows), "alarms": []}

    def describe_audit(self, audit: Json) -> str:
        """Returns the same in words, for a log."""
        return self.kind.describe_facts(audit)

    def score_classes(self, predictions: Array, labels: Array) -> dict[str, Json]:
        """Returns of each class or label how many rows or residues have it (`support`), precision, recall and F1.

        Args:
            predictions: probabilities (n, C), of residues (n, longest, C).
            labels: of these rows, as batches hold them.
        """
        return {}
