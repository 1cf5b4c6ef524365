"""What final scores must reach (`--require "spearman>=0.60" "rmse<=1.35"`), held against what they are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..argument_names import name_nearest
from ..data.numbers import NUMBER, parse_number
from ..errors import ArgumentError, RequirementsFailed
from ..reporting.tables import format_table
from ..units import format_cell, is_finite, less_is_better, metric_name

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


@dataclass(frozen=True)
class Result:
    """A requirement, and the score that it is about: a `Score`, or a number without an interval."""

    requirement: Requirement
    score: Any

    @property
    def value(self) -> float | None:
        """None where the score has no value."""
        found = self.score.get("value") if isinstance(self.score, Mapping) else self.score
        return float(found) if is_finite(found) else None

    @property
    def has_passed(self) -> bool:
        """A score without a value never has."""
        return self.value is not None and self.requirement.holds(self.value)

    @property
    def expected(self) -> str:
        """The bound as it was typed."""
        return self.requirement.text.removeprefix(self.requirement.metric).strip()

    @property
    def actual(self) -> str:
        """The value, with as many digits as it takes to see on which side of the bound it is, and its interval."""
        if self.value is None:
            reason = self.score.get("undefined") if isinstance(self.score, Mapping) else None
            return f"undefined ({reason})" if reason else "undefined"
        texts = (f"{self.value:#.{digits}g}" for digits in range(3, 18))
        text = next((one for one in texts if self.requirement.holds(float(one)) == self.has_passed), str(self.value))
        ends = [self.score.get(end) for end in ("low", "high")] if isinstance(self.score, Mapping) else []
        interval = f" [{', '.join(map(format_cell, ends))}]" if ends and all(map(is_finite, ends)) else ""
        return text + interval

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        requirement = self.requirement
        return {
            "requirement": requirement.text,
            "metric": requirement.metric,
            "actual": self.value,
            "passed": self.has_passed,
        }


def parse_requirements(texts: Sequence[str], known: Sequence[str]) -> list[Requirement]:
    """Reads what was typed.

    Args:
        texts: METRIC, one of >=, <=, > and <, NUMBER: "recall>=0.40".
        known: metrics that scoring will give.

    Raises:
        ArgumentError: another form, an unknown metric (with the known ones), or the side on which a score is worse.
    """
    return [_parse(text.strip(), known) for text in texts]


def check_requirements(requirements: Sequence[Requirement], scores: Mapping[str, Any]) -> list[Result]:
    """Holds requirements against `scores`, metric -> `Score` or number; a score that is missing has no value."""
    return [Result(one, scores.get(one.metric)) for one in requirements]


def format_results(results: Sequence[Result]) -> str:
    """Expected against actual, a row per requirement."""
    rows = [
        [metric_name(one.requirement.metric), one.expected, one.actual, "passed" if one.has_passed else "FAILED"]
        for one in results
    ]
    return format_table(rows, ["metric", "expected", "actual", ""])


def raise_failed(results: Mapping[str, Sequence[Result]], where: str) -> None:
    """Ends a run whose scores are not as required.

    Args:
        results: model -> its requirements; of a single model its name may be "".
        where: a sentence on what there is all the same.

    Raises:
        RequirementsFailed: naming each that failed.
    """
    failed = [(name, one) for name, found in results.items() for one in found if not one.has_passed]
    if failed:
        listed = "; ".join(
            f"{f'{name}: ' if name else ''}{one.requirement.metric} is {one.actual}, expected {one.expected}"
            for name, one in failed
        )
        raise RequirementsFailed(f"{listed}. {where}")


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
