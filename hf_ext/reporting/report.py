"""Write the report and the model card of a finished run anew: report.html and README.md in its folder.

    hf-ext report --run outputs/affinity
    hf-ext report --run outputs/affinity outputs/mlm    # several runs

Reads what the run left there (all_results.json, plan.json, trainer_state.json, predictions.csv) and nothing else: no
model, no data, no network. A README.md that hf_ext did not write stays, and the card is README.hf_ext.md then. Exit
status: 0, or 1 where a folder holds no finished run.
"""

from __future__ import annotations

import argparse
import os
import re
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from ..errors import show_text
from ..files import write_text
from .card import write_card
from .names import hide_folders
from .page import Table
from .run_files import read_run
from .sections import compose
from .tables import is_numeric
from .units import NOT_MEASURED, number

_INTERVAL = re.compile(r"(\S+) (\[\S+, \S+\])")  # a score's text


def write_report(folder: str | os.PathLike[str]) -> Path:
    """Writes `report.html` into the folder of a finished run.

    The verdict comes first, then alarms, then the numbers to remember; then results, limits, model, data, training,
    plan, costs, and how to repeat the run. The page is one file: no script, no request, figures drawn into it. Only
    numbers that the run left are shown. Absolute paths are shortened to their last part.

    Args:
        folder: holds `all_results.json`; `plan.json`, `trainer_state.json` and `predictions.csv` are used where they
            are.

    Returns:
        The path of the page.

    Raises:
        DataError: the folder holds no run, or one of these files is damaged.
        OSError: the folder cannot be written.

    Cost: two seconds, and a page of 100 kB, for 24,000 test rows.
    """
    run = read_run(folder)
    environment = Environment(autoescape=True)
    environment.filters.update(text=hide_folders, cell=_cell, classes=_classes)
    template = environment.from_string((files(__package__) / "templates/report.html").read_text(encoding="utf-8"))
    path = run.folder / "report.html"
    write_text(path, show_text(template.render(contents=compose(run)) + "\n"))
    return path


def _cell(value: object) -> str:
    text = hide_folders(number(value))
    found = _INTERVAL.fullmatch(text)
    return Markup('{} <span class="interval">{}</span>').format(*found.groups()) if found else text


def _classes(table: Table, column: int) -> Markup:
    """Columns of numbers stand to the right; the column of the model is the one that matters most."""
    texts = [number(row[column]) for row in table.rows]
    scores = [text.split(" [")[0] for text in texts if text not in (NOT_MEASURED, "undefined")]
    is_right, is_main = column > 0 and is_numeric(scores), table.headers[column] == "model"
    names = ["num"] * is_right + ["main"] * is_main
    return Markup(' class="{}"').format(" ".join(names)) if names else Markup()


def main(argv: list[str] | None = None) -> list[Path]:
    """Runs the recipe; returns the files that it wrote."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--run", nargs="+", required=True, metavar="FOLDER", help="Output folders of finished runs.")
    args = parser.parse_args(argv)
    written: list[Path] = []
    for folder in args.run:
        written += [write_report(folder), write_card(folder)]
    for path in written:
        print(show_text(f"Wrote {path}"))
    return written
