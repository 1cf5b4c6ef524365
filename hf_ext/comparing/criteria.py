"""What a comparison must show; each criterion passes or fails, and what was not measured fails.

A speed is too noisy to tell while its interval holds both what passes and what fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..reporting.units import NOT_MEASURED
from .arguments import CompareArguments

NOISY = "TOO NOISY TO TELL"


@dataclass(frozen=True)
class Criterion:
    """One line of the verdict."""

    text: str
    measured: float | None
    verdict: Literal["PASS", "FAIL", "TOO NOISY TO TELL"]
    interval: tuple[float, float] | None = None  # that the verdict goes by

    @property
    def passed(self) -> bool:
        return self.verdict == "PASS"

    def __str__(self) -> str:
        found = NOT_MEASURED if self.measured is None else f"{self.measured:.4g}"
        held = "" if self.interval is None else f" [{self.interval[0]:.4g}, {self.interval[1]:.4g}]"
        return f"{self.verdict}  {self.text}: {found}{held}"


def check_criteria(args: CompareArguments, pairs: dict[str, dict[str, Any]], peak_memory_gib: float) -> list[Criterion]:
    """Checks the criteria that were given.

    Args:
        args: the limits.
        pairs: per baseline `ratio` (an interval as a dictionary), `decided_by` (see `decision_interval`), `loss` (see
            `compare_losses`) and `metric_drop`.
        peak_memory_gib: of the optimized side.
    """
    found = []
    for name, pair in pairs.items():
        if args.min_speedup is not None:
            text = f"speed against {name} at least {args.min_speedup:g}x"
            low, high = pair["decided_by"]
            verdict: Any = "PASS" if low >= args.min_speedup else "FAIL" if high < args.min_speedup else NOISY
            found.append(Criterion(text, pair["ratio"]["value"], verdict, (low, high)))
        if args.max_loss_delta is not None:
            delta = pair["loss"]["final"] if pair["loss"] else None
            text = f"final training loss above that of {name} by at most {args.max_loss_delta:g}"
            found.append(Criterion(text, delta, _judge(delta, args.max_loss_delta)))
        if args.max_metric_drop is not None:
            drop = pair["metric_drop"]
            text = f"{args.metric} worse than that of {name} by at most {args.max_metric_drop:g}"
            found.append(Criterion(text, drop, _judge(drop, args.max_metric_drop)))
    if args.max_memory_gib is not None:
        text = f"peak memory at most {args.max_memory_gib:g} GiB"
        found.append(Criterion(text, peak_memory_gib, _judge(peak_memory_gib, args.max_memory_gib)))
    return found


def is_too_noisy(criteria: Sequence[Criterion]) -> bool:
    """Whether more rounds may yet decide: one criterion is too noisy, and none fails."""
    verdicts = [criterion.verdict for criterion in criteria]
    return NOISY in verdicts and "FAIL" not in verdicts


def _judge(measured: float | None, most: float) -> Literal["PASS", "FAIL"]:
    return "PASS" if measured is not None and measured <= most else "FAIL"
