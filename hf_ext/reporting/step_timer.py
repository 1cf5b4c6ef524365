"""Seconds of training steps and of waiting for data, with evaluation, saving and logging left out.

A step lasts from the moment the loop was free for it (the end of the step before, or of what came between) to its own
end. Its first part, up to `begin`, is waiting for data. On CUDA both ends are events in the stream: no step waits for
the device, and time in which the device was still busy with the step before does not count as waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class StepTimer:
    """Times steps of one training loop.

    Args:
        device: where training runs.
        clock: seconds that only grow; given in tests. Without it CUDA devices are timed by events, others by
            `time.perf_counter`.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self._uses_events = clock is None and device.type == "cuda"
        self._clock = clock or time.perf_counter
        self._steps: list[tuple[Any, Any, Any]] = []
        self._begin: Any = None
        self.resume()

    def resume(self) -> None:
        """Evaluation, saving or logging ends: from here on the loop is waiting for data."""
        self._free = self._mark()

    def begin(self) -> None:
        """A step's batches are there."""
        self._begin = self._mark()

    def end(self) -> None:
        """The step ends."""
        end = self._mark()
        self._steps.append((self._free, self._begin, end))
        self._free = end

    def read(self) -> list[tuple[float, float]]:
        """Per step since the last call: seconds, and how many of them were waiting. Waits for the device once."""
        steps, self._steps = self._steps, []
        if self._uses_events and steps:
            steps[-1][2].synchronize()
        return [(self._between(free, end), self._between(free, begin)) for free, begin, end in steps]

    def _mark(self) -> Any:
        if not self._uses_events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self._uses_events else second - first
