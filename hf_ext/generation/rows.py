"""Antibodies with the antigen that each is for, and means over them with intervals of what was held out together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..data.antibodies import AntibodyPair
from ..evaluation._arrays import as_column, as_pair
from ..evaluation.metrics import MetricValue
from ..evaluation.resampling import ResamplingUnits, check_units, resample
from ..evaluation.scores import PairedComparison, Score, compare_paired, make_score

CHAINS = ("heavy", "light")
CONFIDENCE = 0.95  # of all intervals


@dataclass(frozen=True)
class AntibodyRows:
    """n antibodies as columns of equal length.

    Attributes:
        heavy: capital letters; "" where there is none.
        light: None where the antibody is a heavy chain alone.
        antigens: what each was written for, or is known to bind.
        malformed: what was wrong with the tokens it was decoded from; None where nothing was.
    """

    heavy: tuple[str, ...]
    light: tuple[str | None, ...]
    antigens: tuple[str, ...]
    malformed: tuple[str | None, ...]

    @classmethod
    def of_pairs(cls, pairs: Sequence[AntibodyPair], antigens: Sequence[str]) -> AntibodyRows:
        """From what a generator wrote, row by row as `antigens`."""
        light = tuple(pair.light or None for pair in pairs)
        malformed = tuple("; ".join(pair.malformed) or None for pair in pairs)
        return cls(tuple(pair.heavy for pair in pairs), light, tuple(antigens), malformed)

    @classmethod
    def of_columns(cls, heavy: Sequence[str], light: Sequence[str | None], antigens: Sequence[str]) -> AntibodyRows:
        """From columns of equal length."""
        return cls(tuple(heavy), tuple(one or None for one in light), tuple(antigens), (None,) * len(heavy))

    def __len__(self) -> int:
        return len(self.heavy)

    @property
    def pairs(self) -> list[tuple[str, str | None]]:
        """(heavy, light) of each row."""
        return list(zip(self.heavy, self.light))

    def chain(self, name: str) -> list[str]:
        """The "heavy" or "light" chains, "" where there is none."""
        return [one or "" for one in getattr(self, name)]

    def select(self, rows: Any) -> AntibodyRows:
        """Some rows: (n,) bool, or row numbers."""
        asked = np.asarray(rows)
        chosen = np.arange(len(self))[asked if asked.size else asked.astype(np.int64)]
        return AntibodyRows(*(tuple(column[i] for i in chosen) for column in vars(self).values()))


@dataclass(frozen=True)
class Sampling:
    """How intervals are drawn.

    Attributes:
        units: rows that were held out together (an antigen, or its cluster), row by row as what is scored.
        num_resamples: 2 or more.
        seed: of the draws, 0 or more.
    """

    units: ResamplingUnits
    num_resamples: int = 1000
    seed: int = 0


def places_of(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Value -> the rows that have it, in the order in which values first occur."""
    places: dict[Any, list[int]] = {}
    for row, value in enumerate(values):
        places.setdefault(value, []).append(row)
    return places


def mean_score(values: Any, sampling: Sampling) -> Score:
    """The mean of rows, with the interval of further units.

    Rows without a value (NaN) are left out, and `n` does not count them. A share that is 0 or 1 in all rows has the
    exact binomial interval of as many tries as there are effective units: resamples of it would all be the same.

    Args:
        values: (n,) numbers, or bool for a share.
        sampling: its units are those of these n rows.

    Raises:
        DataError: units of another number of rows.

    Cost: 60 ns per drawn row.
    """
    is_share = np.asarray(values).dtype == bool
    column = as_column(values, "values")
    check_units(sampling.units, len(column))
    has_value = ~np.isnan(column)
    column, units = column[has_value], sampling.units.select(has_value)
    if not len(column):
        return make_score(MetricValue(math.nan, "no row has a value"), column, 0, CONFIDENCE, units)
    is_constant = is_share and units.num_units > 1 and column.min() == column.max()
    samples = np.empty(0)
    if not is_constant:
        drawn, num = check_units(units, len(column)), sampling.num_resamples
        samples = resample(lambda n: n @ column / n.sum(axis=1), len(column), num, sampling.seed, drawn)
    score = make_score(MetricValue(float(column.mean())), samples, len(column), CONFIDENCE, units)
    if is_constant:
        reach = ((1 - CONFIDENCE) / 2) ** (1 / units.num_effective)  # Clopper and Pearson's
        score["low"], score["high"] = (reach, 1.0) if column[0] == 1 else (0.0, 1 - reach)
    return score


def compare_means(before: Any, after: Any, sampling: Sampling, num_tokens: Any = None) -> PairedComparison:
    """Whether the mean of `after` is better than that of `before` on the same rows, and by how much.

    Args:
        before, after: (n,) numbers of which more is better. Rows where either has no value (NaN) are left out of both.
        sampling: its units are those of these n rows.
        num_tokens: (n,) tokens of each row; then `before` and `after` are summed losses, and less per token is better.

    Raises:
        DataError: other numbers of rows.

    Cost: as `compare_paired`.
    """
    earlier, later = as_pair(before, after)
    check_units(sampling.units, len(earlier))
    has_both = ~(np.isnan(earlier) | np.isnan(later))
    units = sampling.units.select(has_both)
    compared = compare_paired(
        (np.ones(len(earlier)) if num_tokens is None else as_column(num_tokens, "num_tokens"))[has_both],
        earlier[has_both],
        later[has_both],
        "accuracy" if num_tokens is None else "token_loss",
        confidence=CONFIDENCE,
        num_resamples=sampling.num_resamples,
        seed=sampling.seed,
        units=units,
    )
    # It takes units of one row each for rows, which it trusts however few they are; here they are antigens.
    return replace(compared, **units.facts())
