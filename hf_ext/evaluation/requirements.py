"""What final scores must reach (`--require "spearman>=0.60" "rmse<=1.35"`), held against what they are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from ..arguments.names import name_nearest
from ..data.labels import NUMBER, parse_number
from ..errors import ArgumentError, RequirementsFailed
from ..reporting.requirements import HEADERS, required_rows
from ..reporting.tables import format_table
from ..reporting.units import format_cell, is_finite, less_is_better

REQUIRE = {  # of the field `require` of a recipe's arguments
    "help": 'What the final scores must be, each in quotes: "spearman>=0.60" "rmse<=1.35". Where one is not, exit '
    "status 3, after everything was written."
}
_HOLDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(rf"([^\s<>=]+)\s*(>=|<=|>|<)\s*({NUMBER})").fullmatch


@dataclass(frozen=True)
class Requirement:
    """`metric` must stand to `bound` as `sign` says; `text` is what was typed."""

    text: str
    metric: str
    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        """Whether a value meets it; NaN meets none."""
        return bool(_HOLDS[self.sign](value, self.bound))


class Checked(TypedDict):
    """A requirement beside what there is, as results hold it. `value` is None, and has not passed, where it is NaN."""

    metric: str
    expected: str
    actual: str
    value: float | None
    passed: bool


def parse_requirements(texts: Sequence[str], known: Sequence[str]) -> list[Requirement]:
    """Reads what was typed.

    Args:
        texts: METRIC, one of >=, <=, > and <, NUMBER: "recall>=0.40".
        known: metrics that scoring will give.

    Raises:
        ArgumentError: another form, an unknown metric (with the known ones), or the side on which a score is worse.
    """
    return [_parse(text.strip(), known) for text in texts]


def check_requirements(requirements: Sequence[Requirement], scores: Mapping[str, Any]) -> list[Checked]:
    """Holds requirements against `scores`, metric -> `Score` or number; a score that is missing has no value."""
    checked: list[Checked] = []
    for one in requirements:
        score = scores.get(one.metric)
        entry = score if isinstance(score, Mapping) else {"value": score}
        found = entry.get("value")
        value = float(found) if is_finite(found) else None
        passed = value is not None and one.holds(value)
        expected = one.text.removeprefix(one.metric).strip()
        actual = _show(one, entry, value, passed)
        checked.append({"metric": one.metric, "expected": expected, "actual": actual, "value": value, "passed": passed})
    return checked


def format_checked(checked: Sequence[Checked]) -> str:
    """Expected against actual, a row per requirement."""
    return format_table(required_rows(checked), HEADERS)


def describe_failed(checked: Sequence[Checked]) -> list[str]:
    """Each that failed: recall is 0.286 [0.136, 0.455], expected >=0.40."""
    return [f"{one['metric']} is {one['actual']}, expected {one['expected']}" for one in checked if not one["passed"]]


def raise_failed(failed: Sequence[str], where: str) -> None:
    """Ends a run whose scores are not as required.

    Args:
        failed: from `describe_failed`.
        where: a sentence on what there is all the same.

    Raises:
        RequirementsFailed: naming each.
    """
    if failed:
        raise RequirementsFailed(f"{'; '.join(failed)}. {where}")


def _show(requirement: Requirement, entry: Mapping[str, Any], value: float | None, passed: bool) -> str:
    """The value, with as many digits as it takes to see on which side of the bound it is, and its interval."""
    if value is None:
        return f"undefined ({entry['undefined']})" if entry.get("undefined") else "undefined"
    texts = (f"{value:#.{digits}g}" for digits in range(3, 18))
    text = next((one for one in texts if requirement.holds(float(one)) == passed), str(value))
    ends = [entry.get(end) for end in ("low", "high")]
    return f"{text} [{', '.join(map(format_cell, ends))}]" if all(map(is_finite, ends)) else text


def _parse(text: str, known: Sequence[str]) -> Requirement:
    match = _FORM(text)
    bound = parse_number(match[3]) if match else None
    if match is None or bound is None or not math.isfinite(bound):
        raise ArgumentError(
            f"--require {text!r}: write METRIC>=NUMBER or METRIC<=NUMBER, in quotes since a shell takes > for a file: "
            '"spearman>=0.60".'
        )
    metric, sign = match[1], match[2]
    if metric not in known:
        raise ArgumentError(
            f"--require {text!r}: unknown metric {metric!r}{name_nearest(metric, known)}; known here are "
            f"{', '.join(known)}."
        )
    if (sign[0] == "<") != less_is_better(metric):
        better, right = ("less", "<=") if less_is_better(metric) else ("more", ">=")
        raise ArgumentError(f"--require {text!r}: of {metric} {better} is better, so write {metric}{right}{match[3]}.")
    return Requirement(text, metric, sign, bound)
