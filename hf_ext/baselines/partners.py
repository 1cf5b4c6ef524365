"""A model for each partner: where few antigens meet many antibodies, each antigen can have weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data import Columns
from ..evaluation import FloatArray, places_of
from ..labels import Array

MAX_PARTNERS = 50  # a baseline for each: only where these are few,
MIN_PARTNER_ROWS = 100  # and each has this many training rows on average


@dataclass(frozen=True)
class Partner:
    """`columns`: numbers of those whose values tell partners apart; `main`: of those that vary within a partner."""

    columns: list[int]
    main: list[int]
    num_partners: int


def find_partner(sequences: Columns) -> Partner | None:
    """Chooses the columns whose values are few enough for a baseline each; None where there are none.

    From the column with the fewest values on, each that leaves partners few, but never the one with the most values: of
    heavy, light and antigen the antigen, where antibodies are many.

    Args:
        sequences: training rows by column, then by row.
    """
    num_values = [len(set(column)) for column in sequences]
    varying = sorted((i for i, num in enumerate(num_values) if num > 1), key=lambda i: num_values[i])
    columns: list[int] = []
    num_partners = 0
    for i in varying[:-1]:
        num = len(set(_keys(sequences, [*columns, i])))
        if num <= MAX_PARTNERS and len(sequences[0]) >= MIN_PARTNER_ROWS * num:
            columns = sorted([*columns, i])
            num_partners = num
    return Partner(columns, sorted({*varying} - {*columns}), num_partners) if columns else None


def predict_by_partner(
    partner: Partner,
    features: Sequence[Array],
    labels: Sequence[FloatArray],
    sequences: Sequence[Columns],
    pooled: FloatArray,
    make: Callable[[], Any],
) -> FloatArray:
    """Predicts each row with a model of its partner's own; with `pooled`, where training or validation lacks it.

    Args:
        partner: from `find_partner`.
        features, sequences: of training, validation and the rows to predict: (n, d), and by column, then by row.
        labels: of training and validation, (n,).
        pooled: (n,) of the rows to predict.
        make: such models, with `fit` and `predict` as of `RidgeBaseline`.
    """
    train, validation, asked = (places_of(_keys(columns, partner.columns)) for columns in sequences)
    predicted = pooled.copy()
    for key in train.keys() & validation.keys() & asked.keys():
        rows = [places[key] for places in (train, validation, asked)]
        own = [values[chosen] for values, chosen in zip(features, rows)]
        varies = np.ptp(own[0], axis=0) > 0  # a partner's own embedding is the same in all its rows
        varies |= not varies.any()
        of_train, held_out, wanted = (values[:, varies] for values in own)
        fitted = make().fit(of_train, labels[0][rows[0]], held_out, labels[1][rows[1]])
        predicted[rows[2]] = fitted.predict(wanted)
    return predicted


def _keys(sequences: Columns, columns: Sequence[int]) -> list[tuple[str, ...]]:
    return list(zip(*(sequences[i] for i in columns)))
