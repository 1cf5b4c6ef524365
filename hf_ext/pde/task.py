"""Solve partial differential equations on a grid with one operator Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..hardware import Hardware
from ..sketch import Sketch
from ..tasks import Task
from .arguments import OperatorArguments
from .sketching import sketch_run


class OperatorTask(Task):
    """Solve partial differential equations on a grid with one operator Transformer."""

    name = "pde_operator"
    recipe = "pde_operator"
    arguments = (OperatorArguments,)
    defaults = {
        "preset": "max_speed",
        "output_dir": "outputs/pde_operator",
        "optim_ext": ["muon"],  # --without muon for AdamW alone
        "learning_rate": 6e-3,
        "weight_decay": 0.01,
        "warmup_steps": 0.1,
        "lr_scheduler_type": "cosine",
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "eval_strategy": "steps",
        "eval_steps": 0.5,
        "save_strategy": "steps",
        "save_steps": 0.5,
        "save_total_limit": 2,
        "resume": "auto",
        "logging_steps": 0.05,
        "metric_for_best_model": "nrmse",
        "greater_is_better": False,
        "remove_unused_columns": False,  # the collator reads them
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "hub_strategy": "end",
    }

    def sketch(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> Sketch:
        """See `Task.sketch`."""
        return sketch_run(*[*arguments, args])


TASK = OperatorTask()
