"""Fill in masked residues: pretrain or adapt a protein language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.arguments import DataArguments
from ..hardware import Hardware
from ..sketch import Sketch
from ..tasks import Task
from .arguments import MaskedLMArguments
from .sketching import sketch_run


class MaskedLMTask(Task):
    """Fill in masked residues: pretrain or adapt a protein language model."""

    name = "masked_lm"
    recipe = "mlm"
    arguments = (MaskedLMArguments, DataArguments)
    defaults = {
        "preset": "max_speed",
        "output_dir": "outputs/mlm",
        "too_long": "truncate",
        # ESM-2's own (Lin et al. 2023, supplement): Adam with these, 4e-4 after a warm-up, then linear decay.
        "learning_rate": 4e-4,
        "adam_beta2": 0.98,
        "weight_decay": 0.01,
        "warmup_steps": 0.05,
        "num_train_epochs": 10,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        # By share of the run, because a stream has no epochs.
        "eval_strategy": "steps",
        "eval_steps": 0.1,
        "save_strategy": "steps",
        "save_steps": 0.1,
        "save_total_limit": 2,
        "resume": "auto",
        "logging_steps": 0.05,
        "metric_for_best_model": "token_loss",
        "greater_is_better": False,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "hub_strategy": "end",
    }

    def sketch(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> Sketch:
        """See `Task.sketch`."""
        return sketch_run(*[*arguments, args])


TASK = MaskedLMTask()
