"""Variants of one protein as numbers: what they substitute where, and how unlike the residues are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from datasets import Dataset
from numpy.typing import ArrayLike, NDArray

from ..columns import RowNumbers, read_column
from ..proteins import STANDARD
from ..splits import draw_rows
from .substitutions import OTHER, Numbers, Substitutions, find_substitutions

MAX_PAIRS = 2048  # of a position and a residue
MAX_SCALED = 4096  # training rows whose numbers are scaled
LEAST_DEVIATION = 0.05  # of a number that is the same in nearly all of these
MIN_ROWS = 2  # that show a pair: of one, only its own row would learn
# Of the residues of STANDARD: hydropathy (Kyte and Doolittle 1982), volume in cubic angstroms (Zamyatnin 1972), charge.
SCALES = (
    "1.8 2.5 -3.5 -3.5 2.8 -0.4 -3.2 4.5 -3.9 3.8 1.9 -3.5 -1.6 -3.5 -4.5 -0.8 -0.7 4.2 -0.9 -1.3",
    "88.6 108.5 111.1 138.4 189.9 60.1 153.2 166.7 168.6 166.7 162.9 114.1 112.7 143.8 173.4 89 116.1 140 227.8 193.6",
    "0 0 -1 -1 0 0 0 0 1 0 0 0 0 0 1 0 0 0 0 0",
)
# BLOSUM62 (Henikoff and Henikoff 1992), a row for each residue of STANDARD: scores plus 4, as hexadecimal digits.
BLOSUM62 = """
84232423333233354412 4d102113133111133322 21a61331301534243101 30691241512436443212 2211a134144101122357
41321a20201422242121 213432c1312524432126 33114018165111123713 31351231923435643212 33014016286112223523
33124125369224333533 21541451412a24454102 313302213122b3233201 31461241524439543223 31241241623425933112
53442432423534385212 43332223333233359422 43123117255122124813 120152211230021121f6 2212716323321322236b
"""


@dataclass(frozen=True)
class Variants(RowNumbers):
    """What training rows substitute in a wild type, and the numbers that rows become by it.

    Attributes:
        column: whose sequences these are; "": there are none, and rows have no numbers.
        wild_type: its residues.
        pairs: what at least two training rows substitute, 21 times the position from 0 plus the number of the residue.
        positions: where training rows have a substitution, from 0.
        most: substitutions of a training row.
        table: zero-shot scores of all single substitutions, (residues of the wild type, 20 as in `STANDARD`); or None.
        scales: factors of the numbers, one over their deviation in training rows; none: 1.
    """

    column: str = ""
    wild_type: str = ""
    pairs: Sequence[int] = ()
    positions: Sequence[int] = ()
    most: int = 0
    table: Sequence[Sequence[float]] | None = None
    scales: Sequence[float] = ()

    @classmethod
    def fit(
        cls, train: Dataset | Sequence[Any], column: str = "", wild_type: str = "", table: ArrayLike | None = None
    ) -> Variants:
        """Collects what training rows, map-style, substitute; of pairs the 2,048 most frequent at most.

        Args:
            column, wild_type: as `find_variants` found them.
            table: as the attribute, any array.
        """
        if not column:
            return cls()
        found = find_substitutions(read_column(train, column), wild_type)
        pairs, times = np.unique(_pair(found), return_counts=True)
        rank = np.argsort(np.argsort(-times, kind="stable"))
        shown = pairs[(rank < MAX_PAIRS) & (times >= MIN_ROWS)].tolist()
        scores = None if table is None else np.asarray(table, np.float64).tolist()
        made = cls(column, wild_type, shown, np.unique(found.position).tolist(), int(found.counts.max()), scores)
        return made.scaled(train)

    def scaled(self, train: Dataset | Sequence[Any]) -> Variants:
        """Returns the same with scales of these rows: a kernel of unscaled numbers would see volumes alone."""
        if not self.column:
            return self
        rows = draw_rows(len(train), 0, MAX_SCALED)
        drawn = train.select(rows) if isinstance(train, Dataset) else [train[i] for i in rows]
        deviations = replace(self, scales=()).matrix(drawn).std(axis=0)
        return replace(self, scales=(1 / np.maximum(deviations, LEAST_DEVIATION)).tolist())

    def matrix(self, rows: Dataset | Sequence[Any]) -> NDArray[np.float32]:
        """Computes the numbers of rows, map-style or a list: (n, `len(self)`), all 0 of the wild type.

        1 for each pair and each position that the row substitutes; then sums over its substitutions, of the changes of
        hydropathy, volume and charge, of BLOSUM62, of each residue that is put in, and of the table's scores if there
        are; and their number; each times its scale. Of a sequence of another length all are 0.
        """
        if not self.column:
            return np.zeros((len(rows), 0), np.float32)
        found = find_substitutions(read_column(rows, self.column), self.wild_type)
        own = np.array([STANDARD.find(letter) for letter in self.wild_type])
        changes = _changes()[own[found.position], found.letter]
        if self.table is not None:
            scores = np.pad(np.array(self.table), ((0, 0), (0, 1)))
            changes = np.column_stack([changes, scores[found.position, found.letter]])
        sums = np.zeros((len(rows), changes.shape[1]))
        np.add.at(sums, found.row, changes)
        marks = [_mark(found, _pair(found), self.pairs), _mark(found, found.position, self.positions)]
        numbers = np.column_stack([*marks, sums, np.maximum(found.counts, 0)]).astype(np.float32)
        return numbers * np.array(self.scales or 1, np.float32)

    def scores(self, rows: Dataset | Sequence[Any]) -> NDArray[np.float32]:
        """Sums the table's scores of what rows substitute, (n, 1)."""
        return self.matrix(rows)[:, -2:-1]

    def describe(self) -> list[str]:
        """Describes the variants, in a sentence; in none where there are none."""
        if not self.column:
            return []
        return [
            f"variants of one protein: column {self.column!r}, {len(self.wild_type)} residues; training rows change "
            f"{len(self.positions)} positions, at most {self.most} at once (--wild_type names another)"
        ]


def _pair(found: Substitutions) -> Numbers:
    """Returns where substitutions are and what they put in as one number, 21 times the position plus the letter."""
    return found.position * (OTHER + 1) + found.letter


def _mark(
    found: Substitutions,
    codes: Numbers,
    known: Sequence[int],
) -> NDArray[np.float32]:
    """Marks by 1 which of the `known` codes, rising ones, each row has: (n, known)."""
    place = np.searchsorted(known, codes)
    place[~np.isin(codes, known)] = len(known)
    marks = np.zeros((len(found.counts), len(known) + 1), np.float32)
    marks[found.row, place] = 1
    return marks[:, :-1]


@lru_cache(maxsize=1)
def _changes() -> NDArray[np.float64]:
    """Returns what a substitution of one residue by another changes, (21, 21, 24); 0 of letters that are none of 20."""
    changes = np.zeros((OTHER + 1, OTHER + 1, len(SCALES) + 1 + OTHER))
    known = changes[:OTHER, :OTHER]
    for number, scale in enumerate(SCALES):
        values = np.array(scale.split(), float)
        known[..., number] = values - values[:, None]
    known[..., len(SCALES)] = [[int(digit, 16) - 4 for digit in row] for row in BLOSUM62.split()]
    known[..., len(SCALES) + 1 :] = np.eye(OTHER)
    return changes
