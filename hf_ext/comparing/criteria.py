"""What a comparison must show; each criterion passes or fails, and what was not measured fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..units import NOT_MEASURED
from .arguments import CompareArguments


@dataclass(frozen=True)
class Criterion:
    """One line of the verdict."""

    text: str
    measured: float | None
    passed: bool

    def __str__(self) -> str:
        found = NOT_MEASURED if self.measured is None else f"{self.measured:.4g}"
        return f"{'PASS' if self.passed else 'FAIL'}  {self.text}: {found}"


def check_criteria(args: CompareArguments, pairs: dict[str, dict[str, Any]], peak_memory_gib: float) -> list[Criterion]:
    """Checks the criteria that were given.

    Args:
        args: the limits.
        pairs: per baseline `ratio` (an interval as a dictionary), `loss` (see `compare_losses`) and `metric_drop`.
        peak_memory_gib: of the optimized side.
    """
    found = []
    for name, pair in pairs.items():
        if args.min_speedup is not None:
            low = pair["ratio"]["low"]
            text = f"speed against {name}, lower end of the interval, at least {args.min_speedup:g}x"
            found.append(Criterion(text, low, low >= args.min_speedup))
        if args.max_loss_delta is not None:
            delta = pair["loss"]["final"] if pair["loss"] else None
            text = f"final training loss above that of {name} by at most {args.max_loss_delta:g}"
            found.append(Criterion(text, delta, delta is not None and delta <= args.max_loss_delta))
        if args.max_metric_drop is not None:
            drop = pair["metric_drop"]
            text = f"{args.metric} worse than that of {name} by at most {args.max_metric_drop:g}"
            found.append(Criterion(text, drop, drop is not None and drop <= args.max_metric_drop))
    if args.max_memory_gib is not None:
        text = f"peak memory at most {args.max_memory_gib:g} GiB"
        found.append(Criterion(text, peak_memory_gib, peak_memory_gib <= args.max_memory_gib))
    return found
