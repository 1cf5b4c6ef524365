"""Which tasks an operator learns, from how many samples, and what its loss is made of, as command-line arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from hf_ext.arguments import NOT_NEGATIVE, REQUIRE, SEED, Count, check_ranges, option, ranges_in_types
from hf_ext.errors import ArgumentError

from .configuration import TASKS, OperatorConfig

Every = Annotated[int, NOT_NEGATIVE]
Weight = Annotated[float, NOT_NEGATIVE]


@dataclass
class OperatorArguments:
    """Tasks, samples, the shape of the model, points per step and auxiliary losses.

    Raises:
        ArgumentError: a value out of range, or two that contradict each other.
    """

    _argument_group_name = "model"  # in --help
    _argument_groups = {"evaluation": ("require",)}
    _first_flags = (
        *("stage", "init_from", "tasks", "dataset_name", "resolution", "num_train_samples"),
        *("hidden_size", "num_hidden_layers", "preset", "effective_batch_size"),
        *("output_dir", "num_train_epochs", "learning_rate", "per_device_train_batch_size", "seed", "report_to"),
        *("resume", "max_hours", "push_to_hub", "hub_model_id"),
    )

    stage: Literal["operator", "physics"] = option(
        "operator",
        "operator: a new one, or a trained one further. physics: a trained one goes on with physics priors in every "
        "step and no inverse losses.",
    )
    init_from: str | None = option(None, "Folder of a trained operator of the same tasks and sizes, to go on from.")
    tasks: list[str] = option([*TASKS], f"What is learned in one run: {', '.join(TASKS)}.")
    dataset_name: list[str] | None = option(
        None, "HDF5 files of PDEBench, 1D_Advection, 2D_DarcyFlow or both; left out: data are generated."
    )
    task_weights: list[float] | None = option(
        None, "Weight of each task's loss, in the order of --tasks; left out: 1 each."
    )
    resolution: int = option(32, "Darcy flow on r x r cells; advection on r * r / 4 points at 4 times: as many values.")
    num_train_samples: Count = option(1600, "Training samples of each task.")
    num_eval_samples: Count = option(200, "Samples of each task for validation, and for test.")
    samples_seed: Annotated[int, SEED] = option(0, "Of the generated data, so that --seed varies training alone.")
    hidden_size: int = option(64, "Width of the model; 384 and 256 are the large ones.")
    num_hidden_layers: int = option(4, "Transformer blocks.")
    num_attention_heads: int = option(4, "Attention heads.")
    patch_size: int = option(4, "Side of a patch of Darcy flow; a token of advection has p * p / 4 points.")
    num_queries: Count | None = option(
        None, "Points of each sample and task that a training step decodes; left out: half of all."
    )
    inverse_loss_every: Every | None = option(
        None,
        "Inverse losses in every n-th optimizer step; 0: never, 1: always; left out: 4, in the stage physics 0.",
    )
    inverse_loss_weight: Weight = option(0.1, "Of the inverse losses, beside 1 for the data.")
    physics_every: Every | None = option(
        None,
        "Physics priors in every n-th optimizer step; 0: never, 1: always; left out: 4, in the stage physics 1.",
    )
    physics_weight: Weight = option(0.05, "Of the physics priors, beside 1 for the data.")
    stock_trainer: bool = option(
        False, "Train with transformers.Trainer itself, the control that comparisons measure against."
    )
    require: list[str] = option([], REQUIRE)

    def __post_init__(self) -> None:
        check_ranges(self, ranges_in_types(OperatorArguments))
        if self.stage == "physics" and self.init_from is None:
            raise ArgumentError("--stage physics goes on from a trained operator: give its folder, --init_from FOLDER.")
        if self.inverse_loss_every is None:
            self.inverse_loss_every = 0 if self.stage == "physics" else 4
        if self.physics_every is None:
            self.physics_every = 1 if self.stage == "physics" else 4
        OperatorConfig(**self.shape)  # refuses what no model has
        if self.queries_per_step > self.resolution**2:
            raise ArgumentError(
                f"num_queries={self.num_queries}: a sample has {self.resolution**2:,} points at resolution "
                f"{self.resolution}. Give at most as many, or leave it out for half of them."
            )

    @property
    def queries_per_step(self) -> int:
        """Points of each sample and task that a training step decodes."""
        return self.num_queries or self.resolution**2 // 2

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of `OperatorConfig`, without the units of the data."""
        names = ("stage", "tasks", "task_weights", "resolution", "patch_size", "hidden_size")
        return {name: getattr(self, name) for name in (*names, "num_hidden_layers", "num_attention_heads")}
