"""The run report: one page for a person who was not there, written from what a run left in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import show_text
from ...files import write_text
from .blocks import Report
from .html import render_html
from .markdown import render_markdown
from .run_files import RunFiles, read_run
from .running import cost_section, plan_section, reproduce_section
from .summary import collect_alarms, key_numbers, make_subtitle, read_verdict
from .task_sections import data_section, result_section
from .tasks import report_of
from .training import training_section

__all__ = ["write_report"]


def write_report(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes `report.html` and `report.md` into the folder of a finished run.

    The verdict comes first, then alarms, then the numbers to remember; then results, training, data, plan, costs, and
    how to reproduce the run. The page is one file: no script, no request, figures drawn into it. Only numbers that the
    run left are shown; what is absent says "not measured". Absolute paths are shortened to their last part.

    Args:
        folder: holds `all_results.json`; `plan.json`, `trainer_state.json`, `predictions.csv`, `loss.png` and
            `scatter.png` are used where they are.

    Returns:
        The paths of the page and of the Markdown.

    Raises:
        DataError: the folder holds no run, or one of these files is damaged.
        OSError: the folder cannot be written.

    Cost: two seconds, and a page of 100 kB, for 24,000 test rows.
    """
    run = read_run(folder)
    report = build_report(run)
    pages = (("report.html", render_html(report)), ("report.md", render_markdown(report)))
    html, markdown = (_write(run.folder / name, text) for name, text in pages)
    return html, markdown


def build_report(run: RunFiles) -> Report:
    """The report's content, before it is HTML or Markdown."""
    task = report_of(run)
    verdict, is_better = read_verdict(run)
    return Report(
        title=task.title(),
        subtitle=make_subtitle(run),
        verdict=verdict,
        is_better=is_better,
        alarms=collect_alarms(task),
        key_numbers=key_numbers(task),
        sections=[
            result_section(task),
            training_section(task),
            data_section(task),
            plan_section(run),
            cost_section(task),
            reproduce_section(run),
        ],
        footer="Written by hf_ext from the files of the run; every number is one of theirs.",
    )


def _write(path: Path, text: str) -> Path:
    write_text(path, show_text(text))
    return path
