"""Does the model read what it is given? Its loss with the true antigen, or pKd, against that of another row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...errors import ArgumentError, DataError
from ...evaluation.scores import PairedComparison
from .scores import Sampling, compare_losses

Reading = Literal["reads", "ignores", "undecided"]


@dataclass(frozen=True)
class Shuffled:
    """A condition of each row that is never its own.

    Attributes:
        values: row by row, another row's condition.
        num_same_group: rows whose new condition is of their own group (a near copy of it), which no derangement avoids
            where one group holds more than half of the distinct conditions.
    """

    values: tuple[Any, ...]
    num_same_group: int = 0


@dataclass(frozen=True)
class ConditionEffect:
    """What a condition is worth to the model.

    Attributes:
        condition: "antigen" or "pKd", as sentences name it.
        comparison: `before` is the loss per token with a shuffled condition, `after` with the true one, nats;
            `improvement` is what the true one saves.
        reading: "ignores" where the interval does not lie above 0; "undecided" where too few units were drawn.
        num_same_group: see `Shuffled`.
    """

    condition: str
    comparison: PairedComparison
    reading: Reading
    num_same_group: int = 0

    @property
    def text(self) -> str:
        """One clause, with its numbers; lower case."""
        one = self.comparison
        numbers = f"shuffling it costs {_difference(one)} nats per token"
        if self.reading == "reads":
            return f"reads the {self.condition}: {numbers}"
        if self.reading == "ignores":
            return f"ignores the {self.condition}: {numbers}"
        units = f"{one.num_effective_units:.0f} of like size" if one.num_effective_units else "none"
        return f"not known whether it reads the {self.condition}: too few units were held out ({units}; {numbers})"

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "condition": self.condition,
            "reading": self.reading,
            "text": self.text,
            "num_same_group": self.num_same_group,
            "comparison": self.comparison.as_dict(),
        }


def shuffle_antigens(antigens: Sequence[str], seed: int = 0, groups: Sequence[Any] | None = None) -> Shuffled:
    """Gives the rows of each distinct antigen those of another one: a seeded derangement of the distinct antigens.

    Args:
        antigens: (n,).
        groups: (n,) their clusters: then the new antigen is of another cluster wherever that can be, since a near copy
            of the true antigen is no shuffled one.

    Raises:
        DataError: fewer than two distinct antigens, another number of groups, or an antigen in two groups.
    """
    group_of = _groups_of(antigens, antigens if groups is None else groups)
    if len(group_of) < 2:
        raise DataError(
            f"{len(antigens)} rows of {len(group_of)} antigen(s): two or more are needed to shuffle them. Evaluate on "
            "rows of several antigens."
        )
    generator = np.random.default_rng(seed)
    distinct = [list(group_of)[place] for place in generator.permutation(len(group_of))]
    order = list(dict.fromkeys(group_of[one] for one in distinct))
    distinct.sort(key=lambda one: order.index(group_of[one]))  # stable: random inside of a group
    largest = max(sum(group == one for one in group_of.values()) for group in order)
    # A step of the largest group's size leaves every group, unless that is more than half of all.
    step = largest if 2 * largest <= len(distinct) else len(distinct) // 2
    other = {one: distinct[(place + step) % len(distinct)] for place, one in enumerate(distinct)}
    same = sum(group_of[other[one]] == group_of[one] for one in antigens) if groups is not None else 0
    return Shuffled(tuple(other[one] for one in antigens), same)


def shuffle_affinities(affinities: Any, seed: int = 0) -> Shuffled:
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
    return Shuffled(tuple(shuffled.tolist()), int(np.sum(shuffled[there] == values[there])))


def judge_condition(
    condition: str,
    num_tokens: Any,
    true_losses: Any,
    shuffled_losses: Any,
    sampling: Sampling,
    num_same_group: int = 0,
) -> ConditionEffect:
    """Compares each row's loss with its true condition and with a shuffled one, paired, by what was held out.

    Args:
        condition: what was shuffled, "antigen" or "pKd".
        num_tokens: (n,) predicted tokens of each row.
        true_losses, shuffled_losses: (n,) summed loss of each row in nats, in evaluation mode.
        sampling: its units are the antigens, or their clusters, of these rows.

    Raises:
        ArgumentError: no name for the condition.
        DataError: other numbers of rows, or losses that are not finite.
    """
    if not condition:
        raise ArgumentError("condition='': name what was shuffled, 'antigen' or 'pKd'.")
    compared = compare_losses(num_tokens, shuffled_losses, true_losses, sampling)
    reading: Reading = "reads" if compared.is_better else "ignores" if compared.is_trusted else "undecided"
    return ConditionEffect(condition, compared, reading, num_same_group)


def _groups_of(antigens: Sequence[str], groups: Sequence[Any]) -> dict[str, str]:
    if len(groups) != len(antigens):
        raise DataError(f"{len(groups)} groups for {len(antigens)} antigens: one per row is needed.")
    found: dict[str, str] = {}
    for row, (antigen, group) in enumerate(zip(antigens, groups)):
        if found.setdefault(antigen, str(group)) != str(group):
            raise DataError(f"groups, row {row}: {group!r}, but this antigen was in {found[antigen]!r} before.")
    return found


def _difference(compared: PairedComparison) -> str:
    numbers = (compared.improvement, compared.low, compared.high)
    value, low, high = ("none" if one is None else f"{round(one, 4) + 0.0:.4f}" for one in numbers)
    return f"{value} [{low}, {high}]"
