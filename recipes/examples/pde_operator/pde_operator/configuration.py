"""What is learned, and what an operator is made of: each task's grids, width and depth, the units of the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from hf_ext.arguments import ABOVE_ZERO, COUNT, WIDTH, check_ranges
from hf_ext.errors import ArgumentError

ADVECTION_SPEED = 0.4
ADVECTION_TIMES = 4
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
        """Returns (Q, 2), float32: the coordinates of all points of a flattened target, in its order."""
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


RANGES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "decoder_channels", "decoder_hidden_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "patch_size", "resolution", "num_frequencies"), COUNT),
    "task_weights": ABOVE_ZERO,
}
NEUTRAL = {"input_means": 0.0, "input_stds": 1.0, "target_means": 0.0, "target_stds": 1.0}


class OperatorConfig(PretrainedConfig):
    """Configuration of `OperatorTransformer`.

    Args:
        stage: of training, by which a run knows that it does not continue that of another stage.
        tasks: names from `TASKS`; their order is that of predictions and labels.
        task_weights: of each task's loss; None: 1 each.
        resolution: r: Darcy flow on r x r cells, advection on r * r / 4 points; inputs have this grid and no other.
        patch_size: p, even: a token is p x p cells of Darcy flow or p * p / 4 points of advection, so that both tasks
            have T = (r / p)^2 tokens.
        hidden_size: d; 384 and 256 are the large ones, 64 that of the demo.
        num_hidden_layers, num_attention_heads: of the trunk, which all tasks share.
        intermediate_size: of its feed-forward layers; None: 4 d.
        num_frequencies: sines and cosines of each coordinate.
        decoder_channels: of the maps that decoders look points up in, and of the encoders' first layer.
        decoder_hidden_size: of the two layers that make a value of what was looked up.
        input_means, input_stds, target_means, target_stds: task -> number in the unit of the data, from
            `measure_units`; None: 0 and 1. Predictions are in the unit of the data.

    Raises:
        ArgumentError: an unknown task or one named twice, a number outside of its range, a width that heads do not
            divide, or a resolution that patches do not.
    """

    model_type = "hf_ext_operator"

    stage: str = "operator"
    tasks: list | None = None
    task_weights: list | None = None
    resolution: int = 64
    patch_size: int = 4
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: None | int = None  # noqa: RUF036
    num_frequencies: int = 8
    decoder_channels: int = 32
    decoder_hidden_size: int = 64
    input_means: dict | None = None
    input_stds: dict | None = None
    target_means: dict | None = None
    target_stds: dict | None = None

    def __post_init__(self, **kwargs: Any):
        self.tasks = [*TASKS] if self.tasks is None else list(self.tasks)
        self.task_weights = [1.0] * len(self.tasks) if self.task_weights is None else list(self.task_weights)
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        for name, neutral in NEUTRAL.items():
            setattr(self, name, getattr(self, name) or dict.fromkeys(self.tasks, neutral))
        check_ranges(self, RANGES)
        if not self.tasks or len({*self.tasks}) < len(self.tasks) or not {*self.tasks} <= TASKS.keys():
            raise ArgumentError(f"tasks={self.tasks}: name one or more of {', '.join(TASKS)}, each once.")
        if len(self.task_weights) != len(self.tasks):
            raise ArgumentError(
                f"task_weights={self.task_weights}: give a number above 0 for each of {', '.join(self.tasks)}."
            )
        if self.hidden_size % (4 * self.num_attention_heads):  # sine and cosine in two directions
            raise ArgumentError(
                f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads}: must be a "
                "multiple of four times as many."
            )
        if self.patch_size % 2 or self.resolution % self.patch_size:
            raise ArgumentError(
                f"resolution={self.resolution} with patch_size={self.patch_size}: patch_size must be even and divide "
                "the resolution."
            )
        super().__post_init__(**kwargs)

    @property
    def num_tokens(self) -> int:
        """T, of each task."""
        return (self.resolution // self.patch_size) ** 2

    def grid(self, task: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Describes a task's input grid and its patches, each (rows, columns); in one dimension there is one row."""
        if len(TASKS[task].input_shape(self.resolution)) == 2:
            return (self.resolution, self.resolution), (self.patch_size, self.patch_size)
        return (1, num_points(self.resolution)), (1, self.patch_size**2 // POINTS_SHARE)
