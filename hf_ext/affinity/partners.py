"""A ridge for each partner: where few antigens meet many antibodies, each antigen can have weights of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..evaluation.baselines import DEFAULT_LAMBDAS, RidgeBaseline

FloatArray = NDArray[np.float64]
Key = tuple[str, ...]
Columns = Sequence[Sequence[str]]  # sequences by column, then by row

MAX_PARTNERS = 50  # a baseline for each: only where these are few,
MIN_PARTNER_ROWS = 100  # and each has this many training rows on average; or itself, where validation lacks it


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
        fitted: partner -> its ridge.
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
    """Fits a ridge for each partner that both have; and for those with 100 training rows or more that validation lacks.

    The penalty of the latter is the median of the others'; where there are no others they have no ridge.

    Args:
        partner: from `find_partner`.
        features, labels, sequences: of training and of validation: (n, d), (n,), and by column, then by row.
        standardize: as in `RidgeBaseline`.
    """
    train, validation = (_places(_keys(columns, partner.columns)) for columns in sequences)

    def fit(key: Key, held_out: int, rows: list[int], *lambdas: float) -> RidgeBaseline:
        """Penalties chosen on `rows` of training (0) or validation (1)."""
        of_train = features[0][train[key]]
        varies = np.ptp(of_train, axis=0) > 0  # a partner's own embedding is the same in all its rows
        varies |= not varies.any()
        ridge = RidgeBaseline(lambdas or DEFAULT_LAMBDAS, standardize=standardize)
        chosen = features[held_out][rows][:, varies], labels[held_out][rows]
        ridge.fit(of_train[:, varies], labels[0][train[key]], *chosen)
        assert ridge.weights is not None
        weights = np.zeros(of_train.shape[1])
        weights[varies] = ridge.weights
        ridge.weights = weights
        return ridge

    ridges = {key: fit(key, 1, validation[key]) for key in train.keys() & validation.keys()}
    if ridges:
        usual = float(np.median([ridge.best_lambda for ridge in ridges.values()]))
        others = [key for key, rows in train.items() if key not in ridges and len(rows) >= MIN_PARTNER_ROWS]
        ridges.update({key: fit(key, 0, train[key], usual) for key in others})
    return PartnerRidges(partner, ridges, {key: features[0][train[key][0]].astype(np.float64) for key in ridges})


def _keys(sequences: Columns, columns: Sequence[int]) -> list[Key]:
    return list(zip(*(sequences[i] for i in columns)))


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return places
