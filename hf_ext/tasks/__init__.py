"""The tasks that hf_ext trains models for, each behind one interface."""

from typing import TYPE_CHECKING

from ..faces import offer

if TYPE_CHECKING:
    from .dry_run import (
        DryRun,
        Finding,
        MakeBatch,
        Part,
        RowLengths,
        Span,
        Stage,
        Step,
        read_lengths,
    )
    from .encoders import dry_run_encoder, with_adapters
    from .running import Run, check_scored, plots_if_possible, stock_arguments, with_absolute_path
    from .task import TASKS, USUAL, Task, find_task
else:
    __getattr__, __dir__, __all__ = offer(__name__)
