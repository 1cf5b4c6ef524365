"""A model for each partner: where few antigens meet many antibodies, each antigen can have a baseline of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Key = tuple[str, ...]
# Rows of training, validation and the split that is asked about, of one partner -> predictions of the last.
Fit = Callable[[list[int], list[int], list[int]], FloatArray]

MAX_PARTNERS = 50  # a baseline for each: only where these are few,
MIN_PARTNER_ROWS = 100  # and each has this many training rows on average


@dataclass(frozen=True)
class Partner:
    """`columns`: numbers of those whose values tell partners apart; `main`: of those that vary within a partner."""

    columns: tuple[int, ...]
    main: tuple[int, ...]
    num_partners: int


def find_partner(sequences: Sequence[Sequence[str]]) -> tuple[Partner | None, str]:
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


def fit_by_partner(
    partner: Partner, parts: Sequence[Sequence[Sequence[str]]], pooled: FloatArray, fit: Fit
) -> FloatArray:
    """Predictions of a baseline for each partner; `pooled`, of all partners, where training or validation lack one.

    Args:
        partner: from `find_partner`.
        parts: sequences of training, validation and the asked split, each by column, then by row.
        pooled: (n,) predictions of the asked rows.
        fit: fits on some rows of the first, with others of the second, and predicts some of the third.
    """
    predicted = pooled.copy()
    places = [_places(_keys(sequences, partner.columns)) for sequences in parts]
    for key in places[2].keys() & places[0].keys() & places[1].keys():
        predicted[places[2][key]] = fit(*(place[key] for place in places))
    return predicted


def _keys(sequences: Sequence[Sequence[str]], columns: Sequence[int]) -> list[Key]:
    return list(zip(*(sequences[i] for i in columns)))


def _places(keys: Sequence[Key]) -> dict[Key, list[int]]:
    places: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return places
