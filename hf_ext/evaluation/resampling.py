"""What a bootstrap draws: single rows, or all rows of an antibody, an antigen or a cluster together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ._arrays import FloatArray, as_groups

MIN_UNITS = 10  # effective ones: an interval from fewer is shown, but no claim rests on it


class UnitFacts(TypedDict):
    """What an interval resampled, as results name it."""

    interval_by: str | None
    num_units: int
    num_effective_units: float


@dataclass(frozen=True)
class ResamplingUnits:
    """Groups of rows that were held out together, and so are drawn together.

    Rows of one antibody share what a model gets wrong about it. Drawn one by one they count as many independent tests
    of the model, which they are not; drawn by antibody the interval speaks about further antibodies.

    Attributes:
        column: what tells the units apart, as messages name it.
        unit_of_row: (n,) int64, units numbered from 0.
    """

    column: str
    unit_of_row: NDArray[np.int64]

    @classmethod
    def of(cls, column: str, values: Sequence[Any] | NDArray[Any]) -> ResamplingUnits:
        """Units of rows whose values, (n,), are equal as text; raises `DataError` where a row has none."""
        names = as_groups(values, len(values))
        _, first, number = np.unique(names, return_index=True, return_inverse=True)
        # By first appearance, so that units of one row each are the rows in their order.
        place = np.empty(len(first), np.int64)
        place[np.argsort(first)] = np.arange(len(first))
        return cls(column, place[number.reshape(-1)])

    @cached_property
    def sizes(self) -> FloatArray:
        """Rows of each unit, (units,)."""
        return np.bincount(self.unit_of_row).astype(np.float64)

    @property
    def num_units(self) -> int:
        """How many units there are; 0 of no rows."""
        return len(self.sizes)

    @property
    def num_effective(self) -> float:
        """How many units of equal size would weigh as evenly (Kish): fewer where some hold most of the rows."""
        return float(self.sizes.sum() ** 2 / (self.sizes**2).sum()) if self.num_units else 0.0

    @property
    def are_enough(self) -> bool:
        """Whether a claim may rest on an interval by these units."""
        return self.num_effective >= MIN_UNITS

    @property
    def are_rows(self) -> bool:
        """Whether every unit is a single row."""
        return self.num_units == len(self.unit_of_row)

    def select(self, rows: NDArray[Any]) -> ResamplingUnits:
        """The units of some rows: (n,) bool, or row numbers."""
        return ResamplingUnits.of(self.column, self.unit_of_row[rows])

    def describe(self) -> str:
        """57 values of heavy; and as how many of equal size they count, where that is clearly fewer."""
        uneven = f" (as uneven as {self.num_effective:.0f})" if self.num_effective < 0.75 * self.num_units else ""
        return f"{self.num_units:,} values of {self.column}{uneven}"

    def why_not_enough(self) -> str | None:
        """The sentence for an interval that too few units stand behind; None where there are enough."""
        if self.are_enough:
            return None
        if self.num_units == 1:
            return f"All rows have the same {self.column}: no interval can be had from one."
        return f"An interval from only {self.describe()} is not to be trusted: {MIN_UNITS} of like size are the least."

    def facts(self) -> UnitFacts:
        """As results name them, JSON-able."""
        return {"interval_by": self.column, "num_units": self.num_units, "num_effective_units": self.num_effective}


def check_units(units: ResamplingUnits | None, num_rows: int) -> ResamplingUnits | None:
    """Returns `units`, None where each is one row: then rows are drawn, as if there were none.

    Raises:
        DataError: the units are of another number of rows.
    """
    if units is None:
        return None
    if len(units.unit_of_row) != num_rows:
        raise DataError(f"units of {len(units.unit_of_row)} rows for {num_rows} rows: one unit per row is needed.")
    return None if units.are_rows else units


def unit_facts(units: ResamplingUnits | None, num_rows: int) -> UnitFacts:
    """`ResamplingUnits.facts`, also where the units are rows."""
    if units is not None:
        return units.facts()
    return {"interval_by": None, "num_units": num_rows, "num_effective_units": float(num_rows)}
