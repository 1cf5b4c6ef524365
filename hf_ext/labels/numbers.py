"""Labels that are numbers: one column or several, or a number for each residue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from . import UNKNOWN, LabelKind
from .cells import Judged, is_missing, is_unknown, judge_label, shorten, split_items

EMPTY = "Bounds can be read where one column is predicted; leave the cell empty where the value is not known."
LIST_REMEDY = "Write a number for each residue, separated by spaces; nan where it is not known."


class Numbers:
    """One number per row and column; NaN where it is not known, which only one of several columns may be."""

    arrow_type: pa.DataType = pa.float64()

    def __init__(self, kind: LabelKind) -> None:
        self.kind = kind

    def judge(self, cell: object) -> Judged:
        """A cell of one of several columns."""
        if is_missing(cell):
            return Judged(math.nan)
        (value, bound), rule, remedy, _ = judge_label(cell)
        if bound or value == UNKNOWN:
            rule = "a bound beside other values" if bound else f"{UNKNOWN} marks what is not known"
            return Judged(math.nan, rule, EMPTY)
        return Judged(value, rule, remedy)

    def facts(self, labels: np.ndarray) -> dict[str, Any]:
        """How many rows or residues there are, and of each column how many numbers are known, and where they lie.

        Args:
            labels: (n,) or (n, columns); NaN is not known.
        """
        found = {}
        for name, column in zip(self.kind.names, labels.reshape(len(labels), -1).T):
            known = column[np.isfinite(column)]
            spread = {key: float(getattr(known, key)()) for key in ("min", "max", "mean", "std") if len(known)}
            found[name] = {"n": len(known), **spread}
        return {"n": len(labels), "columns": found}

    def describe(self, facts: Mapping[str, Any]) -> str:
        """The same in words, for a log."""
        said = []
        for name, one in facts["columns"].items():
            shown = "{min:.4g} to {max:.4g}, mean {mean:.4g}, deviation {std:.4g}".format_map(one)
            lacking = facts["n"] - one["n"]
            said.append(f"{shorten(name)} {shown}" + (f", {lacking:,} not known" if lacking else ""))
        return "; ".join(said)

    def why_useless(self, facts: Mapping[str, Any]) -> str:
        """Why nothing can be learned from training labels; "" where something can."""
        for name, one in facts["columns"].items():
            if not one["n"] or one["min"] == one["max"]:
                value = f"{one['min']:g}" if one["n"] else "not known"
                return f"column {name!r}: all {facts['n']} training labels are {value}, so there is nothing to learn."
        return ""

    def compare(self, facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Warnings about what other splits have and training lacks; of numbers none."""
        return []


class ResidueNumbers(Numbers):
    """A number for each residue, in a list; NaN where it is not known."""

    arrow_type = pa.list_(pa.float64())

    def judge(self, cell: Any) -> Judged:
        """A cell as a list of numbers."""
        if is_missing(cell):
            return Judged([], "the labels are missing", "Fill them in, or leave the row out.")
        items = [None if is_unknown(item) else item for item in split_items(cell)]
        judged = [*map(super().judge, items)]
        for place, one in enumerate(judged):
            if one.rule:
                rule = f"'{shorten(items[place])}' at position {place + 1} of {len(items)} is not a number"
                return Judged([], rule, LIST_REMEDY)
        return Judged([one.value for one in judged])
