"""Seconds of training steps, of waiting for data and of the processor, with evaluation, saving and logging left out.

A step lasts from the moment the loop was free for it (the end of the step before, or of what came between) to its own
end. Its first part, up to `begin`, is waiting for data. On CUDA both ends are events in the stream: no step waits for
the device, and time in which the device was still busy with the step before does not count as waiting.

Seconds of the processor are those of this process and all its threads, without data workers. Other programs on the
machine make a step longer; they hardly change these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
        self._steps: list[tuple[Any, Any, Any, float]] = []
        self._begin: Any = None
        self.resume()

    def resume(self) -> None:
        """Evaluation, saving or logging ends: from here on the loop is waiting for data."""
        self._free, self._cpu = self._mark(), time.process_time()

    def begin(self) -> None:
        """A step's batches are there."""
        self._begin = self._mark()

    def end(self) -> None:
        """The step ends."""
        end, cpu = self._mark(), time.process_time()
        self._steps.append((self._free, self._begin, end, cpu - self._cpu))
        self._free, self._cpu = end, cpu

    def read(self) -> list[tuple[float, float, float]]:
        """Per step since the last call: seconds, those of them that were waiting, and seconds of the processor.

        Waits for the device once.
        """
        steps, self._steps = self._steps, []
        if self._uses_events and steps:
            steps[-1][2].synchronize()
        return [(self._between(free, end), self._between(free, begin), cpu) for free, begin, end, cpu in steps]

    def newest(self, first: int = 0) -> Iterator[tuple[float, float]]:
        """Seconds of steps that were not read yet, and those of them that were waiting; the last step first.

        Never waits for the device: steps that it has not done yet are left out. So are those before `first`.
        """
        for free, begin, end, _ in reversed(self._steps[first:]):
            if not self._uses_events or end.query():
                yield self._between(free, end), self._between(free, begin)

    def _mark(self) -> Any:
        if not self._uses_events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1000 if self._uses_events else second - first
