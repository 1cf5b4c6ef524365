"""What each stage of training must reach before the next one starts, as data that a script can read."""

from __future__ import annotations

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...files import write_text
from ...reporting.units import format_cell

GATES_NAME = "gates.json"
NUM_ERRORS = "num_errors"  # whose threshold is nobody's to choose
_RULES = {"at least": operator.ge, "at most": operator.le, "above": operator.gt}


class Requirement(NamedTuple):
    """A number that a stage must reach.

    Attributes:
        name: of the number.
        rule, threshold: what passes: "at least", "at most" or "above" it.
        meaning: of the number, with its unit, as a reader is told it.
    """

    name: str
    rule: str
    threshold: float
    meaning: str


@dataclass(frozen=True)
class Gate:
    """One requirement, and how it went.

    Attributes:
        passed: None where it does not apply to this run; that stops nothing, and is said.
        reason: one clause, with both numbers.
    """

    name: str
    value: float | None
    threshold: float
    passed: bool | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


_VALID = "share of outputs that are valid antibodies, by the strictest check that was made"
_ABOVE = "share of outputs with a predicted pKd above the discriminator's threshold, by one that is to be believed"
REQUIREMENTS: dict[int, tuple[Requirement, ...]] = {
    1: (
        Requirement(NUM_ERRORS, "at most", 0, "errors of the run"),
        Requirement("token_loss", "at most", 0.1, "mean loss per token on the training rows in evaluation mode, nats"),
        Requirement("reproduced", "at least", 0.9, "share of training pairs that greedy decoding writes exactly"),
        Requirement("valid", "at least", 0.5, _VALID),
    ),
    2: (
        Requirement("num_validation_falls", "at least", 1, "evaluations whose validation loss is below all before"),
        Requirement("valid", "at least", 0.5, _VALID),
        Requirement("share_above", "at least", 0.3, _ABOVE),
        Requirement("unique", "at least", 0.5, "distinct outputs by outputs"),
    ),
    3: (
        Requirement("correlation", "above", 0.4, "Spearman between asked-for and predicted pKd"),
        Requirement("valid", "at least", 0.7, _VALID),
        Requirement("share_above", "at least", 0.5, _ABOVE),
        Requirement("beats_random", "above", 0.0, "low end of the interval of the model less random residues"),
    ),
}


def check_gates(
    stage: int,
    numbers: Mapping[str, float | None],
    thresholds: Mapping[str, float] | None = None,
    not_applicable: Mapping[str, str] | None = None,
) -> list[Gate]:
    """Holds a stage's numbers against what it must reach.

    Args:
        stage: 1, 2 or 3.
        numbers: name of a requirement -> its value; None, or no entry: it was not measured, and the gate fails, as it
            does for a number that is not finite.
        thresholds: name -> finite threshold in place of the specification's.
        not_applicable: name -> why this run cannot have the number (data without affinities); such a gate neither
            passes nor fails.

    Returns:
        One `Gate` per requirement, in order.
    """
    gates = []
    for one in REQUIREMENTS[stage]:
        value, threshold = numbers.get(one.name), float((thresholds or {}).get(one.name, one.threshold))
        needed = f"{one.rule} {format_cell(threshold)} is needed ({one.meaning})"
        number = None if value is None or not math.isfinite(value) else float(value)
        passed: bool | None = number is not None and _RULES[one.rule](number, threshold)
        reason = f"{'not measured' if value is None else format_cell(float(value))}; {needed}"
        if why_not := (not_applicable or {}).get(one.name):
            passed, reason = None, f"does not apply: {why_not}"
        gates.append(Gate(one.name, number, threshold, passed, reason))
    return gates


def have_passed(gates: Sequence[Gate]) -> bool:
    """Whether the next stage may start: no gate failed, and one at least passed."""
    return all(gate.passed is not False for gate in gates) and any(gate.passed for gate in gates)


def write_gates(path: str | os.PathLike[str], stages: Mapping[int, Sequence[Gate]]) -> dict[str, Any]:
    """Writes `gates.json`, whole or not at all; returns what it holds.

    Args:
        stages: stage -> its gates, of all stages that were run.

    Raises:
        OSError: the disk refuses.
    """
    found = {
        str(stage): {"passed": have_passed(gates), "gates": [gate.as_dict() for gate in gates]}
        for stage, gates in stages.items()
    }
    content = {"passed": bool(found) and all(one["passed"] for one in found.values()), "stages": found}
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return content
