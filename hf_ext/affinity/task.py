"""Predict a number for each row from its sequences: affinity, stability, any property."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.arguments import DataArguments
from ..hardware import Hardware
from ..sketch import Sketch
from ..tasks import Task
from .arguments import AffinityArguments
from .sketching import sketch_run


class AffinityTask(Task):
    """Predict a number for each row from its sequences: affinity, stability, any property."""

    name = "affinity"
    recipe = "max_speed"
    arguments = (AffinityArguments, DataArguments)
    defaults = {
        "preset": "max_speed",
        "output_dir": "outputs/affinity",
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "warmup_steps": 0.05,
        "num_train_epochs": 30,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 256,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "resume": "auto",
        "load_best_model_at_end": True,
        "metric_for_best_model": "rmse",  # by loss, see `settle_measure`
        "logging_strategy": "epoch",
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "hub_strategy": "end",
    }

    def sketch(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> Sketch:
        """See `Task.sketch`."""
        return sketch_run(*[*arguments, args, hardware])


TASK = AffinityTask()
