"""The trainer as its parts see it. What they need of each other, their constructors are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import datasets
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import EvalPrediction, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother

from ..files import Facts, Json
from ..training_args import FastTrainingArguments

Rows: TypeAlias = datasets.Dataset | Dataset | Sequence[Facts]


class Host(Protocol):
    """Attributes and methods of Trainer, under its names and with the arguments that hf_ext adds.

    All of them may be assigned at any time, by Trainer or by the user: a part reads them when it needs them.
    """

    args: FastTrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    accelerator: Accelerator
    model: nn.Module
    optimizer: Optimizer | None
    lr_scheduler: LambdaLR | None
    train_dataset: Any
    eval_dataset: Any
    test_dataset: Any
    data_collator: Any
    processing_class: Any
    compute_metrics: Callable[[EvalPrediction], dict] | None
    label_names: list[str]
    label_smoother: LabelSmoother | None
    loss_is_scaled_for_ga: bool | None
    hub_model_id: str  # from when the repository is open
    is_in_train: bool
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool
    deepspeed: Any
    current_gradient_accumulation_steps: int
    _globalstep_last_logged: int
    _total_loss_scalar: float
    _tr_loss: torch.Tensor

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Does what `Trainer.log` does."""

    def loss_counts_items(self) -> bool:
        """Returns whether the loss is a sum over items by their number in the step; `FastTrainer`'s."""

    def _get_collator_with_removed_columns(self, data_collator: Callable, description: str | None = None) -> Callable:
        """Does what `Trainer`'s does."""

    def _remove_unused_columns(self, dataset: datasets.Dataset, description: str | None = None) -> datasets.Dataset:
        """Does what `Trainer`'s does."""

    def create_model_card(self, *, model_name: str | None = None) -> None:
        """Does what `Trainer.create_model_card` does."""


class Carried(Protocol):
    """A part whose state is in each checkpoint, in `progress.json` under its `name`."""

    name: str

    def state(self) -> Json | None:
        """Returns what to store, JSON-able; None where there is nothing."""

    def load(self, tree: Json | None) -> None:
        """Goes on from what `state` returned; None: as before the first step."""


def name_evaluation_sets(eval_dataset: object) -> Json:
    """Returns evaluation sets by the prefix of their metrics."""
    several = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    return {"eval" if name == "" else f"eval_{name}": rows for name, rows in several.items()}
