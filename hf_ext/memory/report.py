"""The table that stands before step 1: what a step takes, what each switch would save, how large a batch fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .. import units
from ..reporting.tables import format_table
from .forecast import Choice, Forecast, Forecaster
from .what_fits import Remedy, Switch, find_remedy, largest_rows, switches

WORTH_SAVING = 0.05  # of the room: where a step takes less, nobody asks what would save some of it
NOT_CALIBRATED = "not calibrated on a card"


@dataclass(frozen=True)
class MemoryReport:
    """What one device holds in a step, and what it could hold.

    Attributes:
        capacity: of the device, bytes; None where not known.
        room: of it, what predictions may fill; see `usable_bytes`.
        length: tokens of each row, of the longest ones.
        savings: each switch alone, and the step with it.
        largest: most rows of one pass that fit; None where no capacity is known, or no batch of another size.
        remedy: where the step does not fit: the cheapest switches with which it does, or None if there are none.
        seconds: that this took.
    """

    choice: Choice
    forecast: Forecast
    length: int
    capacity: int | None = None
    room: int | None = None
    savings: list[tuple[Switch, Forecast]] = field(default_factory=list)
    largest: int | None = None
    remedy: Remedy | None = None
    seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the step fits; also where nobody knows the capacity."""
        return self.room is None or self.forecast.peak <= self.room

    def options(self, by_tokens: bool = False) -> str:
        """The command-line options that make it fit; "" where it does, or where none are known."""
        if self.fits or self.remedy is None:
            return ""
        return describe_remedy(self.remedy, self.choice, self.length, by_tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "predicted_peak_bytes": self.forecast.peak,
            "lines": dict(self.forecast.lines()),
            "moment": self.forecast.moment,
            "host_bytes": self.forecast.host,
            "rows": self.choice.rows,
            "tokens_per_row": self.length,
            "capacity_bytes": self.capacity,
            "room_bytes": self.room,
            "fits": self.fits,
            "largest_rows": self.largest,
            "peak_bytes_with": {switch.option: found.peak for switch, found in self.savings},
            "would_fit_with": self.options(),
            "choice": asdict(self.choice),
        }


def report_memory(
    forecaster: Forecaster, choice: Choice, length: int, capacity: int | None, room: int | None, has_half: bool = True
) -> MemoryReport:
    """Everything that can be said of a step before it is taken. Errors and cost: as `Subject.timeline`.

    Args:
        length: tokens of each row.
        has_half: whether the hardware computes in half precision.
    """
    began = time.perf_counter()
    found = forecaster.forecast(choice)
    groups = switches(forecaster, choice, has_half) if room is None or found.peak > WORTH_SAVING * room else []
    alone = [(s, forecaster.try_forecast(s.apply(choice))) for g in groups for s in g]
    savings = [(switch, changed) for switch, changed in alone if changed is not None]
    report = MemoryReport(choice, found, length, capacity, room, savings)
    if room is not None:
        if not forecaster.subject.has_one_batch:
            report = replace(report, largest=largest_rows(forecaster, choice, room))
        if not report.fits:
            report = replace(report, remedy=find_remedy(forecaster, choice, room, has_half))
    return replace(report, seconds=time.perf_counter() - began)


def describe_remedy(remedy: Remedy, choice: Choice, length: int, by_tokens: bool = False) -> str:
    """The options of a remedy, smaller passes first."""
    parts = []
    if remedy.choice.rows < choice.rows:
        rows, passes = remedy.choice.rows, remedy.choice.passes
        size = f"--max_tokens_per_batch {rows * length}" if by_tokens else f"--per_device_train_batch_size {rows}"
        parts.append(f"{size} --gradient_accumulation_steps {passes}")
    parts += [
        f"{switch.option} ({switch.note})" if switch.note else switch.option
        for switch in sorted(remedy.switches, key=lambda each: each.cost)
    ]
    return ", ".join(parts)


def format_memory(report: MemoryReport) -> list[str]:
    """Lines for a page: the step, what is counted on, the largest batch; and where the step does not fit, a remedy."""
    found, rows = report.forecast, report.choice.rows
    parts = ", ".join(f"{what} {units.memory(num_bytes)}" for what, num_bytes in found.lines())
    line = f"memory of {rows:,} rows of {report.length:,} tokens: {parts}; {units.memory(found.peak)} in all"
    if report.room is not None:
        line += f", of {units.memory(report.room)} counted on"
    if report.largest is not None:
        line += f"; at most {report.largest:,} rows fit"
    if report.room is not None and found.peak > WORTH_SAVING * report.room:
        line += f" ({NOT_CALIBRATED})"
    if found.host:
        line += f"; {units.memory(found.host)} in host memory"
    if report.fits:
        return [line]
    options = report.options()
    return [line, f"it does not fit; it would with {options}" if options else "it does not fit with any switch"]


def format_savings(report: MemoryReport) -> str:
    """A table of what each switch alone would save; "" where there is none."""
    rows: list[Sequence[str]] = [
        [
            switch.option,
            units.memory(found.peak),
            units.memory(max(0, report.forecast.peak - found.peak)),
            switch.note or "nothing",
        ]
        for switch, found in report.savings
    ]
    return format_table(rows, ["with", "takes", "saves", "changes"]) if rows else ""
