"""Which of two computations is the faster one on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

ROUNDS = 5


def times_as_fast(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    """How many times as fast `one` is as `other`; to two digits.

    By processor time, which other programs and stolen cores lengthen less than that of the clock, the least of a few
    rounds in which they take turns; one before is not counted, in which libraries start.
    """
    spent: dict[Callable[[], Any], list[float]] = {one: [], other: []}
    for _ in range(ROUNDS + 1):
        for run, seconds in spent.items():
            start = time.process_time()
            run()
            seconds.append(time.process_time() - start)
    return round(min(spent[other][1:]) / min(spent[one][1:]), 2)
