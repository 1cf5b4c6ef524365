"""What a discriminator says about outputs, and first whether it says anything at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import DataError
from ...evaluation._arrays import FloatArray, as_column
from ...evaluation.alarms import MIN_SPREAD_RATIO
from ...evaluation.metrics import value_of
from ...evaluation.scores import Score, score_predictions
from .discriminator import Trust
from .scores import Sampling, mean_score

THRESHOLD = 7.0  # pKd: 100 nM
MIN_SPREAD = 0.05  # label units; a discriminator whose predictions spread less says one thing about everything


@dataclass(frozen=True)
class AffinityScores:
    """Predicted affinities of n outputs.

    Attributes:
        threshold: label units.
        share_above: outputs predicted at or above it; one that cannot be predicted is not.
        mean: predicted, label units, of those that can be.
        correlation: Spearman between asked-for and predicted; None where nothing was asked for.
        num_refused: outputs that the discriminator cannot read.
        spread: standard deviation of its predictions over every distinct antibody it was shown, label units.
        doubts: why these numbers are not to be believed; empty where they may be.
    """

    threshold: float
    share_above: Score
    mean: Score
    correlation: Score | None
    num_refused: int
    spread: float | None
    doubts: tuple[str, ...]

    @property
    def is_trusted(self) -> bool:
        """Whether nothing speaks against the discriminator."""
        return not self.doubts

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "doubts": list(self.doubts), "is_trusted": self.is_trusted}


def judge_affinities(
    predicted: Any,
    sampling: Sampling,
    *,
    trust: Trust,
    asked: Any = None,
    others: Mapping[str, Any] | None = None,
    threshold: float = THRESHOLD,
) -> AffinityScores:
    """Scores predictions for the outputs, and looks whether the discriminator tells anything from anything.

    Args:
        predicted: (n,) label units; NaN where it could not predict.
        sampling: its units are those of these rows.
        trust: what its record says.
        asked: (n,) pKd that each output was asked to have, NaN for none; None: nothing was asked for.
        others: what it predicts for the baselines and for held-out antibodies, by name: it must tell these apart.
        threshold: label units.

    Raises:
        DataError: other numbers of rows.
    """
    column = as_column(predicted, "predicted")
    above = np.nan_to_num(column, nan=-np.inf) >= threshold
    everything = np.concatenate([column, *(as_column(one, name) for name, one in (others or {}).items())])
    everything = everything[~np.isnan(everything)]
    doubts = [*trust.doubts, *_find_collapse(everything, trust.label_std)]
    return AffinityScores(
        threshold,
        mean_score(above, sampling),
        mean_score(column, sampling),
        None if asked is None else _correlate(column, asked, sampling),
        int(np.isnan(column).sum()),
        float(everything.std()) if len(everything) else None,
        tuple(doubts),
    )


def _find_collapse(predicted: FloatArray, label_std: float | None) -> list[str]:
    if not len(predicted):
        return ["it could read none of the outputs"]
    spread = float(predicted.std())
    least = MIN_SPREAD if label_std is None else MIN_SPREAD_RATIO * label_std
    if len(predicted) > 1 and spread < least:
        middle = float(np.median(predicted))
        return [
            f"it has collapsed: {len(predicted):,} predictions all lie about {middle:.2f} (standard deviation "
            f"{spread:.2g}, where {least:.2g} is the least)"
        ]
    return []


def _correlate(predicted: FloatArray, asked: Any, sampling: Sampling) -> Score:
    wanted = as_column(asked, "asked")
    if len(wanted) != len(predicted):
        raise DataError(f"{len(wanted)} asked-for affinities for {len(predicted)} outputs: one per output is needed.")
    there = np.flatnonzero(~(np.isnan(wanted) | np.isnan(predicted)))
    units = sampling.units.select(there)
    has_value = len(there) > 1 and not value_of("spearman", predicted[there], wanted[there]).undefined
    found = score_predictions(
        predicted[there],
        wanted[there],
        num_resamples=sampling.num_resamples if has_value else 0,
        confidence=sampling.confidence,
        seed=sampling.seed,
        units=units,
    )["spearman"]
    # Units of one row each are taken for rows there, which are trusted however few they are.
    found["interval_by"], found["num_units"] = units.column, units.num_units
    found["num_effective_units"], found["is_trusted"] = units.num_effective, units.are_enough
    return found
