"""Which operations of profiled steps took longest: a table from what `torch.profiler` recorded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType

NUM_SHOWN = 10
STEP = "hf_ext step"  # the range that marks a step among what was recorded


def costly_operations(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The `NUM_SHOWN` operations with most time of their own, inside the ranges named `STEP`; JSON-able.

    Time on the device where there was any, else on the CPU; what an operation calls counts for that, not for it. What
    is recorded outside the ranges (an evaluation, waiting for rows) does not count.

    Args:
        events: `torch.profiler.profile.events()`; kernels count with the operation that launched them.

    Returns:
        Per operation `name`, `calls`, `self_cpu_ms`, `self_device_ms`, and `share` of the time of all of them.
    """
    found = [event for event in events if event.device_type == DeviceType.CPU]
    steps = [event.time_range for event in found if event.name == STEP]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in found:
        inside = any(step.start <= event.time_range.start <= step.end for step in steps)
        if inside and not event.is_user_annotation:
            row = sums[event.name]
            row[0] += event.count
            row[1] += event.self_cpu_time_total / 1000  # recorded in microseconds
            row[2] += event.self_device_time_total / 1000
    on_device = any(device_ms for _, _, device_ms in sums.values())
    ranked = sorted(sums.items(), key=lambda item: -item[1][2 if on_device else 1])
    whole = sum(row[2 if on_device else 1] for row in sums.values())
    return [
        {
            "name": name,
            "calls": int(calls),
            "self_cpu_ms": round(cpu_ms, 3),
            "self_device_ms": round(device_ms, 3),
            "share": round((device_ms if on_device else cpu_ms) / whole, 4) if whole else None,
        }
        for name, (calls, cpu_ms, device_ms) in ranked[:NUM_SHOWN]
    ]
