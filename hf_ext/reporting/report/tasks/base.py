"""What a report asks of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..blocks import Block, KeyNumber
from ..data_card import table_blocks
from ..run_files import RunFiles
from ..values import hide_folders


class TaskReport(ABC):
    """What a report says of a run because of its task; the rest of the page is alike for all tasks.

    Where a run lacks what a method needs, the text says "not measured"; nothing is raised.
    """

    pads = True  # whether batches hold padding
    row_word = "sequences"  # what a rate per row counts

    def __init__(self, run: RunFiles):
        self.run = run

    @abstractmethod
    def title(self) -> str:
        """What the model does."""

    @abstractmethod
    def score_numbers(self) -> list[KeyNumber]:
        """The scores to remember, each beside what it has to beat."""

    @abstractmethod
    def result_blocks(self) -> list[Block]:
        """How good the model is, and compared with what."""

    def unit_word(self, unit: str) -> str:
        """What a rate is of: "residues", "tokens", or of rows their own word."""
        return self.row_word if unit == "sequences" else unit

    def alarms(self) -> list[str]:
        """What weighs more than predictions, training and data that alarm."""
        return []

    def start(self) -> str:
        """Which weights training began with: sentences that follow the model's size."""
        return ""

    def data_blocks(self) -> list[Block]:
        """What the model learned from, what was left out, and what of the test it had seen; nothing if not recorded."""
        return table_blocks(self.run)


def describe_start(run: RunFiles) -> str:
    """Of a model that began whole: its name and revision, or that its weights were random; nothing if not recorded."""
    if "model_name_or_path" not in run.settings:
        return ""
    name, revision = run.settings["model_name_or_path"], run.settings.get("model_revision")
    if not name:
        return " It began with random weights."
    return f" It began as {hide_folders(name)}{f', revision {revision}' if revision else ', not pinned'}."
