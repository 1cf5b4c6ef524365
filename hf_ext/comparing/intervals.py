"""Medians over rounds with 95 % intervals: rounds are drawn again, and within each round its steps.

Of three rounds such an interval holds the true ratio in 8 of 10 simulated comparisons. Verdicts do not go by it, but by
Student's interval of the logarithms of rounds' ratios (`decision_interval`), which holds it in 19 of 20
(`tests/comparing/test_noise.py` simulates both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 1000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value, its 95 % interval, and the smallest and largest value of a round."""

    value: float
    low: float
    high: float
    smallest: float
    largest: float

    def __str__(self) -> str:
        return f"{self.value:,.4g} [{self.low:,.4g}, {self.high:,.4g}]"


@dataclass(frozen=True)
class RoundRates:
    """Rates of one side: `measured` (rounds,) and each round's rate on resampled steps, (resamples, rounds)."""

    measured: Floats
    resampled: Floats


def resample_rates(amounts: Sequence[Floats], seconds: Sequence[Floats], seed: int) -> RoundRates:
    """Rates per second of every round, and on steps drawn with replacement.

    Args:
        amounts, seconds: per round what each step did and how long it took, (steps,) each.
        seed: of the draws.
    """
    generator = np.random.default_rng(seed)
    columns = []
    for amount, time in zip(amounts, seconds):
        drawn = generator.integers(0, len(time), size=(NUM_RESAMPLES, len(time)))
        columns.append(amount[drawn].sum(1) / time[drawn].sum(1))
    measured = np.array([amount.sum() / time.sum() for amount, time in zip(amounts, seconds)])
    return RoundRates(measured, np.stack(columns, axis=1))


def rate_interval(rates: RoundRates) -> Interval:
    """The median rate over rounds."""
    return _interval(rates.measured, rates.resampled)


def ratio_interval(rates: RoundRates, baseline: RoundRates) -> Interval:
    """The median over rounds of rate / baseline's rate in the same round: what slows a round slows both sides."""
    return _interval(rates.measured / baseline.measured, rates.resampled / baseline.resampled)


def decision_interval(rates: RoundRates, baseline: RoundRates, num_looks: int = 1) -> tuple[float, float]:
    """Where the true ratio of rates lies, for a verdict: outside of it in 5 % of comparisons, over all looks.

    Args:
        rates, baseline: of the same rounds.
        num_looks: how often a verdict may be asked for while rounds are added; each look gets its share of the 5 %.

    Returns:
        Lower and upper end; 0 and infinity for one round, which does not say how rounds vary.
    """
    from scipy.special import stdtrit  # here, since scipy takes 0.2 s that most of a comparison does not need

    logs = np.log(rates.measured / baseline.measured)
    num = len(logs)
    if num < 2:
        return 0.0, float("inf")
    half = float(stdtrit(num - 1, 1 - 0.025 / num_looks) * logs.std(ddof=1) / np.sqrt(num))
    return float(np.exp(logs.mean() - half)), float(np.exp(logs.mean() + half))


def multiply(factors: Sequence[RoundRates], baseline: RoundRates) -> Interval:
    """The product of several ratios to one baseline, multiplied within each round: what there would be, were each
    gain the same beside the others."""
    ratios = [(rates.measured / baseline.measured, rates.resampled / baseline.resampled) for rates in factors]
    return _interval(np.prod([ratio[0] for ratio in ratios], axis=0), np.prod([ratio[1] for ratio in ratios], axis=0))


def _interval(measured: Floats, resampled: Floats) -> Interval:
    num_rounds = len(measured)
    drawn = np.random.default_rng(0).integers(0, num_rounds, size=resampled.shape)
    medians = np.median(np.take_along_axis(resampled, drawn, axis=1), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    value = float(np.median(measured))
    return Interval(value, float(low), float(high), float(measured.min()), float(measured.max()))
