"""What final scores must reach (`--require "spearman>=0.60" "rmse<=1.35"`), held against what they are."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..arguments import name_nearest
from ..errors import ArgumentError, RequirementsFailed
from ..files import Facts, Json
from ..labels import NUMBER
from ..reporting import REQUIRED_HEADERS, required_rows
from ..text import format_cell, format_table, is_finite, less_is_better
from .metrics.rows import THRESHOLD_METRICS

# A requirement beside what there is, as results hold it: `metric`, `expected` and `actual` as text, `value` (None, and
# not passed, where it is NaN), `passed`.
Checked = Json
SPEED = {"speed": "train_batches_per_s"}  # what may be required of training itself -> as the run logs it
HOLDS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_FORM = re.compile(rf"([^\s<>=]+)\s*(>=|<=|>|<)\s*({NUMBER})").fullmatch


class Requirement(NamedTuple):
    """`metric` must stand to `bound` as `sign` says; `text` is what was typed."""

    text: str
    metric: str
    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        """Returns whether a value meets it; NaN meets none."""
        return bool(HOLDS[self.sign](value, self.bound))


def parse_requirements(texts: Sequence[str], known: Sequence[str], trains: bool = True) -> list[Requirement]:
    """Reads what was typed.

    Args:
        texts: METRIC, one of >=, <=, > and <, NUMBER: "recall>=0.40".
        known: metrics that scoring will give.
        trains: whether there is a speed of training too.

    Raises:
        ArgumentError: another form, an unknown metric (with the known ones), or the side on which a score is worse.
    """
    found = []
    known = [*known, *SPEED] if trains else known
    for text in map(str.strip, texts):
        match = _FORM(text)
        told = f"--require {text!r}"
        if match is None or not math.isfinite(float(match[3])):
            raise ArgumentError(
                f"{told}: write METRIC>=NUMBER or METRIC<=NUMBER, in quotes since a shell takes > for a "
                'file: "spearman>=0.60".'
            )
        metric, sign, number = match.groups()
        if metric in THRESHOLD_METRICS and metric not in known:
            raise ArgumentError(f"{told}: {metric} needs --binder_threshold.")
        if metric not in known:
            near = name_nearest(metric, known)
            raise ArgumentError(f"{told}: unknown metric {metric!r}{near}; known here are {', '.join(known)}.")
        better, right = ("less", "<=") if less_is_better(metric) else ("more", ">=")
        if sign[0] != right[0]:
            raise ArgumentError(f"{told}: of {metric} {better} is better, so write {metric}{right}{number}.")
        found.append(Requirement(text, metric, sign, float(number)))
    return found


def check_requirements(requirements: Sequence[Requirement], scores: Facts) -> list[Checked]:
    """Holds requirements against `scores`, metric -> `Score` or number; a score that is missing has no value.

    Of a run that trained, they hold its metrics too, as Trainer logged them.
    """
    checked: list[Checked] = []
    for one in requirements:
        score = scores.get(SPEED.get(one.metric, one.metric))
        entry: Facts = score if isinstance(score, Mapping) else {"value": score}
        value = float(entry["value"]) if is_finite(entry.get("value")) else None
        passed = False
        actual = f"undefined ({entry['undefined']})" if entry.get("undefined") else "undefined"
        if value is not None:
            passed = one.holds(value)
            # With as many digits as it takes to see on which side of the bound it is.
            texts = (f"{value:#.{digits}g}" for digits in range(3, 18))
            actual = next((text for text in texts if one.holds(float(text)) == passed), str(value))
            ends = [entry.get(end) for end in ("low", "high")]
            actual += f" [{', '.join(map(format_cell, ends))}]" if all(map(is_finite, ends)) else ""
        expected = one.text.removeprefix(one.metric).strip()
        checked.append(
            {
                "metric": one.metric,
                "expected": expected,
                "actual": actual,
                "value": value,
                "passed": passed,
            }
        )
    return checked


def format_checked(checked: Sequence[Checked]) -> str:
    """Formats expected against actual, a row per requirement."""
    return format_table(required_rows(checked), REQUIRED_HEADERS)


def describe_failed(checked: Sequence[Checked]) -> list[str]:
    """Describes each that failed: recall is 0.286 [0.136, 0.455], expected >=0.40."""
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
