"""What fits on a card: the largest batch, and the cheapest set of switches where the batch that was asked for does not.

A prediction counts what torch allocates. A card holds more: its context, libraries' workspaces, and what lies idle
between blocks. `usable_bytes` leaves room for that; the two constants are rules of thumb, not calibrated on a card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from .forecast import Choice, Forecast, Forecaster

IDLE_SHARE = 0.08  # of a card's memory: blocks that the allocator cannot join (fragmentation)
CONTEXT_BYTES = round(0.7 * 2**30)  # CUDA's context and kernels, 0.3 to 0.6 GiB, and cuBLAS's workspaces
PROCESS_BYTES = round(0.6 * 2**30)  # on a CPU: Python and libraries, measured of runs with the smallest models
MOST_ROWS = 1 << 20


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
        note: what it changes of learning or numerics; empty where nothing.
        settings: of `Choice` and `Graph`.
    """

    name: str
    option: str
    cost: int
    settings: dict[str, Any]
    note: str = ""

    def apply(self, choice: Choice) -> Choice:
        """`choice` with it."""
        of_graph = {name: value for name, value in self.settings.items() if name in ("policy", "half", "base")}
        others = {name: value for name, value in self.settings.items() if name not in of_graph}
        return replace(choice, graph=replace(choice.graph, **of_graph), **others)


NUMERICS = "other numerics"
# One of each group at most. Recomputing leaves every number as it is, and costs up to a third of the time.
ATTENTION = Switch("recompute all but attention", "--activation_policy attention", 2, {"policy": "attention"})
FULL = Switch("recompute every layer", "--activation_policy full", 3, {"policy": "full"})
HALF = Switch("half precision", "--speedups precision", 4, {"half": True}, NUMERICS)
STATES = Switch("optimizer states in 8 bits", "--optim adamw_8bit", 6, {"optimizer": "adamw_8bit"}, NUMERICS)
HALF_BASE = Switch("frozen base in half precision", "--speedups lora_base", 2, {"base": "half"})
BASE_8 = Switch("frozen base in 8 bits", "--load_in_8bit true", 7, {"base": "8-bit"}, NUMERICS)
BASE_4 = Switch("frozen base in 4 bits", "--load_in_4bit true", 9, {"base": "4-bit"}, NUMERICS)
HOST = Switch("optimizer in host memory", "--optim_ext cpu_offload", 10, {"on_host": True})


def switches(forecaster: Forecaster, choice: Choice, has_half: bool = True) -> list[list[Switch]]:
    """Those that would change something, in groups of which one can be on at a time.

    Args:
        has_half: whether the hardware computes in half precision.
    """
    model, graph = forecaster.subject.model, choice.graph
    has_adapters = graph.base == "as it is" and bool(forecaster.base_layers)
    trains_much = forecaster.all_gradients > forecaster.forecast(choice).peak // 50
    policies = [] if graph.policy in ("full", None) else [FULL] if graph.policy == "attention" else [ATTENTION, FULL]
    is_adamw = choice.optimizer.startswith("adamw_torch") and not choice.is_muon and not choice.on_host
    groups = [
        policies if getattr(model, "supports_gradient_checkpointing", True) else [],
        [HALF] if has_half and not graph.half else [],
        [*([HALF_BASE] if graph.half else []), BASE_8, BASE_4] if has_adapters else [],
        [STATES] if is_adamw and trains_much else [],
        [HOST] if is_adamw and trains_much and forecaster.subject.kind == "cuda" else [],
    ]
    return [group for group in groups if group]


def largest_rows(forecaster: Forecaster, choice: Choice, room: int) -> int:
    """Most rows of one pass that fit into `room` bytes; 0 if not even one does.

    Bytes grow along a line, or along a few, each steeper than the one before: where the last two answers point to is
    asked next, and the number after it, so that a few answers suffice.
    """

    def peak(rows: int) -> int:
        return forecaster.forecast(replace(choice, rows=rows)).peak

    low, high = 0, MOST_ROWS + 1  # fits, does not
    first, second = (choice.rows, peak(choice.rows)), (2 * choice.rows, peak(2 * choice.rows))
    for number in range(64):
        slope = (second[1] - first[1]) / (second[0] - first[0])
        guess = first[0] + int((room - first[1]) / slope) if slope > 0 and number < 8 else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
        found = [(rows, peak(rows)) for rows in (guess, guess + 1) if low < rows < high]
        for rows, num_bytes in found:
            low, high = (max(low, rows), high) if num_bytes <= room else (low, min(high, rows))
        if high - low <= 1:
            break
        first, second = (second, found[-1]) if found[-1][0] != second[0] else (first, found[-1])
    return low


@dataclass(frozen=True)
class Remedy:
    """Switches that together make a step fit.

    Attributes:
        choice: with them; where `choice.rows` is less than asked for, there are as many more passes per step.
    """

    switches: tuple[Switch, ...]
    choice: Choice
    forecast: Forecast


def find_remedy(forecaster: Forecaster, choice: Choice, room: int, has_half: bool = True) -> Remedy | None:
    """The cheapest set of switches that makes the step of `choice` fit into `room`, its effective batch as it is.

    None where no set does. Passes of half the rows are the cheapest switch: they change nothing but the pace.
    """
    for chosen, halvings in _sets(forecaster, choice, has_half):
        changed = choice
        for switch in chosen:
            changed = switch.apply(changed)
        changed = replace(changed, rows=choice.rows >> halvings, passes=choice.passes << halvings)
        if _least(forecaster, changed) > room:
            continue  # without a pass: what is stored alone is too much
        found = forecaster.try_forecast(changed)
        if found is not None and found.peak <= room:
            return Remedy(tuple(chosen), changed, found)
    return None


def _sets(forecaster: Forecaster, choice: Choice, has_half: bool) -> list[tuple[list[Switch], int]]:
    """All sets of switches, with passes halved so many times, the cheapest first."""
    groups: list[list[Switch | None]] = [[None, *group] for group in switches(forecaster, choice, has_half)]
    sets = [[switch for switch in chosen if switch] for chosen in product(*groups)]
    most = (choice.rows & -choice.rows).bit_length() - 1  # more would not leave the effective batch as it is
    most = 0 if forecaster.subject.has_one_batch else most
    both = [(chosen, halvings) for chosen in sets for halvings in range(most + 1)]
    return sorted(both, key=lambda each: (sum(s.cost for s in each[0]) + each[1], len(each[0])))


def _least(forecaster: Forecaster, choice: Choice) -> int:
    """What a step takes at least: what is stored between passes."""
    return forecaster.stored(choice) + forecaster.all_gradients
