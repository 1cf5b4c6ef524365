"""Which rows a trained model was tested on, as its run left them in its folder: on those it was not trained."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from ..files import read_cell

PREDICTIONS = "predictions.csv"  # of a run's test rows, in its folder
Row = tuple[str, ...]


def read_own_test_rows(folder: Path, columns: Sequence[str]) -> set[Row] | None:
    """The sequences of the test rows, in the order of `columns`; None where the folder does not list them."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return None
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = [read_cell(name) for name in reader.fieldnames or ()]
        if not set(columns) <= set(reader.fieldnames):
            return None
        return {tuple(read_cell(line[name] or "") for name in columns) for line in reader}
