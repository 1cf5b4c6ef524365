"""What each stage of training must reach before the next one starts, as data that a script can read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...errors import ArgumentError
from ...files import write_text
from ...reporting.units import format_cell

GATES_NAME = "gates.json"
STAGES = (1, 2, 3)
Rule = Literal["at least", "at most", "above"]


@dataclass(frozen=True)
class Requirement:
    """A number that a stage must reach.

    Attributes:
        name: of the number.
        rule, threshold: what passes.
        meaning: of the number, with its unit, as a reader is told it.
    """

    name: str
    rule: Rule
    threshold: float
    meaning: str

    def accepts(self, value: float) -> bool:
        """Whether a value passes; one that is not finite never does."""
        if not math.isfinite(value):
            return False
        if self.rule == "above":
            return value > self.threshold
        return value >= self.threshold if self.rule == "at least" else value <= self.threshold


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
        Requirement("num_errors", "at most", 0, "errors of the run"),
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
        numbers: name of a requirement -> its value; None, or no entry: it was not measured, and the gate fails.
        thresholds: name -> threshold in place of the specification's.
        not_applicable: name -> why this run cannot have the number (data without affinities); such a gate neither
            passes nor fails.

    Returns:
        One `Gate` per requirement, in order.

    Raises:
        ArgumentError: no such stage; a threshold or an exception for a requirement that the stage does not have, or a
            threshold that is not finite.
    """
    if stage not in REQUIREMENTS:
        raise ArgumentError(f"stage={stage!r}: one of {', '.join(map(str, STAGES))} is needed.")
    thresholds, not_applicable = thresholds or {}, not_applicable or {}
    names = [one.name for one in REQUIREMENTS[stage]]
    for name in (*thresholds, *not_applicable):
        if name not in names:
            raise ArgumentError(f"Stage {stage} has no gate {name!r}: its gates are {', '.join(names)}.")
    gates = []
    for one in REQUIREMENTS[stage]:
        threshold = float(thresholds.get(one.name, one.threshold))
        if not math.isfinite(threshold):
            raise ArgumentError(f"threshold of gate {one.name!r}: {threshold} is none; a finite number is needed.")
        asked = Requirement(one.name, one.rule, threshold, one.meaning)
        gates.append(_check(asked, numbers.get(one.name), not_applicable.get(one.name)))
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
    content = {
        "passed": all(have_passed(gates) for gates in stages.values()) and bool(stages),
        "stages": {
            str(stage): {"passed": have_passed(gates), "gates": [gate.as_dict() for gate in gates]}
            for stage, gates in stages.items()
        },
    }
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    return content


def _check(asked: Requirement, value: float | None, why_not: str | None) -> Gate:
    needed = f"{asked.rule} {format_cell(asked.threshold)} is needed ({asked.meaning})"
    if why_not is not None:
        return Gate(asked.name, value, asked.threshold, None, f"does not apply: {why_not}")
    if value is None or not math.isfinite(value):
        said = "not measured" if value is None else f"{value} is no number to pass by"
        return Gate(asked.name, None, asked.threshold, False, f"{said}; {needed}")
    number = float(value)
    return Gate(asked.name, number, asked.threshold, asked.accepts(number), f"{format_cell(number)}; {needed}")
