"""From what a model puts out to what it predicts, and to columns of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Columns of tables of predictions.
PREDICTION = "prediction"
PROBABILITY = "probability"
LABEL = "label"

Array = NDArray[Any]
FloatArray = NDArray[np.float64]
Float32Array = NDArray[np.float32]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Outputs = Array | Sequence[Any]  # of residues a row's own for each row
Columns = Mapping[str, Sequence[Any] | Array]


def average(predictions: Sequence[Outputs]) -> Any:
    """Returns the mean of what one or more models predict for the same rows, in the form of one.

    Args:
        predictions: from `KindOutputs.to_predictions` of each model: numbers, or probabilities, whose mean is one.
    """
    first = predictions[0]
    if isinstance(first, list):
        return [average(rows) for rows in zip(*predictions, strict=True)]
    return np.mean(np.stack(predictions), axis=0, dtype=np.float64).astype(np.asarray(first).dtype)


class KindOutputs:
    """What a kind of label makes of what a model puts out."""

    names: tuple[str, ...]
    has_probabilities = True

    @property
    def num_outputs(self) -> int:
        """Returns how many there are of the head, for each row or residue."""
        return len(self.names)

    @property
    def num_classes(self) -> int | None:
        """Returns how many classes there are of which a label is one; None where labels are no classes."""
        return None

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Returns the shape of a prediction of a row or residue."""
        return (self.num_outputs,)

    def split_rows(self, logits: Outputs, lengths: Sequence[int]) -> Any:
        """Returns `logits` by row: of residues n arrays, (length, ...) each, without padding; else as they are."""
        return logits

    def to_predictions(self, logits: Outputs) -> Any:
        """Returns what scores take: numbers as they are; of classes probabilities that add up to 1, of sets of each.

        Args:
            logits: (n, ...), or a list from `split_rows`.

        Returns:
            In the shape of `logits`; probabilities are float32.
        """
        if isinstance(logits, list):
            return [self.to_predictions(row) for row in logits]
        from scipy.special import expit, softmax  # here, since scipy takes 0.2 s that scores do not need

        values = np.asarray(logits, np.float32)
        return expit(values) if self.num_classes is None else softmax(values, axis=-1)

    def check_probabilities(self) -> None:
        """Raises ArgumentError where the model predicts numbers."""

    def read_outputs(self, outputs: Array) -> Any:
        """Returns predictions as scores take them, of residues a list of arrays without padding.

        Args:
            outputs: the model's `logits`, (n, ...); -100 behind the last residue of a row.
        """
        return self.to_predictions(outputs)

    def decode(self, predictions: Outputs) -> Any:
        """Returns what is predicted of each row.

        Args:
            predictions: from `to_predictions`; of residues a list.

        Returns:
            Numbers as they are; of classes (n,) names; of sets a list of n tuples of the names whose probability is
            above one half; of residue classes a list of n strings where names are letters, else of n arrays of names.
        """
        raise NotImplementedError

    # Tables of predictions.

    @property
    def prediction_names(self) -> list[str]:
        """Returns the names of the columns that `prediction_columns` makes, in this order."""
        return [*self.prediction_columns(self.split_rows(np.empty((0, *self.output_shape)), []))]

    @property
    def label_names(self) -> list[str]:
        """Returns the names of the columns that `label_columns` makes."""
        return [LABEL]

    @property
    def score_columns(self) -> list[str]:
        """Returns the columns of a CSV in which predictions are looked for, one of each output."""
        return [f"{PROBABILITY}_{name}" for name in self.names]

    def prediction_columns(self, predictions: Outputs) -> Columns:
        """Returns predictions of n rows, from `read_outputs`, by name of column.

        Numbers in label units; the class with the highest probability, and probabilities; the labels whose probability
        is above 0.5, joined by `;`; of residues a letter each, or numbers with spaces between.
        """
        raise NotImplementedError

    def label_columns(self, labels: Array, predictions: Outputs) -> Columns:
        """Returns labels of n rows by name of column, written as predictions are; "" or `?` (of classes) for unknown.

        Args:
            labels: (n, ...), as batches hold them: -100 where one is not known.
            predictions: of these rows, as of `prediction_columns`: they tell how many residues a row has.
        """
        raise NotImplementedError

    def covers(self, scored: str, sequence: str) -> bool:
        """Says whether a line of predictions is of a row with this sequence."""
        return scored == sequence

    def shape_outputs(self, values: Array) -> Array:
        """Returns values of `score_columns`, (n, num_outputs), as scores take predictions."""
        return values.reshape(len(values), *self.output_shape)

    def unpack(self, labels: Sequence[Any]) -> Any:
        """Returns labels of rows, as their column `label` has them, in the shape that batches have."""
        return labels

    def join_cells(self, values: Sequence[Any]) -> Any:
        """Returns predictions that were written as labels are, one value of `check` each, as scores take them."""
        return np.asarray(self.unpack(values))
