"""A ridge for each partner: where few antigens meet many antibodies, each antigen can have weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evaluation.baselines import RidgeBaseline

FloatArray = NDArray[np.float64]
Key = tuple[str, ...]
Columns = Sequence[Sequence[str]]  # sequences by column, then by row

MAX_PARTNERS = 50  # a baseline for each: only where these are few,
MIN_PARTNER_ROWS = 100  # and each has this many training rows on average


@dataclass(frozen=True)
class Partner:
    """`columns`: numbers of those whose values tell partners apart; `main`: of those that vary within a partner."""

    columns: tuple[int, ...]
    main: tuple[int, ...]
    num_partners: int


def find_partner(sequences: Columns) -> tuple[Partner | None, str]:
    """Chooses the columns whose values are few enough for a baseline each.

    All columns that vary but the one with the most values, or as many of them as possible, and of several such choices
    that with the most partners: of heavy, light and antigen the antigen, where antibodies are many.

    Args:
        sequences: training rows by column, then by row.

    Returns:
        The partner, or None; and why not, empty where fewer than two columns vary.
    """
    num_rows = len(sequences[0])
    num_values = [len(set(column)) for column in sequences]
    varying = [i for i, num in enumerate(num_values) if num > 1]
    if len(varying) < 2:
        return None, ""
    main = max(varying, key=lambda i: num_values[i])
    others = [i for i in varying if i != main]
    fewest = 0
    for size in range(len(others), 0, -1):
        counted = [(len(set(_keys(sequences, chosen))), chosen) for chosen in combinations(others, size)]
        fitting = [one for one in counted if one[0] <= MAX_PARTNERS and num_rows >= MIN_PARTNER_ROWS * one[0]]
        if fitting:
            num_partners, chosen = max(fitting, key=lambda one: one[0])
            return Partner(chosen, tuple(i for i in varying if i not in chosen), num_partners), ""
        fewest = min(num for num, _ in counted)
    return None, (
        f"{fewest:,} partners or more over {num_rows:,} training rows; at most {MAX_PARTNERS} with {MIN_PARTNER_ROWS} "
        "rows each on average are needed"
    )


@dataclass(frozen=True)
class PartnerRidges:
    """Ridge regressions by partner.

    Attributes:
        partner: what tells partners apart.
        fitted: partner -> its ridge, of each that training and validation have.
        examples: partner -> (d,), features of a row of it.
    """

    partner: Partner
    fitted: dict[Key, RidgeBaseline]
    examples: dict[Key, FloatArray]

    def predict(self, features: NDArray[Any], sequences: Columns, pooled: FloatArray) -> FloatArray:
        """(n,) from (n, d) features of rows with these sequences; `pooled`, (n,), where a partner has no ridge."""
        predicted = pooled.copy()
        for key, rows in _places(_keys(sequences, self.partner.columns)).items():
            if key in self.fitted:
                predicted[rows] = self.fitted[key].predict(features[rows])
        return predicted


def fit_partner_ridges(
    partner: Partner,
    features: Sequence[NDArray[Any]],
    labels: Sequence[FloatArray],
    sequences: Sequence[Columns],
    *,
    standardize: bool,
) -> PartnerRidges:
    """Fits a ridge for each partner that both have.

    Args:
        partner: from `find_partner`.
        features, labels, sequences: of training and of validation: (n, d), (n,), and by column, then by row.
        standardize: as in `RidgeBaseline`.
    """
    places = [_places(_keys(columns, partner.columns)) for columns in sequences]
    ridges, examples = {}, {}
    for key in places[0].keys() & places[1].keys():
        train, validation = (matrix[place[key]] for matrix, place in zip(features, places))
        own_labels = [values[place[key]] for values, place in zip(labels, places)]
        varies = np.ptp(train, axis=0) > 0  # a partner's own embedding is the same in all its rows
        varies |= not varies.any()
        ridge = RidgeBaseline(standardize=standardize)
        ridge.fit(train[:, varies], own_labels[0], validation[:, varies], own_labels[1])
        assert ridge.weights is not None
        weights = np.zeros(train.shape[1])
        weights[varies] = ridge.weights
        ridge.weights = weights
        ridges[key], examples[key] = ridge, train[0].astype(np.float64)
    return PartnerRidges(partner, ridges, examples)


def _keys(sequences: Columns, columns: Sequence[int]) -> list[Key]:
    return list(zip(*(sequences[i] for i in columns)))


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return places
