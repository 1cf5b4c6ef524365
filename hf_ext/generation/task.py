"""Write antibodies for an antigen, trained in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.arguments import DataArguments
from ..hardware import Hardware
from ..sketch import Sketch
from ..tasks import Task
from .arguments import GeneratorArguments
from .results import BEST_METRIC
from .sketching import sketch_run


class GenerationTask(Task):
    """Write antibodies for an antigen, trained in stages."""

    name = "generation"
    recipe = "generate_antibody"
    arguments = (GeneratorArguments, DataArguments)
    defaults = {
        "preset": "max_speed",
        "output_dir": "outputs/generator",
        "weight_decay": 0.01,
        "warmup_steps": 0.05,
        "per_device_eval_batch_size": 64,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 2,
        "resume": "auto",
        "metric_for_best_model": BEST_METRIC,
        "greater_is_better": False,
        "remove_unused_columns": False,  # the lengths of rows, by which batches are made, are no input of the model
        "logging_steps": 0.05,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "hub_strategy": "end",
    }

    def sketch(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> Sketch:
        """See `Task.sketch`."""
        return sketch_run(*[*arguments, args])


TASK = GenerationTask()
