"""What is learned: each task's grids, and the trivial predictions that it is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ADVECTION_SPEED, ADVECTION_TIMES = 0.4, 4
POINTS_SHARE = 4  # advection has r^2 / 4 points at 4 times where Darcy flow has r x r cells: as many values


@dataclass(frozen=True)
class Task:
    """One operator, from a function on a grid to one at query points.

    Attributes:
        name: as in `TASKS`.
        description: in words, for reports.
        coordinates: names of the two coordinates of a query, each from 0 to 1.
        has_time: whether the second one is time; the initial state is then a trivial prediction too.
        is_periodic: in the first coordinate.
        is_zero_at_boundary: whether solutions vanish where a coordinate is 0 or 1.
        input_shape, target_shape: resolution -> shape of a sample.
        locate: places in a flattened target (whole numbers, NumPy or torch, of any shape), resolution -> their first
            and second coordinates.
        baselines: trivial predictions that make sense of it, see `hf_ext.pde.data.baseline_errors`.
    """

    name: str
    description: str
    coordinates: tuple[str, str]
    has_time: bool
    is_periodic: bool
    is_zero_at_boundary: bool
    input_shape: Callable[[int], tuple[int, ...]]
    target_shape: Callable[[int], tuple[int, ...]]
    locate: Callable[[Any, int], tuple[Any, Any]]
    baselines: tuple[str, ...]

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
    task.name: task
    for task in (
        Task(
            name="advection1d",
            description="1-D advection, periodic, speed 0.4: the state at four times from the initial one, exact",
            coordinates=("x", "t"),
            has_time=True,
            is_periodic=True,
            is_zero_at_boundary=False,
            input_shape=lambda resolution: (num_points(resolution),),
            target_shape=lambda resolution: (ADVECTION_TIMES, num_points(resolution)),
            locate=_locate_advection,
            baselines=("training mean", "persistence"),
        ),
        Task(
            name="darcy2d",
            description="2-D Darcy flow: the pressure from a permeability of 12 or 3, by finite volumes",
            coordinates=("x", "y"),
            has_time=False,
            is_periodic=False,
            is_zero_at_boundary=True,
            input_shape=lambda resolution: (resolution, resolution),
            target_shape=lambda resolution: (resolution, resolution),
            locate=_locate_darcy,
            baselines=("training mean",),
        ),
    )
}
