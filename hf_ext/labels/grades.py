"""Labels that are grades of each row: classes that are numbers, where the middle of what is likely is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import DataError
from .cells import is_number, show_names
from .classes import Classes


class Grades(Classes):
    """Numbers that are classes in an order."""

    task = "grades"
    hub_name = "Grades of protein sequences"
    returns = "the grade of each row, as text; predict_proba returns the probability of each"

    def _doubt_names(self, counts: Mapping[str, int], num_rows: int) -> list[str]:
        """Raises DataError where grades are no numbers."""
        if wrong := [name for name in self.names if not is_number(name)]:
            raise DataError(
                f"column {self.columns[0]!r}: {show_names(wrong)} is no number, so grades have no order. Write "
                "numbers, or give --task classification."
            )
        return self._doubt_single(counts)

    def describe(self) -> str:
        return f"one of {len(self.names):,} grades ({show_names(self.names)})"

    def decode(self, predictions: Any) -> Any:
        """Returns the grade below which, and above which, is at most half of the probability."""
        middle = (np.cumsum(predictions, axis=-1) < 0.5).sum(axis=-1)
        return np.array(self.names)[np.minimum(middle, len(self.names) - 1)]
