"""Labels of rows as the tensor that a batch has, for every kind of label."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..labels import UNKNOWN, LabelKind

MEASURED = float(np.nextafter(np.float32(UNKNOWN), np.float32(0)))  # -99.99999: a number that is -100 counts too


def stack_labels(kind: LabelKind, values: Sequence[Any], longest: int | None = None) -> torch.Tensor:
    """One tensor of the labels of n rows; numbers are float32, classes int64.

    Args:
        kind: of the labels.
        values: of each row what its column `label` has: a number, the number of a class, or a list; NaN: not known.
        longest: residues of a row that the encoder takes, where each has a label; None: all.

    Returns:
        (n,); of k values or the labels of a set (n, k); of residues (n, longest row). -100 (`UNKNOWN`) is behind a
        row's end, and what is not known, but of one number per row, where NaN stays.
    """
    dtype = np.int64 if kind.task.endswith("classification") else np.float32
    if kind.per_residue:
        rows = [torch.from_numpy(np.array(value[:longest], dtype)) for value in values]
        labels = pad_sequence(rows, batch_first=True, padding_value=UNKNOWN if dtype is np.int64 else math.nan)
    else:
        labels = torch.from_numpy(np.array(values, dtype))
    if kind.is_one_number or dtype is np.int64:
        return labels
    return labels.masked_fill(labels.eq(UNKNOWN), MEASURED).nan_to_num(nan=UNKNOWN)
