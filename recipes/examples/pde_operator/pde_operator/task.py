"""Solve partial differential equations on a grid with one operator Transformer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_ext import Task

from .arguments import OperatorArguments

if TYPE_CHECKING:
    from hf_ext import Run
    from hf_ext.hardware import Hardware
    from hf_ext.reporting import Page
    from hf_ext.tasks import DryRun

    from .steps import OperatorData


class OperatorTask(Task):
    """Train one operator Transformer on two equations at once: 1-D advection and 2-D Darcy flow, on generated data.

        accelerate launch recipes/examples/pde_operator/train.py --resolution 64 --hidden_size 256

    Advection is solved exactly, Darcy flow by finite volumes; samples are generated. With
    `--dataset_name 1D_Advection_Sols_beta0.4.hdf5 2D_DarcyFlow_beta1.0_Train.hdf5` they are PDEBench's. Scores are
    nRMSE: the L2 of the error over the L2 of the solution, beside what the mean of the training solutions and, for
    advection, the initial state score. Killed, or stopped with Ctrl-C, the same command goes on where it was.
    `--stock_trainer true` trains with transformers.Trainer itself and AdamW, on the same samples, points and losses.
    """

    name = "pde_operator"
    arguments = (OperatorArguments,)
    defaults = {
        "output_dir": "outputs/pde_operator",
        "speedups": ["all", "muon"],  # --without muon for AdamW alone
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

    # Each imports what it needs when it is called, so that --help waits for no model code.

    def check(self, run: Run) -> None:
        """Implements `Task.check`."""
        from . import steps

        steps.check(run)

    def load(self, run: Run) -> OperatorData:
        """Implements `Task.load`."""
        from . import steps

        return steps.load(run)

    def build(self, run: Run, data: OperatorData) -> dict[str, Any]:
        """Implements `Task.build`. The model gets the auxiliary terms of its loss."""
        from . import steps

        return steps.build(run, data)

    def score(self, run: Run, trainer: Any, trained: Any, data: OperatorData) -> dict[str, Any]:
        """Scores the test split beside predictions that learn nothing of the input."""
        from . import steps

        return steps.score(run, trainer, trained, data)

    def describe(self, results: Mapping[str, Any]) -> Page:
        """See `Task.describe`."""
        from .describing import describe

        return describe(results)

    def dry_run(self, arguments: Sequence[Any], args: Any, hardware: Hardware) -> DryRun:
        """See `Task.dry_run`."""
        from .dry_run import make_dry_run

        return make_dry_run(arguments[0], args, hardware)
