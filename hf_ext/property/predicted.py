"""What a model of any kind of label puts out, as columns of a table: names of classes, sets, letters, numbers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..labels import UNKNOWN, LabelKind
from ..labels.classes import NO_LABEL, SEPARATOR
from ..labels.outputs import decode, split_rows, to_predictions

PREDICTION, PROBABILITY, LABEL = "prediction", "probability", "label"
MAX_PROBABILITIES = 20  # classes of which each has a column; of more the predicted one's probability stands alone
NOT_KNOWN = "?"

Columns = Mapping[str, Sequence[Any] | NDArray[Any]]


def prediction_names(kind: LabelKind) -> list[str]:
    """Names of the columns that `prediction_columns` makes, in this order."""
    if kind.is_one_number or kind.per_residue:
        return [PREDICTION]
    if kind.task == "regression":
        return [f"{PREDICTION}_{name}" for name in kind.names]
    if kind.task == "classification" and kind.num_outputs > MAX_PROBABILITIES:
        return [PREDICTION, PROBABILITY]
    return [PREDICTION, *(f"{PROBABILITY}_{name}" for name in kind.names)]


def label_names(kind: LabelKind) -> list[str]:
    """Names of the columns that `label_columns` makes."""
    return [f"{LABEL}_{name}" for name in kind.names] if kind.has_values else [LABEL]


def read_outputs(kind: LabelKind, outputs: NDArray[Any]) -> Any:
    """Predictions as scores take them, of residues a list of arrays without padding.

    Args:
        outputs: the model's `logits`, (n, ...); -100 behind the last residue of a row.
    """
    if not kind.per_residue:
        return to_predictions(kind, outputs)
    is_real = outputs != UNKNOWN if kind.is_numeric else (outputs != UNKNOWN).any(2)
    lengths = np.where(is_real, np.arange(1, 1 + is_real.shape[1]), 0).max(1, initial=0).tolist()
    return to_predictions(kind, split_rows(kind, outputs, lengths))


def prediction_columns(kind: LabelKind, predictions: Any) -> Columns:
    """Predictions of n rows by name of column.

    Args:
        kind: of the model.
        predictions: from `read_outputs`.

    Returns:
        Numbers in label units; the class with the highest probability, and probabilities; the labels whose probability
        is above 0.5, joined by `;`; of residues a letter each, or numbers with spaces between.
    """
    predicted = decode(kind, predictions)
    if kind.per_residue:
        found: list[Any] = [join_numbers(predicted) if kind.is_numeric else [*map(join_letters, predicted)]]
    elif kind.is_numeric:
        found = [*predicted.reshape(len(predicted), kind.num_outputs).T]
    else:
        named = [*map(join_set, predicted)] if kind.task == "multilabel" else predicted.tolist()
        shares = np.asarray(predictions, np.float32)
        found = [named, *(shares.T if PROBABILITY not in prediction_names(kind) else [shares.max(1)])]
    return dict(zip(prediction_names(kind), found))


def label_columns(kind: LabelKind, labels: NDArray[Any], predictions: Any) -> Columns:
    """Labels of n rows by name of column, written as predictions are; "" or `?` (of classes) where one is not known.

    Args:
        labels: (n, ...), as batches hold them: -100 where one is not known.
        predictions: of these rows, as of `prediction_columns`: they tell how many residues a row has.
    """
    if kind.is_one_number:
        return {LABEL: labels}
    if kind.has_values:
        return {name: np.where(row == UNKNOWN, "", row.astype(str)) for name, row in zip(label_names(kind), labels.T)}
    if kind.task == "multilabel":
        return {LABEL: [join_set(np.array(kind.names)[row == 1]) for row in labels]}
    if kind.task == "residue_regression":
        rows = split_rows(kind, np.where(labels == UNKNOWN, np.nan, labels), [*map(len, predictions)])
        return {LABEL: join_numbers(rows)}
    names = np.array([*kind.names, NOT_KNOWN])[np.where(labels == UNKNOWN, -1, labels)]
    if kind.task == "classification":
        return {LABEL: names.tolist()}
    return {LABEL: [join_letters(row) for row in split_rows(kind, names, [*map(len, predictions)])]}


def join_set(names: Sequence[str]) -> str:
    """The labels of a row, as a cell lists them: between `;`, as a JSON list where a name has one."""
    if any(SEPARATOR in name for name in names):
        return json.dumps([*names])
    return SEPARATOR.join(names) if len(names) else NO_LABEL


def join_letters(names: Sequence[str]) -> str:
    """One text of the classes of residues: spaces between longer names; a JSON list where a name has a space."""
    if any(" " in name for name in names):
        return json.dumps([*names])
    return ("" if all(len(name) == 1 for name in names) else " ").join(names)


def join_numbers(rows: Iterable[Iterable[float]]) -> NDArray[Any]:
    """Numbers with spaces between, (n,); no list, whose text a CSV guards against being a formula: "-1 2" is none."""
    return np.array([" ".join(map(str, row)) for row in rows], object)
