"""What stands before step 1: what a step takes, what each switch would save, how large a batch fits, what makes it fit.

A prediction counts what torch allocates. A card holds more: its context, libraries' workspaces, and what lies idle
between blocks. `usable_bytes` leaves room for that; its two constants are rules of thumb, not calibrated on a card.
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from ..reporting import units
from .forecast import CANNOT_TRACE, Forecast, MemoryModel, TrainConfig

IDLE_SHARE = 0.08  # of a card's memory: blocks that the allocator cannot join (fragmentation)
CONTEXT_BYTES = round(0.7 * 2**30)  # CUDA's context and kernels, 0.3 to 0.6 GiB, and cuBLAS's workspaces
PROCESS_BYTES = round(0.6 * 2**30)  # on a CPU: Python and libraries, measured of runs with the smallest models
MOST_ROWS = 1 << 20
WORTH_SAVING = 0.05  # of the room: where a step takes less, nobody asks what would save some of it
NOT_CALIBRATED = "not calibrated on a card"


def usable_bytes(capacity: int, kind: str) -> int:
    """Of a device's memory, what predictions may fill.

    Args:
        capacity: bytes that the driver reports; on a CPU, that are free.
        kind: as `Hardware.kind`.
    """
    return max(0, round(capacity * (1 - IDLE_SHARE)) - (PROCESS_BYTES if kind == "cpu" else CONTEXT_BYTES))


@dataclass(frozen=True)
class Switch:
    """Something that takes less memory.

    Attributes:
        option: what turns it on.
        cost: what it is worth to do without it: small for what leaves learning and pace as they are.
        settings: of `TrainConfig`.
        note: what it changes of learning or numerics; empty where nothing.
    """

    option: str
    cost: int
    settings: dict[str, Any]
    note: str = ""


NUMERICS = "other numerics"
# One of each group at most. Recomputing leaves every number as it is, and costs up to a third of the time.
ATTENTION = Switch("--activation_policy attention", 2, {"policy": "attention"})
FULL = Switch("--activation_policy full", 3, {"policy": "full"})
HALF = Switch("--speedups all precision", 4, {"half": True}, NUMERICS)
STATES = Switch("--optim adamw_8bit", 6, {"optimizer": "adamw_8bit"}, NUMERICS)
HALF_BASE = Switch("--speedups all lora_base", 2, {"base": "half"})
BASE_8 = Switch("--load_in_8bit true", 7, {"base": "8-bit"}, NUMERICS)
BASE_4 = Switch("--load_in_4bit true", 9, {"base": "4-bit"}, NUMERICS)
HOST = Switch("--speedups all cpu_offload", 10, {"on_host": True})


def find_switches(memory: MemoryModel, config: TrainConfig) -> list[list[Switch]]:
    """Those that would change something, in groups of which one can be on at a time."""
    has_adapters = config.base == "as it is" and bool(memory.base_layers)
    trains_much = memory.all_gradients > memory.forecast(config).peak // 50
    policies = {"full": [], None: [], "attention": [FULL]}.get(config.policy, [ATTENTION, FULL])
    is_adamw = config.optimizer.startswith("adamw_torch") and not config.is_muon and not config.on_host
    bits = [] if memory.kind == "cpu" else [BASE_8, BASE_4]
    groups = [
        policies if getattr(memory.model, "supports_gradient_checkpointing", True) else [],
        [HALF] if memory.has_half and not config.half else [],
        [*([HALF_BASE] if config.half else []), *bits] if has_adapters else [],
        [STATES] if is_adamw and trains_much else [],
        [HOST] if is_adamw and trains_much and memory.kind == "cuda" else [],
    ]
    return [group for group in groups if group]


def largest_rows(memory: MemoryModel, config: TrainConfig, room: int) -> int:
    """Most rows of one pass that fit into `room` bytes; 0 if not even one does. Of models whose passes scale."""
    rows = range(1, MOST_ROWS)
    return bisect.bisect_right(rows, room, key=lambda number: memory.forecast(replace(config, rows=number)).peak)


class Fix(NamedTuple):
    """Switches that together make a step fit; a `config` of fewer rows than asked for has as many more passes."""

    switches: tuple[Switch, ...]
    config: TrainConfig
    forecast: Forecast


def find_fix(memory: MemoryModel, config: TrainConfig, room: int) -> Fix | None:
    """The cheapest set of switches that makes a step fit into `room`, its effective batch as it is; None where none.

    Passes of half the rows are the cheapest switch: they change nothing but the pace.
    """
    groups = [[None, *group] for group in find_switches(memory, config)]
    sets = [tuple(switch for switch in chosen if switch) for chosen in product(*groups)]
    most = (config.rows & -config.rows).bit_length() - 1  # more halves would not leave the effective batch as it is
    halvings = range(most + 1 if memory.scales else 1)
    ways = sorted(product(sets, halvings), key=lambda way: (sum(s.cost for s in way[0]) + way[1], len(way[0])))
    for switches, number in ways:
        changed = replace(config, rows=config.rows >> number, passes=config.passes << number)
        for switch in switches:
            changed = replace(changed, **switch.settings)
        weights, states, _ = memory.stored(changed)
        if weights + memory.all_gradients + (0 if changed.on_host else states) > room:
            continue  # without a pass: what is stored alone is too much
        found = memory.try_forecast(changed)
        if found is not None and found.peak <= room:
            return Fix(switches, changed, found)
    return None


@dataclass
class MemoryReport:
    """What one device holds in a step, and what it could hold.

    Attributes:
        capacity: of the device, bytes; None where not known.
        room: of it, what predictions may fill; see `usable_bytes`.
        length: tokens of each row, of the longest ones.
        stored: bytes of weights, gradients and optimizer, which no smaller pass makes fewer.
        note: why `forecast` has no more than these, where a pass could not be traced; else empty.
        savings: each switch alone, and the step with it.
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
    savings: list[tuple[Switch, Forecast]] = field(default_factory=list)
    largest: int | None = None
    fix: Fix | None = None

    @property
    def fits(self) -> bool:
        """Whether the step fits; also where nobody knows the capacity."""
        return self.room is None or self.forecast.peak <= self.room

    def options(self, by_tokens: bool = False) -> str:
        """What makes it fit, on the command line, smaller passes first; "" where it does, or where nothing would."""
        if self.fix is None:
            return ""
        parts, rows = [], self.fix.config.rows
        if rows < self.config.rows:
            by_rows = f"--per_device_train_batch_size {rows}"
            size = f"--max_tokens_per_batch {rows * self.length}" if by_tokens else by_rows
            parts.append(f"{size} --gradient_accumulation_steps {self.fix.config.passes}")
        for switch in sorted(self.fix.switches, key=lambda each: each.cost):
            parts.append(f"{switch.option} ({switch.note})" if switch.note else switch.option)
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "predicted_peak_bytes": self.forecast.peak,
            "lines": dict(self.forecast.lines()),
            "moment": self.forecast.moment,
            "rows": self.config.rows,
            "tokens_per_row": self.length,
            "stored_bytes": self.stored,
            "note": self.note,
            "capacity_bytes": self.capacity,
            "room_bytes": self.room,
            "fits": self.fits,
            "largest_rows": self.largest,
            "peak_bytes_with": {switch.option: found.peak for switch, found in self.savings},
            "would_fit_with": self.options(),
            "config": asdict(self.config),
        }


def report_memory(memory: MemoryModel, config: TrainConfig, length: int, capacity: int | None) -> MemoryReport:
    """Everything that can be said of a step before it is taken. Errors and cost: as `MemoryModel.timeline`.

    Args:
        length: tokens of each row.
        capacity: bytes of the device; None where not known.
    """
    room = None if capacity is None else usable_bytes(capacity, memory.kind)
    stored = memory.stored_forecast(config)
    report = MemoryReport(config, stored, length, stored.peak, capacity=capacity, room=room)
    try:
        report.forecast = found = memory.forecast(config)
    except CANNOT_TRACE as error:
        report.note = f"activations are not counted: the model does not compute without values ({type(error).__name__})"
        return report
    if room is None or found.peak > WORTH_SAVING * room:
        for switch in (switch for group in find_switches(memory, config) for switch in group):
            changed = memory.try_forecast(replace(config, **switch.settings))
            if changed is not None:
                report.savings.append((switch, changed))
    if room is not None and memory.scales:
        report.largest = largest_rows(memory, config, room)
    if room is not None and not report.fits:
        report.fix = find_fix(memory, config, room)
    return report


def report_run(
    memory: MemoryModel,
    args: Any,
    plan: Any,
    rows: int,
    length: int,
    capacity: int | None,
    **given: Any,
) -> MemoryReport:
    """`report_memory` of a run, as its arguments and its plan have it.

    Args:
        memory: whose kind and processes become those of the run.
        rows: of one pass on one device, if tokens are not counted instead.
        capacity: bytes of the device; None where not known.
        given: of `TrainConfig`, what arguments and plan do not tell.
    """
    memory.kind = "cpu" if plan.hardware.kind == "cpu" else "cuda"
    memory.sends_gradients = args.world_size > 1
    if plan.applied("token_budget"):
        rows = max(1, args.max_tokens_per_batch // length)
    switches = {"half": "precision", "is_muon": "muon", "on_host": "cpu_offload"}
    config = TrainConfig(rows, **{name: plan.applied(speedup) for name, speedup in switches.items()}, **given)
    return report_memory(memory, config, length, capacity)


def format_memory(report: MemoryReport) -> list[str]:
    """Lines for a page: the step, what is counted on, the largest batch; and where the step does not fit, a fix."""
    found, rows = report.forecast, report.config.rows
    parts = ", ".join(f"{what} {units.memory(num_bytes)}" for what, num_bytes in found.lines())
    line = f"memory of {rows:,} rows of {report.length:,} tokens: {parts}; {units.memory(found.peak)} in all"
    if report.room is not None:
        line += f", of {units.memory(report.room)} counted on"
    if report.largest is not None:
        line += f"; at most {report.largest:,} rows fit"
    if report.room is not None and found.peak > WORTH_SAVING * report.room:
        line += f" ({NOT_CALIBRATED})"
    if report.note:
        line += f"; {report.note}"
    if report.fits:
        return [line]
    options = report.options()
    return [line, f"it does not fit; it would with {options}" if options else "it does not fit with any switch"]
