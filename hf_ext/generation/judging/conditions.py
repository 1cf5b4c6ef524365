"""Does the model read what it is given? Its loss with the true antigen, or pKd, against that of another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ...errors import DataError
from ...evaluation._arrays import as_column
from ...evaluation.paired import PairedComparison
from .rows import Sampling, compare_means, places_of

Reading = Literal["reads", "ignores", "undecided"]


@dataclass(frozen=True)
class ConditionEffect:
    """What a condition is worth to the model.

    Attributes:
        condition: "antigen" or "pKd", as sentences name it.
        reading: "ignores" where the interval does not lie above 0; "undecided" where too few units were drawn.
        text: one clause, with its numbers; lower case.
        comparison: `before` is the loss per token with a shuffled condition, `after` with the true one, nats;
            `improvement` is what the true one saves.
    """

    condition: str
    reading: Reading
    text: str
    comparison: PairedComparison

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "comparison": self.comparison.as_dict()}


def shuffle_antigens(antigens: Sequence[str], seed: int = 0, groups: Sequence[Any] | None = None) -> list[str]:
    """Gives the rows of each distinct antigen those of another one: a seeded derangement of the distinct antigens.

    Args:
        antigens: (n,).
        groups: (n,) their clusters: then the new antigen is of another cluster, since a near copy of the true antigen
            is no shuffled one; but for some where one cluster holds more than half of the distinct antigens.

    Raises:
        DataError: fewer than two distinct antigens.
    """
    group_of = dict(zip(antigens, antigens if groups is None else groups))
    if len(group_of) < 2:
        raise DataError(
            f"{len(antigens)} rows of {len(group_of)} antigen(s): two or more are needed to shuffle them. Evaluate on "
            "rows of several antigens."
        )
    generator = np.random.default_rng(seed)
    shuffled = [[*group_of][place] for place in generator.permutation(len(group_of))]
    members = places_of(group_of[one] for one in shuffled).values()
    distinct = [shuffled[place] for places in members for place in places]  # group by group
    # A step of the largest group's size leaves every group, unless that is more than half of all.
    step = min(max(map(len, members)), len(distinct) // 2)
    other = dict(zip(distinct, [*distinct[step:], *distinct[:step]]))
    return [other[one] for one in antigens]


def shuffle_affinities(affinities: Any, seed: int = 0) -> list[float]:
    """Gives each row another row's pKd, half of all rows away in their order by value; NaN (unknown) stays NaN.

    Raises:
        DataError: fewer than two distinct values.
    """
    values = np.asarray(affinities, dtype=np.float64)
    there = np.flatnonzero(~np.isnan(values))
    if len(np.unique(values[there])) < 2:
        raise DataError(f"{len(there)} rows with a pKd hold fewer than two distinct values: nothing can be shuffled.")
    tie = np.random.default_rng(seed).permutation(len(there))
    order = there[np.lexsort((tie, values[there]))]
    shuffled = values.copy()
    shuffled[order] = values[np.roll(order, len(order) // 2)]
    return list(shuffled.tolist())


def judge_condition(
    condition: str, num_tokens: Any, true_losses: Any, shuffled_losses: Any, sampling: Sampling
) -> ConditionEffect:
    """Compares each row's loss with its true condition and with a shuffled one, paired, by what was held out.

    Args:
        condition: what was shuffled, "antigen" or "pKd".
        num_tokens: (n,) predicted tokens of each row.
        true_losses, shuffled_losses: (n,) summed loss of each row in nats, in evaluation mode.
        sampling: its units are the antigens, or their clusters, of these rows.

    Raises:
        DataError: other numbers of rows, or losses that are not finite.
    """
    for name, losses in (("true", true_losses), ("shuffled", shuffled_losses)):
        wrong = np.flatnonzero(~np.isfinite(as_column(losses, f"{name}_losses")))
        if len(wrong):
            raise DataError(f"{len(wrong)} {name} losses are not finite (first: row {wrong[0]}): nothing to compare.")
    one = compare_means(shuffled_losses, true_losses, sampling, num_tokens)
    ends = (one.improvement, one.low, one.high)
    value, low, high = ("none" if end is None else f"{round(end, 4) + 0.0:.4f}" for end in ends)
    numbers = f"shuffling it costs {value} [{low}, {high}] nats per token"
    reading: Reading = "reads" if one.is_better else "ignores" if one.is_trusted else "undecided"
    text = f"{reading} the {condition}: {numbers}"
    if reading == "undecided":
        units = f"{one.num_effective_units:.0f} of like size" if one.num_effective_units else "none"
        text = f"not known whether it reads the {condition}: too few units were held out ({units}; {numbers})"
    return ConditionEffect(condition, reading, text, one)
