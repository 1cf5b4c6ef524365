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


def predict_by_partner(
    partner: Partner,
    features: Sequence[NDArray[Any]],
    labels: Sequence[FloatArray],
    sequences: Sequence[Columns],
    pooled: FloatArray,
    *,
    standardize: bool,
) -> FloatArray:
    """Predicts each row with a ridge of its partner's own.

    Partners that validation lacks have one if they have 100 training rows or more, with the median penalty of the
    others; where there is none, `pooled` is taken.

    Args:
        partner: from `find_partner`.
        features, sequences: of training, validation and the rows to predict: (n, d), and by column, then by row.
        labels: of training and validation, (n,).
        pooled: (n,) of the rows to predict.
        standardize: as in `RidgeBaseline`.
    """
    train, validation, asked = (_places(_keys(columns, partner.columns)) for columns in sequences)
    penalties: list[float] = []
    predicted = pooled.copy()
    for key in sorted(train.keys() & asked.keys(), key=lambda key: key not in validation):
        split, rows = (1, validation[key]) if key in validation else (0, train[key])
        if split == 0 and (not penalties or len(rows) < MIN_PARTNER_ROWS):
            continue
        of_train = features[0][train[key]]
        varies = np.ptp(of_train, axis=0) > 0  # a partner's own embedding is the same in all its rows
        varies |= not varies.any()
        ridge = RidgeBaseline([np.median(penalties)] if split == 0 else DEFAULT_LAMBDAS, standardize=standardize)
        ridge.fit(of_train[:, varies], labels[0][train[key]], features[split][rows][:, varies], labels[split][rows])
        if split == 1:
            penalties.append(ridge.best_lambda)
        predicted[asked[key]] = ridge.predict(features[2][asked[key]][:, varies])
    return predicted


def _keys(sequences: Columns, columns: Sequence[int]) -> list[Key]:
    return list(zip(*(sequences[i] for i in columns)))


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return places
