"""The trainer as its parts see it, and which of Trainer's methods are overridden: in a subclass or on one trainer.

What parts need of each other, their constructors are given. hf_ext computes some things otherwise than Trainer (see
`training/losses.py`), and can do so only where the methods that they go through are its own or Trainer's. Where one is
not, the trainer has to be what Trainer is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

import datasets
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import EvalPrediction, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_pt_utils import LabelSmoother

from ..files import Facts, Json
from ..models import is_from, is_in
from ..training_args import FastTrainingArguments

# Trainer's own: a class of these is no override, nor is one whose methods hand on what these return.
OWN_CLASSES = ("hf_ext", "transformers.trainer", "transformers.trainer_seq2seq")
OWN_CODE = ("hf_ext", "transformers")
TRAINING_LOSS = ("compute_loss", "training_step", "get_batch_samples", "_get_num_items_in_batch", "_prepare_inputs")
BATCHES = (
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "get_batch_samples"),
    *("_prepare_inputs", "_prepare_input", "training_step", "compute_loss", "evaluation_loop", "prediction_step"),
)
EVALUATION = ("evaluate", "_evaluate", "evaluation_loop", "prediction_step", "get_eval_dataloader", "log")
EVALUATION_LOSS = ("compute_loss", "prediction_step", "evaluation_loop", "_prepare_inputs")

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
    _tr_loss: Tensor
    _train_batch_size: int

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Does what `Trainer.log` does."""

    def loss_counts_items(self) -> bool:
        """Returns whether the loss is a sum over items by their number in the step; `FastTrainer`'s."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor) -> Tensor:
        """Does what `Trainer.training_step` does."""

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


# --- methods that the user overrides ----------------------------------------------------------------------------------


def find_override(trainer: object, *names: str) -> str | None:
    """Names the first of these methods that is overridden, and by whom, as "Class.method"; None where none is.

    It does not matter where in the order of the classes the override stands, nor whether it calls `super()`: what it
    makes of the result is not known. An assignment to a class of transformers, or to the trainer, is an override too.
    """
    for name in names:
        if name in vars(trainer) and not is_from(vars(trainer)[name], OWN_CODE):
            return f"{name}, assigned to the trainer"
        for base in type(trainer).__mro__:
            if name in vars(base) and not _is_own(base, vars(base)[name]):
                return f"{base.__name__}.{name}"
    return None


def find_own_loss(trainer: object, compute_loss_func: Callable[..., Any] | None) -> str | None:
    """Names where the user's own loss comes from, which need not be what the model returns; None without one."""
    if compute_loss_func is not None and not is_from(compute_loss_func, ("hf_ext",)):
        return "compute_loss_func"
    return find_override(trainer, *TRAINING_LOSS)


@lru_cache(maxsize=1024)
def _is_own(base: type, method: object) -> bool:
    return is_in(base.__module__, OWN_CLASSES) and is_from(method, OWN_CODE)
