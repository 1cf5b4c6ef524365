"""What stands before step 1: what a step takes, how large a batch fits, and what makes it fit.

A prediction counts what torch allocates. A card holds more: its context, libraries' workspaces, and what lies idle
between blocks. `usable_bytes` leaves room for that; its two constants are rules of thumb, not calibrated on a card.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..text import units
from .forecast import CANNOT_TRACE, Forecast, MemoryModel, TrainConfig

IDLE_SHARE = 0.08  # of a card's memory: blocks that the allocator cannot join (fragmentation)
CONTEXT_BYTES = round(0.7 * 2**30)  # CUDA's context and kernels, 0.3 to 0.6 GiB, and cuBLAS's workspaces
PROCESS_BYTES = round(0.6 * 2**30)  # on a CPU: Python and libraries, measured of runs with the smallest models
MOST_ROWS = 1 << 20
NOT_CALIBRATED = "not calibrated on a card"


def usable_bytes(capacity: int, kind: str) -> int:
    """Returns what predictions may fill of a device's memory.

    Args:
        capacity: bytes that the driver reports; on a CPU, that are free.
        kind: as `Hardware.kind`.
    """
    return max(0, round(capacity * (1 - IDLE_SHARE)) - (PROCESS_BYTES if kind == "cpu" else CONTEXT_BYTES))


class Switch(NamedTuple):
    """Something that takes less memory.

    Attributes:
        option: what turns it on.
        group: one of `GROUPS`, which it makes smaller; of one group, one can be on at a time.
        settings: of `TrainConfig`.
        note: what it changes of learning or numerics; empty where nothing.
    """

    option: str
    group: str
    settings: Mapping[str, Any]
    note: str = ""


NUMERICS = "other numerics"
GROUPS = ("layers", "base", "precision", "states")  # in the order in which they are tried
# Layers that are computed again leave every number as it is, for up to a third of the time.
RECOMPUTE = Switch("--activation_checkpointing true", "layers", {"recomputes": True, "every_n_layers": 1})
STATES = Switch("--optim adamw_8bit", "states", {"optimizer": "adamw_8bit"}, NUMERICS)
# Gives a switch of a speed-up where it would change something in such a step.
Offer = Callable[[MemoryModel, TrainConfig], Switch | None]


def find_switches(memory: MemoryModel, config: TrainConfig, offers: Sequence[Offer] = ()) -> list[Switch]:
    """Finds those that would change something, in the order in which they are tried; `offers` after Trainer's own."""
    found = []
    if config.recomputes is not True and getattr(memory.model, "supports_gradient_checkpointing", False):
        found.append(RECOMPUTE)
    if memory.has_large_states(config):
        found.append(STATES)
    found += filter(None, (offer(memory, config) for offer in offers))
    return sorted(found, key=lambda switch: GROUPS.index(switch.group))


def largest_rows(memory: MemoryModel, config: TrainConfig, room: int) -> int:
    """Finds the most rows of one pass that fit into `room` bytes; 0 if not even one does.

    Of models whose passes scale.
    """
    rows = range(1, MOST_ROWS)
    return bisect.bisect_right(rows, room, key=lambda number: memory.forecast(replace(config, rows=number)).peak)


class Fix(NamedTuple):
    """Switches that together make a step fit; a `config` of fewer rows than asked for has as many more passes."""

    switches: tuple[Switch, ...]
    config: TrainConfig
    forecast: Forecast


def find_fix(memory: MemoryModel, config: TrainConfig, room: int, offers: Sequence[Offer] = ()) -> Fix | None:
    """Finds what makes a step fit into `room`, its effective batch as it is; None where nothing does.

    Passes of half the rows come first: they change nothing but the pace. Then one switch after another, and of these
    those that are needed, with as many rows in a pass as fit.
    """
    most = (config.rows & -config.rows).bit_length() - 1  # more halves would not leave the effective batch as it is
    halvings = range(most + 1 if memory.scales else 1)

    def fit(switches: dict[str, Switch]) -> Fix | None:
        settings = {name: value for switch in switches.values() for name, value in switch.settings.items()}
        for number in halvings:
            changed = replace(config, rows=config.rows >> number, passes=config.passes << number, **settings)
            found = memory.try_forecast(changed)
            if found is not None and found.peak <= room:
                return Fix(tuple(switches.values()), changed, found)
        return None

    chosen: dict[str, Switch] = {}
    fix = fit(chosen)
    left = find_switches(memory, config, offers)
    while fix is None and left:
        switch = left.pop(0)
        chosen[switch.group] = switch
        fix = fit(chosen)
    for group in [*chosen] if fix else []:
        others = {name: switch for name, switch in chosen.items() if name != group}
        if (smaller := fit(others)) is not None:
            fix = smaller
            chosen = others
    return fix


@dataclass
class MemoryReport:
    """What one device holds in a step, and what it could hold.

    Attributes:
        capacity: of the device, bytes; None where not known.
        room: of it, what predictions may fill; see `usable_bytes`.
        length: tokens of each row, of the longest ones.
        stored: bytes of weights, gradients and optimizer, which no smaller pass makes fewer.
        note: why `forecast` has no more than these, where a pass could not be traced; else empty.
        largest: most rows of one pass that fit; None where no capacity is known, or one pass does not tell of others.
        fix: where the step does not fit: the cheapest switches with which it does, or None if there are none.
    """

    config: TrainConfig
    forecast: Forecast
    length: int
    stored: int
    note: str = ""
    capacity: int | None = None
    room: int | None = None
    largest: int | None = None
    fix: Fix | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits; also where the capacity is not known."""
        return self.room is None or self.forecast.peak <= self.room

    def options(self, by_tokens: bool = False) -> str:
        """Returns what makes it fit, on the command line, smaller passes first.

        "" where it does, or where nothing would.
        """
        if self.fix is None:
            return ""
        options = []
        rows = self.fix.config.rows
        if rows < self.config.rows:
            by_rows = f"--per_device_train_batch_size {rows}"
            size = f"--max_tokens_per_batch {rows * self.length}" if by_tokens else by_rows
            options.append(f"{size} --gradient_accumulation_steps {self.fix.config.passes}")
        options += [
            f"{switch.option} ({switch.note})" if switch.note else switch.option for switch in self.fix.switches
        ]
        return ", ".join(options)


def report_memory(
    memory: MemoryModel, config: TrainConfig, length: int, capacity: int | None, offers: Sequence[Offer] = ()
) -> MemoryReport:
    """Reports everything that can be said of a step before it is taken. Errors and cost: as `MemoryModel.timeline`.

    Args:
        length: tokens of each row.
        capacity: bytes of the device; None where not known.
        offers: of speed-ups, which may make it fit.
    """
    room = None if capacity is None else usable_bytes(capacity, memory.kind)
    stored = memory.stored_forecast(config)
    report = MemoryReport(config, stored, length, stored.peak, capacity=capacity, room=room)
    try:
        report.forecast = memory.forecast(config)
    except CANNOT_TRACE as error:
        report.note = f"activations are not counted: the model does not compute without values ({type(error).__name__})"
        return report
    if room is not None and memory.scales:
        report.largest = largest_rows(memory, config, room)
    if room is not None and not report.fits:
        report.fix = find_fix(memory, config, room, offers)
    return report


def format_memory(report: MemoryReport) -> list[str]:
    """Formats lines for a page: the step, what is counted on, the largest batch.

    And where the step does not fit, a fix.
    """
    found = report.forecast
    rows = report.config.rows
    listed = ", ".join(f"{what} {units.memory(num_bytes)}" for what, num_bytes in found.lines())
    line = f"memory of {rows:,} rows of {report.length:,} tokens: {listed}; {units.memory(found.peak)} in all"
    if report.room is not None:
        line += f", of {units.memory(report.room)} counted on"
    if report.largest is not None:
        line += f"; at most {report.largest:,} rows fit"
    if report.room is not None:
        line += f" ({NOT_CALIBRATED})"
    if report.note:
        line += f"; {report.note}"
    if report.fits:
        return [line]
    options = report.options()
    return [line, f"it does not fit; it would with {options}" if options else "it does not fit with any switch"]
