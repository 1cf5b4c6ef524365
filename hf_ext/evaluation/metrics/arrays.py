"""Turns what a caller holds (lists, numpy, torch tensors) into the float64 columns the metrics work on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...labels import Array, FloatArray, IntArray


def to_numpy(values: Any) -> Array:
    """Converts a tensor to numpy (bfloat16 as float32, since numpy has none); anything else goes through `asarray`."""
    if hasattr(values, "detach"):  # a torch tensor, told by its interface so that torch is not imported
        values = values.detach()
        values = values.float().cpu().numpy() if values.is_floating_point() else values.cpu().numpy()
    return np.asarray(values)


def as_column(values: Any, name: str) -> FloatArray:
    """Returns `values` as a float64 column.

    Args:
        values: (n,) or (n, 1), numbers; None becomes NaN.
        name: what to call it in an error.

    Returns:
        (n,) float64; may hold NaN and infinities.

    Raises:
        DataError: any other shape, or a value that is not a number.
    """
    try:
        array = to_numpy(values).astype(np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: every value must be a number, but {error}.") from error
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{name}: shape {array.shape} given; one number per row, (n,) or (n, 1), is needed.")
    return array


def as_pair(predictions: Any, references: Any) -> tuple[FloatArray, FloatArray]:
    """Returns both as float64 columns of one length; raises `DataError` where the lengths differ."""
    predicted = as_column(predictions, "predictions")
    measured = as_column(references, "references")
    if len(predicted) != len(measured):
        raise DataError(f"{len(predicted)} predictions for {len(measured)} references: one per row is needed.")
    return predicted, measured


def as_groups(groups: Sequence[Any] | Array, num_rows: int) -> NDArray[np.str_]:
    """Returns one group name per row, as text, so that 7 and "7" are the same group.

    Raises:
        DataError: another number of groups than rows, or a row without one (None or NaN).
    """
    names = to_numpy(groups) if hasattr(groups, "detach") else groups
    labels = list(names)
    if len(labels) != num_rows:
        raise DataError(f"{len(labels)} groups for {num_rows} rows: one group per row is needed.")
    for row, label in enumerate(labels):
        if label is None or label != label:
            raise DataError(f"row {row}: {label!r} is no name of a group or class; name it or leave the row out.")
    return np.asarray([str(label) for label in labels], dtype=np.str_)


def count_not_finite(values: Array, name: str, row: IntArray | None = None) -> str | None:
    """Says how many values, (n, ...), are NaN or infinite and where the first one is; None where all are finite.

    `row` is the row of each, (n,); None: they are rows.
    """
    bad = np.flatnonzero(~np.isfinite(values).all(axis=tuple(range(1, values.ndim))))
    if not len(bad):
        return None
    first = bad[0] if row is None else row[bad[0]]
    return f"{len(bad):,} of {len(values):,} {name} are NaN or infinite (first: row {first})"


def places_of(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Maps each value to the rows that have it, in the order in which values first occur."""
    places: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        places.setdefault(value, []).append(row)
    return places


def divide(part: FloatArray, whole: FloatArray) -> FloatArray:
    """Divides, with NaN (and no warning) where `whole` is 0."""
    return np.divide(part, whole, out=np.full(np.shape(part), math.nan), where=whole != 0)
