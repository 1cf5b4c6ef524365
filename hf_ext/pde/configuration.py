"""What an operator is made of: tasks, grid, width and depth, and the units of its data."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ..arguments.checks import ABOVE_ZERO, COUNT, FINITE, WIDTH, check_ranges
from ..errors import ArgumentError
from .tasks import POINTS_SHARE, TASKS, num_points

RANGES = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "decoder_channels", "decoder_hidden_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "patch_size", "resolution", "num_frequencies"), COUNT),
    "task_weights": ABOVE_ZERO,
}
UNITS = ("input_means", "input_stds", "target_means", "target_stds")


class OperatorConfig(PretrainedConfig):
    """Configuration of `OperatorTransformer`.

    Args:
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
            divide, a resolution that patches do not, or units of other tasks.
    """

    model_type = "hf_ext_operator"
    keys_to_ignore_at_inference = ["nrmse"]

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
        for name in UNITS:
            neutral = 1.0 if name.endswith("stds") else 0.0
            setattr(self, name, getattr(self, name) or dict.fromkeys(self.tasks, neutral))
        check_ranges(self, RANGES)
        _check_tasks(self)
        _check_shape(self)
        super().__post_init__(**kwargs)

    @property
    def num_tokens(self) -> int:
        """T, of each task."""
        return (self.resolution // self.patch_size) ** 2

    def grid(self, task: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """A task's input grid and its patches, each (rows, columns); in one dimension there is one row."""
        if len(TASKS[task].input_shape(self.resolution)) == 2:
            return (self.resolution, self.resolution), (self.patch_size, self.patch_size)
        return (1, num_points(self.resolution)), (1, self.patch_size**2 // POINTS_SHARE)


def _check_tasks(config: OperatorConfig) -> None:
    tasks, weights = config.tasks or [], config.task_weights or []
    if not tasks or len({*tasks}) < len(tasks) or not {*tasks} <= TASKS.keys():
        raise ArgumentError(f"tasks={tasks}: name one or more of {', '.join(TASKS)}, each once.")
    if len(weights) != len(tasks):
        raise ArgumentError(f"task_weights={weights}: give a number above 0 for each of {', '.join(tasks)}.")
    for name in UNITS:
        units = getattr(config, name)
        allowed = ABOVE_ZERO if name.endswith("stds") else FINITE
        if {*units} != {*tasks} or not all(allowed.holds(value) for value in units.values()):
            raise ArgumentError(f"{name}={units}: give {', '.join(tasks)} a number each, {allowed.words}.")


def _check_shape(config: OperatorConfig) -> None:
    if config.hidden_size % (4 * config.num_attention_heads):  # sine and cosine in two directions
        raise ArgumentError(
            f"hidden_size={config.hidden_size} with num_attention_heads={config.num_attention_heads}: must be a "
            "multiple of four times as many."
        )
    if config.patch_size % 2 or config.resolution % config.patch_size:
        raise ArgumentError(
            f"resolution={config.resolution} with patch_size={config.patch_size}: patch_size must be even and divide "
            "the resolution."
        )
