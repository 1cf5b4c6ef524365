"""What a run cost: time of the clock, time of the processor, and what the machine was deprived of meanwhile."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cost:
    """Of one run.

    Attributes:
        seconds: of the clock.
        cpu_seconds: of the processor, of the process and all that it waited for; None where it was not recorded.
        stolen_share: of the machine's core time, what a hypervisor gave to others meanwhile; None where the system
            does not say.
    """

    seconds: float
    cpu_seconds: float | None = None
    stolen_share: float | None = None


def start_costs(stat: Path = Path("/proc/stat")) -> Callable[[], Cost]:
    """Begins to count; what is returned ends it. Counts child processes that ended in between, and no others."""
    began, used, before = time.perf_counter(), _children_seconds(), _core_times(stat)

    def end() -> Cost:
        after = _core_times(stat)
        stolen = None
        if before and after and after[0] > before[0]:
            stolen = round((after[1] - before[1]) / (after[0] - before[0]), 4)
        return Cost(time.perf_counter() - began, _children_seconds() - used, stolen)

    return end


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _core_times(stat: Path) -> tuple[int, int] | None:
    """Ticks of all cores since the start, and those stolen; None where the system does not say (no Linux)."""
    try:
        first = stat.read_text(encoding="ascii").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    ticks = [int(word) for word in first[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
    return (sum(ticks), ticks[7]) if first[0] == "cpu" and len(ticks) == 8 else None
