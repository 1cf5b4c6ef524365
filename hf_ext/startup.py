"""How a program of hf_ext starts, and what it spends its time on.

Words that it was called by, imports without a search for garbage, seconds of processor and clock by phase.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PROGRAM = "hf-ext"
_spent: dict[str, list[float]] = {}
_current = "start"
_has_ended = False
_since: list[float] = []


def program_words() -> list[str]:
    """Returns how this process was started, without arguments: ["hf-ext", "train"], or the path of a script."""
    program, _, command = sys.argv[0].partition(" ")
    return [program, command] if program == PROGRAM and command else [sys.argv[0]]


@contextmanager
def quick_imports() -> Iterator[None]:
    """Collects no garbage inside, and never looks through what was imported there again.

    For programs, at their top: a million objects that modules define stay anyway, and looking for garbage among them
    takes a second of the processor until the first step (`benchmarks/command_times.py`).
    """
    collects = gc.isenabled()
    kernels = logging.getLogger("bitsandbytes.backends")
    level = kernels.level
    kernels.setLevel(logging.ERROR)  # peft imports it, and on some CPUs it warns of a kernel that nothing here calls
    gc.disable()
    try:
        yield
    finally:
        kernels.setLevel(level)
        gc.freeze()
        if collects:
            gc.enable()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Counts what is spent inside to `name`, but for phases inside of it; also decorates a function."""
    outer = _go_on(name)
    try:
        yield
    finally:
        _go_on(outer)


def begin_phases() -> None:
    """Begins anew where a run ended before in this process; the first one began with it."""
    if _has_ended:
        end_phases()


def end_phases() -> dict[str, dict[str, float]]:
    """Returns `cpu_s` (of all threads) and `wall_s` by phase, in the order in which they ended first; forgets them.

    Since the process began, or `begin_phases`: what no phase counts is "start", imports for the most part.
    """
    global _has_ended
    _go_on(_current)
    found = {name: {"cpu_s": cpu_s, "wall_s": wall_s} for name, (cpu_s, wall_s) in _spent.items()}
    _spent.clear()
    _has_ended = True
    return found


def _go_on(name: str) -> str:
    """Ends the current phase and begins another; returns which ended."""
    global _current, _since
    import psutil  # here, since --help needs none of it

    began = _since or [0.0, psutil.Process().create_time()]
    _since = [time.process_time(), time.time()]
    spent = _spent.setdefault(_current, [0.0, 0.0])
    for i, (end, begin) in enumerate(zip(_since, began)):
        spent[i] += end - begin
    ended = _current
    _current = name
    return ended
