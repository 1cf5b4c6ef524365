"""What a model card says of each task: a module per task, and `card_of`, which chooses."""

from __future__ import annotations

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
    """By the task that the run recorded."""
    return _CARDS[run.task](run)
