"""What a report says of each task: a module per task, and `report_of`, which chooses."""

from __future__ import annotations

from ..run_files import RunFiles
from .affinity import AffinityReport
from .any_model import AnyModelReport
from .base import TaskReport
from .generation import GenerationReport
from .masked_lm import MaskedLMReport
from .pde_operator import OperatorReport

_REPORTS: dict[str, type[TaskReport]] = {
    "affinity": AffinityReport,
    "masked_lm": MaskedLMReport,
    "generation": GenerationReport,
    "pde_operator": OperatorReport,
    "any_model": AnyModelReport,
}


def report_of(run: RunFiles) -> TaskReport:
    """By the task that the run recorded."""
    return _REPORTS[run.task](run)
