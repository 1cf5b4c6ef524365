"""What is learned: each task's grids, and what is known of its solutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ADVECTION_SPEED, ADVECTION_TIMES = 0.4, 4
POINTS_SHARE = 4  # advection has r^2 / 4 points at 4 times where Darcy flow has r x r cells: as many values


@dataclass(frozen=True)
class Task:
    """One operator, from a function on a grid to one at query points, whose two coordinates are from 0 to 1.

    Attributes:
        description: in words, for reports.
        input_shape, target_shape: resolution -> shape of a sample.
        locate: places in a flattened target (whole numbers, NumPy or torch, of any shape), resolution -> their first
            and second coordinates.
        has_time: whether the second coordinate is time, not y; the initial state is then a trivial prediction too.
        is_periodic: in the first coordinate, x.
        is_zero_at_boundary: whether solutions vanish where a coordinate is 0 or 1.
    """

    description: str
    input_shape: Callable[[int], tuple[int, ...]]
    target_shape: Callable[[int], tuple[int, ...]]
    locate: Callable[[Any, int], tuple[Any, Any]]
    has_time: bool = False
    is_periodic: bool = False
    is_zero_at_boundary: bool = False

    def query_grid(self, resolution: int) -> np.ndarray:
        """(Q, 2), float32: the coordinates of all points of a flattened target, in its order."""
        places = np.arange(np.prod(self.target_shape(resolution)))
        return np.stack(self.locate(places, resolution), axis=-1).astype(np.float32)


def num_points(resolution: int) -> int:
    """Points of advection's grid at a resolution: a quarter of its square."""
    return resolution**2 // POINTS_SHARE


def _locate_advection(places: Any, resolution: int) -> tuple[Any, Any]:
    points = num_points(resolution)
    return places % points / points, (places // points + 1) / ADVECTION_TIMES


def _locate_darcy(places: Any, resolution: int) -> tuple[Any, Any]:
    return (places // resolution + 0.5) / resolution, (places % resolution + 0.5) / resolution


TASKS = {
    "advection1d": Task(
        "1-D advection, periodic, speed 0.4: the state at four times from the initial one",
        input_shape=lambda resolution: (num_points(resolution),),
        target_shape=lambda resolution: (ADVECTION_TIMES, num_points(resolution)),
        locate=_locate_advection,
        has_time=True,
        is_periodic=True,
    ),
    "darcy2d": Task(
        "2-D Darcy flow: the pressure from the permeability",
        input_shape=lambda resolution: (resolution, resolution),
        target_shape=lambda resolution: (resolution, resolution),
        locate=_locate_darcy,
        is_zero_at_boundary=True,
    ),
}
