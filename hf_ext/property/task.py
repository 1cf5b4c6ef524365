"""Predict what a table says of its sequences: affinity, stability, a class, something for each residue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..data import DataArguments
from ..tasks import USUAL, Task
from .arguments import AffinityArguments

if TYPE_CHECKING:
    from ..files import Json
    from ..tasks import Run
    from ..trainer import FastTrainer


class AffinityTask(Task):
    """Train an affinity or property model: encoders, a head, scores with intervals, a folder to share.

        hf-ext train --config gb1.yaml

    The label column may hold numbers, classes, sets of labels, or something for each residue; see docs/labels.md.

    Without data of yours it trains on a generated table, half a minute. Frozen encoders are run once per distinct
    sequence; the head trains from the cache. `--use_peft` turns the same command into fine-tuning with LoRA,
    `--tower_training full` into full fine-tuning; `--init_head_from` starts either from the head of a frozen run.
    `--preset baseline` does what stock Trainer does. Killed, or stopped with Ctrl-C, the same command goes on where it
    was (`--resume auto`, the default).
    """

    name = "affinity"
    arguments = (AffinityArguments, DataArguments)
    defaults = {
        **USUAL,
        "output_dir": "outputs/affinity",
        "too_long": "window",
        "learning_rate": 1e-3,
        "num_train_epochs": 30,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 256,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "rmse",  # by loss, see `resolve_measure`
        "logging_strategy": "epoch",
    }

    def train(self, run: Run, trainer: FastTrainer, data: Any) -> Any:
        """Trains the head, or several that are mixed, and fits intervals of numbers and probabilities of classes."""
        return self._find("steps", "train")(run, trainer, data)

    def take_steps(self, run: Run) -> Json:
        """Takes the steps of a run; with `--folds` or `--num_seeds` of several, and joins what they predict."""
        if self._find("repeats", "is_repeated")(run.model_args, run.data_args):
            return self._find("repeats", "repeat")(self, run)
        return super().take_steps(run)


TASK = AffinityTask()
main = TASK.main
