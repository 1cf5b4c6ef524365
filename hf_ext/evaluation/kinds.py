"""Which rows, metrics and probabilities belong to a kind of label: the one place that tells kinds apart."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..labels import UNKNOWN, LabelKind
from ._arrays import FloatArray, as_pair, to_numpy
from .class_metrics import CLASS_METRICS, MULTILABEL_METRICS, TWO_CLASS_METRICS, Classification, Multilabel
from .metrics import Regression, Rows, Summed, is_ratio, score_names
from .number_metrics import PER_PROTEIN, RESIDUE_METRICS, ResidueRegression, SeveralNumbers, several_names


class KindMetrics(NamedTuple):
    """Metrics of a kind of label.

    Attributes:
        names: that its rows are scored by.
        decides: the one that the verdict compares in.
        chooses: the one by which checkpoints are chosen.
        means: those that are means of what rows hold, which early stopping compares; none of one number per row.
    """

    names: tuple[str, ...]
    decides: str
    chooses: str
    means: tuple[str, ...] = ()


def metrics_of(kind: LabelKind, threshold: float | None = None) -> KindMetrics:
    """Metrics that rows of a kind have; `threshold` is of one number per row."""
    if kind.is_one_number:
        return KindMetrics(score_names(threshold), "rmse", "rmse")
    of_classes = (*CLASS_METRICS, *(TWO_CLASS_METRICS if kind.num_outputs == 2 else ()))
    return {
        "regression": KindMetrics(several_names(kind.names), "nrmse", "nrmse", ("nrmse",)),
        "classification": KindMetrics(of_classes, "mcc", "log_loss", ("log_loss", "accuracy")),
        "multilabel": KindMetrics(MULTILABEL_METRICS, "f1_max", "log_loss", ("log_loss",)),
        "residue_classification": KindMetrics(CLASS_METRICS, "accuracy", "log_loss", ("log_loss", "accuracy")),
        "residue_regression": KindMetrics(RESIDUE_METRICS, "rmse", "rmse", ("rmse", "mae", PER_PROTEIN)),
    }[kind.task]


def rows_for(
    kind: LabelKind, predictions: Any, labels: Any, threshold: float | None = None, metric: str = "rmse"
) -> Rows:
    """The rows of a kind, which know their metrics.

    Args:
        kind: of label.
        predictions: row by row as `labels`: numbers (n,) or (n, k) in the unit of the labels; probabilities (n, C) or
            (n, k); of residues (n, longest) or (n, longest, C), or a list of n arrays without padding.
        labels: (n,) or (n, k) numbers, class numbers (n,), 0 and 1 (n, k), of residues (n, longest) or n lists. NaN
            and -100 are not known, and count nowhere, but of one number per row, which is always known.
        threshold: of one number per row: rows at or above it are binders.
        metric: that will be asked for. Of one number per row it may be one of `Summed`: then both are what that takes.

    Raises:
        DataError: shapes or lengths do not fit, or a class is none of the kind.
    """
    if kind.is_one_number:
        pair = as_pair(predictions, labels)
        return Summed(*pair) if is_ratio(metric) else Regression(*pair, threshold)
    values, truth, row = known_values(kind, predictions, labels)
    if kind.task == "residue_regression":
        return ResidueRegression(values.astype(np.float64).reshape(-1), truth, row, len(labels))
    if kind.task == "multilabel":
        return Multilabel(values, truth)
    if kind.is_numeric:
        return SeveralNumbers(values.astype(np.float64), truth, kind.names)
    return Classification(values, truth.astype(np.int64), kind.names, row, len(labels))


def known_values(kind: LabelKind, predictions: Any, labels: Any) -> tuple[NDArray[Any], FloatArray, NDArray[np.int64]]:
    """Predictions beside their labels, of another kind than one number per row, with what is not known left out.

    Returns:
        Of classes and residues: predictions (values, outputs), labels (values,), the row of each (values,). Of several
        numbers or labels: (n, k), (n, k) with NaN where it is not known, (n,).

    Raises:
        DataError: see `rows_for`.
    """
    if len(predictions) != len(labels):
        raise DataError(f"{len(predictions)} predictions for {len(labels)} references: one per row is needed.")
    if kind.per_residue:
        values, truth, row = _join_residues(predictions, labels)
        values = values.reshape(-1, kind.num_outputs)
    else:
        values, truth, row = to_numpy(predictions), to_numpy(labels).astype(np.float64), np.arange(len(labels))
    is_class, shape = kind.task.endswith("classification"), (len(row), kind.num_outputs)
    of_labels = shape[:1] if is_class or kind.per_residue else shape
    for name, found, needed in (("predictions", values.shape, shape), ("labels", truth.shape, of_labels)):
        if found != needed:
            raise DataError(f"{name}: shape {found} given; {needed} is needed, for {kind.num_outputs:,} names.")
    if is_class and len(wrong := np.flatnonzero(~np.isin(truth, np.arange(kind.num_outputs)))):
        i = wrong[0]
        raise DataError(f"labels, row {row[i]}: {truth[i]:g} is no class; 0 to {kind.num_outputs - 1} are known.")
    return values, np.where(truth == UNKNOWN, np.nan, truth), row


def _join_residues(predictions: Any, labels: Any) -> tuple[NDArray[Any], FloatArray, NDArray[np.int64]]:
    """Of all residues whose label is known: predictions (residues, ...), labels, and the row of each."""
    truth = [to_numpy(row).astype(np.float64) for row in labels]
    values = [to_numpy(row) for row in predictions]
    for i, (row, of_row) in enumerate(zip(values, truth)):
        if len(row) < len(of_row) and (of_row[len(row) :] != UNKNOWN).any():
            raise DataError(
                f"row {i}: predictions of {len(row)} residues for labels of {len(of_row)}: one each is needed."
            )
    lengths = [min(len(row), len(of_row)) for row, of_row in zip(values, truth)]
    row = np.repeat(np.arange(len(truth)), lengths)
    if not len(row):
        return np.empty((0, 1)), np.empty(0), row
    joined = np.concatenate([each[:length] for each, length in zip(truth, lengths)])
    known = np.isfinite(joined) & (joined != UNKNOWN)
    return np.concatenate([each[:length] for each, length in zip(values, lengths)])[known], joined[known], row[known]
