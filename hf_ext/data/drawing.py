"""A seeded choice of rows: the same rows wherever the same numbers are asked for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def draw_rows(num_rows: int, seed: int, most: int | None) -> NDArray[np.int64]:
    """At most `most` numbers below `num_rows`, drawn by `seed`, rising; None: all."""
    return np.sort(np.random.default_rng(seed).permutation(num_rows)[:most])
