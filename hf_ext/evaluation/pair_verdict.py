"""One sentence on two models, of which neither is a trivial one: the later is better, worse, or no difference shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ._arrays import as_pair
from .limits import at_limits
from .metrics import DEFAULT_THRESHOLD
from .paired import PairedComparison, compare_paired
from .resampling import ResamplingUnits, check_units
from .scores import GROUP_METRIC
from .verdict import describe_difference, describe_scores


@dataclass(frozen=True)
class PairVerdict:
    """What a comparison of two models says first.

    Attributes:
        text: a sentence or two, with the numbers that it rests on.
        outcome: of the later model. "no difference": none that these rows show; "undefined": a score has no value.
        comparison: what it rests on.
    """

    text: str
    outcome: Literal["better", "worse", "no difference", "undefined"]
    comparison: PairedComparison

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"text": self.text, "outcome": self.outcome, "comparison": self.comparison.as_dict()}


def judge_pair(
    labels: Any,
    before: Any,
    after: Any,
    *,
    names: tuple[str, str] = ("the first", "the later"),
    metric: str = "rmse",
    bounds: Sequence[int] | Any | None = None,
    threshold: float = DEFAULT_THRESHOLD,
    seed: int = 0,
    units: ResamplingUnits | None = None,
    groups: Sequence[Any] | None = None,
) -> PairVerdict:
    """Decides by a paired bootstrap whether the later of two models is better than the first.

    Args:
        labels, before, after: (n,) numbers, row by row.
        names: what to call both.
        metric: as in `compare_paired`.
        bounds: (n,) of -1, 0, 1, or None; in the RMSE a prediction beyond such a limit is no error then.
        threshold, seed, units, groups: as in `compare_paired`.

    Raises:
        ArgumentError: an unknown metric, or a number out of range.
        DataError: shapes or lengths do not fit, or a value is not a number.

    Cost: that of `compare_paired`.
    """
    earlier, measured = as_pair(before, labels)
    later = as_pair(after, labels)[0]
    if bounds is not None and metric == "rmse":
        sides = as_pair(bounds, measured)[0]
        earlier, later = (at_limits(predicted, measured, sides) for predicted in (earlier, later))
    options: dict[str, Any] = {"threshold": threshold, "seed": seed, "units": units, "groups": groups}
    compared = compare_paired(measured, earlier, later, metric, **options)
    units = check_units(units, len(measured))
    first, second = names
    if compared.undefined:
        return PairVerdict(f"No verdict on {second}: {compared.undefined}.", "undefined", compared)
    if np.array_equal(earlier, later):
        text = f"No difference: {second} predicts what {first} predicts, on all {compared.n:,} rows."
        return PairVerdict(text, "no difference", compared)
    numbers = f"{describe_scores(compared)} (improvement {describe_difference(compared)}, {compared.n:,} rows)."
    by_groups = metric == GROUP_METRIC  # the interval resamples these then
    basis = "" if units is None or by_groups else units.why_not_enough() or f"Intervals resample {units.describe()}."
    text = f"{numbers} {basis}".rstrip()
    if compared.is_better:
        return PairVerdict(f"{second} is better than {first}: {text}", "better", compared)
    if compared.is_worse:
        return PairVerdict(f"{second} is worse than {first}: {text}", "worse", compared)
    return PairVerdict(f"No difference between {second} and {first} is shown: {text}", "no difference", compared)
