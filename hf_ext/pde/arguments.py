"""Which tasks an operator learns, from how many samples, and what its loss is made of, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..argument_checks import COUNT, COUNT_FROM_ZERO, WIDTH, Range, check_ranges
from ..errors import ArgumentError
from .tasks import TASKS

FROM_ZERO = Range("0 or more", lambda value: value >= 0)
RANGES = {
    **dict.fromkeys(("num_train_samples", "num_eval_samples", "patch_size", "num_queries"), COUNT),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads"), COUNT),
    **dict.fromkeys(("hidden_size",), WIDTH),
    **dict.fromkeys(("inverse_loss_every", "physics_every"), COUNT_FROM_ZERO),
    **dict.fromkeys(("inverse_loss_weight", "physics_weight"), FROM_ZERO),
}
POSITIONS = 4  # a patch of Darcy flow is square, so a resolution is a multiple of its side; advection has r * r / 4


@dataclass
class OperatorArguments:
    """Tasks, samples, the shape of the model, points per step and auxiliary losses.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help

    tasks: list[str] = field(
        default_factory=lambda: [*TASKS], metadata={"help": f"What is learned in one run: {', '.join(TASKS)}."}
    )
    task_weights: list[float] | None = field(
        default=None, metadata={"help": "Weight of each task's loss, in the order of --tasks; left out: 1 each."}
    )
    resolution: int = field(
        default=32,
        metadata={"help": "Darcy flow on r x r cells; advection on r * r / 4 points at 4 times: as many values."},
    )
    num_train_samples: int = field(default=512, metadata={"help": "Training samples of each task."})
    num_eval_samples: int = field(default=128, metadata={"help": "Samples of each task for validation, and for test."})
    samples_seed: int = field(
        default=0, metadata={"help": "Of the generated data, so that --seed varies training alone."}
    )
    data_cache_dir: str = field(
        default="~/.cache/hf_ext/pde", metadata={"help": "Where generated data are kept; the same for all runs."}
    )
    model_name_or_path: None | str = field(  # noqa: RUF036
        default=None, metadata={"help": "Folder of a trained operator to go on from. Left out: a new one."}
    )
    hidden_size: int = field(default=96, metadata={"help": "Width of a new model; 384 and 256 are the large ones."})
    num_hidden_layers: int = field(default=4, metadata={"help": "Transformer blocks of a new model."})
    num_attention_heads: int = field(default=4, metadata={"help": "Attention heads of a new model."})
    patch_size: int = field(
        default=4, metadata={"help": "Side of a patch of Darcy flow; a token of advection has as many points."}
    )
    num_queries: None | int = field(  # noqa: RUF036
        default=None,
        metadata={"help": "Points of each sample and task that a training step decodes; left out: all r * r."},
    )
    inverse_loss_every: int = field(
        default=4, metadata={"help": "Inverse losses in every n-th optimizer step; 0: never, 1: always."}
    )
    inverse_loss_weight: float = field(default=0.1, metadata={"help": "Of the inverse losses, beside 1 for the data."})
    physics_every: int = field(
        default=4, metadata={"help": "Physics priors in every n-th optimizer step; 0: never, 1: always."}
    )
    physics_weight: float = field(default=0.05, metadata={"help": "Of the physics priors, beside 1 for the data."})
    stock_trainer: bool = field(
        default=False,
        metadata={"help": "Train with transformers.Trainer itself, the control that comparisons measure against."},
    )

    def __post_init__(self) -> None:
        check_ranges(self, RANGES)
        unknown = [name for name in self.tasks if name not in TASKS]
        if unknown or not self.tasks or len({*self.tasks}) < len(self.tasks):
            raise ArgumentError(f"tasks={self.tasks}: name one or more of {', '.join(TASKS)}, each once.")
        weights = self.task_weights
        if weights is not None and (len(weights) != len(self.tasks) or min(weights) <= 0):
            raise ArgumentError(f"task_weights={weights}: give a number above 0 for each of {', '.join(self.tasks)}.")
        if self.resolution < 2 * self.patch_size or self.resolution % (2 * self.patch_size):
            raise ArgumentError(
                f"resolution={self.resolution}: must be a multiple of twice the patch_size of {self.patch_size}."
            )
        if self.num_queries is not None and self.num_queries > self.resolution**2:
            raise ArgumentError(
                f"num_queries={self.num_queries}: a sample has {self.resolution**2:,} points at resolution "
                f"{self.resolution}. Give at most as many, or leave it out for all."
            )
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ArgumentError(
                f"hidden_size={self.hidden_size}: must be a multiple of twice num_attention_heads="
                f"{self.num_attention_heads}."
            )
        if not self.data_cache_dir:
            raise ArgumentError("data_cache_dir='': name a folder.")
