"""From what a model puts out to what it predicts: probabilities, and names of classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import LabelKind


def split_rows(kind: LabelKind, logits: np.ndarray, lengths: Sequence[int]) -> Any:
    """`logits` by row: of residues a list of n arrays, (length, ...) each, without padding; else as they are.

    Args:
        lengths: residues of each row that the model read.
    """
    return [row[:length] for row, length in zip(logits, lengths, strict=True)] if kind.per_residue else logits


def to_predictions(kind: LabelKind, logits: Any) -> Any:
    """What scores take: numbers as they are; of classes probabilities that add up to 1, of labels of a set of each.

    Args:
        logits: (n, ...), or a list from `split_rows`.

    Returns:
        In the shape of `logits`; probabilities are float32.
    """
    if kind.is_numeric:
        return logits
    if isinstance(logits, list):
        return [to_predictions(kind, row) for row in logits]
    from scipy.special import expit, softmax  # here, since scipy takes 0.2 s that scores do not need

    values = np.asarray(logits, np.float32)
    return expit(values) if kind.task == "multilabel" else softmax(values, axis=-1)


def decode(kind: LabelKind, predictions: Any) -> Any:
    """What is predicted of each row.

    Args:
        predictions: from `to_predictions`; of residues a list.

    Returns:
        Numbers as they are; of classes (n,) names; of sets a list of n tuples of the names whose probability is above
        one half; of residue classes a list of n strings where names are letters, else of n arrays of names.
    """
    if kind.is_numeric:
        return predictions
    if kind.task == "multilabel":
        return [tuple(name for name, value in zip(kind.names, row) if value > 0.5) for row in predictions]
    names = np.array(kind.names)
    if kind.task == "classification":
        return names[np.argmax(predictions, axis=-1)]
    found = [names[np.argmax(row, axis=-1)] for row in predictions]
    return ["".join(row) for row in found] if all(len(name) == 1 for name in kind.names) else found
