"""Random numbers of one row of generated data, whatever is drawn for the others."""

from __future__ import annotations

import numpy as np

from ..arguments.checks import SEED
from ..errors import ArgumentError

# The place of a name is part of the seed: append, never reorder.
_TASKS = ("advection1d", "darcy2d")


def row_generator(task: str, seed: int, stream: int, row: int) -> np.random.Generator:
    """The generator of row `row`: a function of its arguments alone, and independent of that of any other row.

    Raises:
        ArgumentError: a seed outside of 0, ..., 2^32 - 1, or a negative stream.
    """
    if type(seed) is not int or not SEED.holds(seed):
        raise ArgumentError(f"seed={seed!r}: must be {SEED.words}, and whole.")
    if type(stream) is not int or not SEED.holds(stream):
        raise ArgumentError(f"stream={stream!r}: must be {SEED.words}, and whole.")
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(_TASKS.index(task), stream, row)))


def check_counts(function: str, **counts: int) -> None:
    """Refuses what is no whole number from 1 on.

    Raises:
        ArgumentError: names function, argument and value.
    """
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ArgumentError(f"{function}: {name}={value!r} must be at least 1, and whole.")
