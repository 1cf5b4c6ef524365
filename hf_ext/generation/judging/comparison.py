"""The model's outputs and those of each baseline on the same measures, and on which of these the model is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...evaluation._arrays import FloatArray
from ...evaluation.scores import PairedComparison, Score
from ...reporting.tables import format_table
from ...reporting.units import format_cell, score
from .affinities import AffinityScores
from .diversity import Diversity
from .novelty import Novelty
from .scores import Sampling, compare_means
from .validity import Validity

MODEL = "model"
HELD_OUT = "held-out antibodies"
CDR3 = "cdr3"
# Of a row, more is better; as sentences and tables name them.
MEASURES = {
    CDR3: "CDR-H3 recovery",
    "heavy": "heavy chain identity to a binder",
    "light": "light chain identity to a binder",
    "valid": "validity",
    "humanness": "OASis humanness",
    "affinity": "predicted affinity",
}


@dataclass(frozen=True)
class SetScores:
    """What was measured of one set of antibodies: the model's, a baseline's, or those that were held out.

    Attributes:
        name: as tables name it.
        num_rows: antibodies.
        recovery: measure or region -> `Score`; empty where nothing was held out, or for what was.
        humanness: OASis; None where it was not asked for.
        measures: name of `MEASURES` -> (n,) row by row; all sets but the held-out one have the same rows.
    """

    name: str
    num_rows: int
    validity: Validity
    diversity: Diversity
    novelty: Novelty
    recovery: dict[str, Score]
    humanness: Score | None
    affinities: AffinityScores | None
    measures: dict[str, FloatArray]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; without what is row by row."""
        return {
            "num_rows": self.num_rows,
            "validity": self.validity.as_dict(),
            "diversity": self.diversity.as_dict(),
            "novelty": self.novelty.as_dict(),
            "recovery": self.recovery,
            "humanness": self.humanness,
            "affinities": None if self.affinities is None else self.affinities.as_dict(),
        }


Comparisons = dict[str, dict[str, PairedComparison]]


def compare_sets(model: SetScores, baselines: Mapping[str, SetScores], sampling: Sampling) -> Comparisons:
    """Measure -> baseline -> whether the model's rows are better, paired row by row, drawn by what was held out.

    A measure is left out where no row of the model has a value.

    Cost: 60 ns per drawn row, measure and baseline.
    """
    return {
        measure: {
            name: compare_means(baseline.measures[measure], values, sampling)
            for name, baseline in baselines.items()
            if measure in baseline.measures
        }
        for measure, values in model.measures.items()
        if np.isfinite(values).any()
    }


def format_sets(sets: Mapping[str, SetScores]) -> str:
    """A row per set of antibodies: shares and means with their intervals."""
    strict = all(one.validity.strict is not None for one in sets.values())
    columns = {
        "well formed": lambda one: one.validity.well_formed,
        "pattern": lambda one: one.validity.motif,
        **({"numbered": lambda one: one.validity.numbered} if strict else {}),
        **({"strictly valid": lambda one: one.validity.strict} if strict else {}),
        "unique": lambda one: one.diversity.unique_pairs,
        "unique CDR-H3": lambda one: one.diversity.unique_cdr3,
        "memorised": lambda one: one.novelty.memorised,
        "nearest training heavy (0.7 at least)": lambda one: one.novelty.heavy,
        "CDR-H3 recovery": lambda one: one.recovery.get(CDR3),
        "heavy to binder": lambda one: one.recovery.get("heavy"),
        "OASis": lambda one: one.humanness,
        "above pKd threshold": lambda one: one.affinities and one.affinities.share_above,
    }
    shown = {name: [read(one) for one in sets.values()] for name, read in columns.items()}
    shown = {name: cells for name, cells in shown.items() if any(cell is not None for cell in cells)}
    rows = [
        [name, one.num_rows, *(format_cell(None) if cells[i] is None else score(cells[i]) for cells in shown.values())]
        for i, (name, one) in enumerate(sets.items())
    ]
    return format_table(rows, ["", "n", *shown])


def format_comparisons(comparisons: Comparisons) -> str:
    """A row per measure: the model's difference to each baseline, with its interval; positive where it is better."""
    names = list(dict.fromkeys(name for each in comparisons.values() for name in each))
    rows = [
        [MEASURES[measure], *(_difference(each.get(name)) for name in names)] for measure, each in comparisons.items()
    ]
    return format_table(rows, ["model less", *names])


def _difference(compared: PairedComparison | None) -> str:
    if compared is None or compared.improvement is None:
        return "-"
    return score({"value": compared.improvement, "low": compared.low, "high": compared.high})
