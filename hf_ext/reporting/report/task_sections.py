"""The two sections that a task writes: its result, with what the run advises, and its data."""

from __future__ import annotations

from ..requirements import HEADERS, required_rows
from .blocks import Bullets, Fold, Paragraph, Section, Table
from .tasks import TaskReport
from .values import hide_folders


def result_section(task: TaskReport) -> Section:
    """How good the model is, and compared with what."""
    blocks = task.result_blocks()
    if checked := task.run.results.get("requirements"):
        blocks.append(Table(HEADERS, required_rows(checked), "Required of the final scores (--require)."))
    advice = [hide_folders(str(line)) for line in task.run.results.get("advice") or []]
    if advice:
        blocks.append(Fold("What the run suggests next", [Bullets(advice)]))
    return Section("result", "Result", blocks)


def data_section(task: TaskReport) -> Section:
    """What the model learned from."""
    blocks = task.data_blocks() or [Paragraph("Not recorded: the run has no data report.")]
    return Section("data", "Data", blocks)
