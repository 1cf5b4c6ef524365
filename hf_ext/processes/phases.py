"""What a process spends its time on, by phase: seconds of the processor and of the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_spent: dict[str, list[float]] = {}
_current = "start"
_since = (0.0, psutil.Process().create_time())


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts what is spent inside to `name`, but for phases inside of it; also decorates a function."""
    outer = _go_on(name)
    try:
        yield
    finally:
        _go_on(outer)


def read_phases() -> dict[str, dict[str, float]]:
    """Returns `cpu_s` (of all threads) and `wall_s` by phase, in the order in which they ended first.

    Since the process began: what comes before the first phase is "start", imports for the most part.
    """
    _go_on(_current)
    return {name: {"cpu_s": cpu_s, "wall_s": wall_s} for name, (cpu_s, wall_s) in _spent.items()}


def _go_on(name: str) -> str:
    """Ends the current phase and begins another; returns which ended."""
    global _current, _since
    now = (time.process_time(), time.time())
    spent = _spent.setdefault(_current, [0.0, 0.0])
    for i, (end, begin) in enumerate(zip(now, _since)):
        spent[i] += end - begin
    ended = _current
    _current = name
    _since = now
    return ended
