"""How rows of each kind of label are scored: by which metrics, and what in predictions and labels is alarming."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import labels
from ..errors import DataError
from ..labels import UNKNOWN, Array, BoolArray, FloatArray, IntArray, LabelKind, Number, Outputs
from .alarms import Examined, examine_probabilities
from .kind_rows import KindRows, Known, Names
from .metrics.classes import (
    CLASS_METRICS,
    MULTILABEL_METRICS,
    TWO_CLASS_METRICS,
    Classification,
    Multilabel,
)
from .metrics.rows import Rows
from .number_kinds import NumberRows, NumbersRows, ResidueNumberRows

MAX_RANKED = 1_000  # labels


class NameRows(KindRows):
    """Of labels that are names, which have probabilities."""

    chooses = "log_loss"
    by_loss = {"focal": "loss", "weighted": "loss"}

    def examine(self, predictions: Outputs, labels: Outputs) -> Examined:
        known = self.known(predictions, labels)
        values = known.values
        truth = known.truth
        shares = self.constant(truth)
        everywhere = Known(
            np.broadcast_to(shares, values.shape),
            truth,
            np.arange(len(truth)),
            len(truth),
        )
        loss, constant = (self.make_rows(each).value("log_loss") for each in (known, everywhere))
        return examine_probabilities(self.kind.names, values, shares, loss, constant, self.count(values, truth))

    def count(self, values: Array, truth: FloatArray) -> Any:
        """Returns of classes how often each is the label, and how often it is predicted."""
        return None

    def score_classes(self, predictions: Array, labels: Array) -> dict[str, dict[str, Any]]:
        found = {}
        counted = (one.tolist() for one in self.count_hits(predictions, labels, labels != UNKNOWN))
        for name, num, of_called, hits in zip(self.kind.names, *counted):
            shares = {
                "precision": (hits, of_called),
                "recall": (hits, num),
                "f1": (2 * hits, num + of_called),
            }
            found[name] = {"support": num} | {key: one / of if of else None for key, (one, of) in shares.items()}
        return found

    def count_hits(self, predictions: Array, labels: Array, known: BoolArray) -> Sequence[Array]:
        """Returns of each name how many have it, are predicted to have it, and both."""
        raise NotImplementedError


class ClassRows(NameRows):
    """Of one class per row."""

    decides = "mcc"
    means = ("log_loss", "accuracy")

    @property
    def names(self) -> Names:
        return (
            *CLASS_METRICS,
            *(TWO_CLASS_METRICS if len(self.kind.names) == 2 else ()),
        )

    def make_rows(self, known: Known) -> Rows:
        return Classification(
            known.values,
            known.truth.astype(np.int64),
            self.kind.names,
            known.row,
            known.num_rows,
        )

    def check(self, truth: FloatArray, row: IntArray) -> None:
        num = len(self.kind.names)
        wrong = np.flatnonzero(~np.isin(truth, np.arange(num)))
        if len(wrong):
            i = wrong[0]
            raise DataError(f"labels, row {row[i]}: {truth[i]:g} is no class; 0 to {num - 1} are known.")

    def count(self, values: Array, truth: FloatArray) -> Any:
        num = len(self.kind.names)
        return [np.bincount(each, minlength=num) for each in (truth.astype(np.int64), values.argmax(axis=1))]

    def count_hits(self, predictions: Array, labels: Array, known: BoolArray) -> Sequence[Array]:
        true = labels[known]
        called = predictions.argmax(-1)[known]
        counted = (true, called, true[true == called])
        return [np.bincount(one, minlength=len(self.kind.names)) for one in counted]


class ResidueClassRows(ClassRows):
    """Of one class per residue."""

    decides = "accuracy"
    names = CLASS_METRICS


class SetRows(NameRows):
    """Of several labels per row."""

    decides = "f1_max"
    means = ("log_loss",)

    @property
    def names(self) -> Names:
        """Returns all; of more than 1,000 labels without that which takes 0.1 s of each to resample."""
        is_many = len(self.kind.names) > MAX_RANKED
        return tuple(name for name in MULTILABEL_METRICS if not (is_many and name == "average_precision"))

    def make_rows(self, known: Known) -> Rows:
        return Multilabel(known.values, known.truth)

    def count_hits(self, predictions: Array, labels: Array, known: BoolArray) -> Sequence[Array]:
        has = labels == 1
        called = (predictions > 0.5) & known
        return has.sum(0), called.sum(0), (has & called).sum(0)


ROWS: dict[type[LabelKind], type[KindRows]] = {
    labels.Number: NumberRows,
    labels.Numbers: NumbersRows,
    labels.Classes: ClassRows,
    labels.LabelColumns: SetRows,
    labels.LabelSets: SetRows,
    labels.ResidueClasses: ResidueClassRows,
    labels.ResidueNumbers: ResidueNumberRows,
}


def metrics_of(kind: LabelKind | None, threshold: float | None = None) -> KindRows:
    """Returns the metrics that rows of a kind have, None: one number; `threshold` is of one number per row."""
    kind = kind or Number()
    return ROWS[type(kind)](kind, threshold)


def rows_for(
    kind: LabelKind | None,
    predictions: Outputs | Rows,
    labels: Outputs,
    threshold: float | None = None,
    metric: str = "rmse",
) -> Rows:
    """Returns the rows of a kind, which know their metrics.

    Args:
        kind: of label; None: one number.
        predictions: row by row as `labels`: numbers (n,) or (n, k) in the unit of the labels; probabilities (n, C) or
            (n, k); of residues (n, longest) or (n, longest, C), or a list of n arrays without padding; or their rows,
            which are returned.
        labels: (n,) or (n, k) numbers, class numbers (n,), 0 and 1 (n, k), of residues (n, longest) or n lists. NaN
            and -100 are not known, and count nowhere, but of one number per row, which is always known.
        threshold: of one number per row: rows at or above it are binders.
        metric: that will be asked for. Of one number per row it may be one of `Summed`: then both are what that takes.

    Raises:
        DataError: shapes or lengths do not fit, or a class is none of the kind.
    """
    if isinstance(predictions, Rows):
        return predictions
    return metrics_of(kind, threshold).rows(predictions, labels, metric)


OF_UNITS = ("little spread", "no better")  # alarms that compare predictions with labels in one unit


def collapse_report(
    predictions: Outputs, references: Outputs, kind: LabelKind | None = None, is_scale_free: bool = False
) -> dict[str, Any]:
    """Says whether predictions have collapsed (few values, little spread, rounded) or do no better than a constant.

    Args:
        predictions, references: (n,) or (n, 1) numbers in one unit; of another `kind` as `rows_for` takes them.
        kind: of label. Of several numbers the report is of the first, the alarms of all.
        is_scale_free: predictions have no unit, in which they could be far from the references.

    Returns:
        What `label_audit` says of the predictions; reference_std (also the RMSE of the references' own mean),
        spread_ratio, rmse, looks_bfloat16 (None: too few rows to tell), alarms (sentences; empty where nothing is
        wrong). Numbers are over rows where both are finite, None where undefined. Of classes and several labels: n
        values; log_loss, and reference_log_loss, that of predicting the shares in these references; spread_ratio, the
        standard deviation of the probabilities by that of the truth; of classes also num_distinct, how many are
        predicted, and never_predicted, names of those that 30 values and more are; alarms.

    Raises:
        DataError: shapes or lengths do not fit.
    """
    report, alarms = metrics_of(kind).examine(predictions, references)
    left_out = OF_UNITS if is_scale_free else ()
    return {**report, "alarms": [text for about, text in alarms.items() if about not in left_out]}
