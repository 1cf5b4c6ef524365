"""What a model card says of each task: a module per task, and `card_of`, which chooses."""

from __future__ import annotations

from ....errors import DataError
from ...report.run_files import RunFiles
from .affinity import AffinityCard
from .base import TaskCard
from .generation import GenerationCard
from .masked_lm import MaskedLMCard
from .pde_operator import OperatorCard

_CARDS: dict[str, type[TaskCard]] = {
    "affinity": AffinityCard,
    "masked_lm": MaskedLMCard,
    "generation": GenerationCard,
    "pde_operator": OperatorCard,
}


def card_of(run: RunFiles) -> TaskCard:
    """By the task that the run recorded.

    Raises:
        DataError: it has reports and no cards.
    """
    if run.task not in _CARDS:
        raise DataError(f"{run.folder}: runs of task {run.task!r} have a report and no model card. Write one by hand.")
    return _CARDS[run.task](run)
