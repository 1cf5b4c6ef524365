"""A report as one HTML page: no script, no request, colours that follow the reader's light or dark mode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files

from jinja2 import Environment
from markupsafe import Markup

from ..tables import is_numeric
from ..units import NOT_MEASURED, number
from .blocks import Block, Code, Figure, Report, Table

_INTERVAL = re.compile(r"(\S+) (\[\S+, \S+\])")  # a score's text


def render_html(report: Report) -> str:
    """The page. Everything that a run wrote is escaped; only the drawings and the style are taken as they are."""
    templates = files(__package__) / "templates"
    environment = Environment(autoescape=True, trim_blocks=False)
    environment.filters.update(cell=_cell, classes=_classes, figures_together=figures_together)
    page = environment.from_string((templates / "report.html").read_text(encoding="utf-8"))
    style = (templates / "report.css").read_text(encoding="utf-8")
    return page.render(report=report, style=style) + "\n"


def figures_together(blocks: Sequence[Block]) -> list[list[Block]]:
    """Blocks in groups of one, but figures that follow each other in one group: they may stand side by side."""
    groups: list[list[Block]] = []
    for block in blocks:
        if groups and isinstance(block, Figure) and isinstance(groups[-1][-1], Figure):
            groups[-1].append(block)
        else:
            groups.append([block])
    return groups


def _cell(value: object) -> str:
    if isinstance(value, Code):
        return Markup("<code>{}</code>").format(str(value))
    text = number(value)
    found = _INTERVAL.fullmatch(text)
    return Markup('{} <span class="interval">{}</span>').format(*found.groups()) if found else text


def _classes(table: Table, column: int) -> Markup:
    names = ["num"] * _is_right(table, column) + ["main"] * (table.headers[column] == table.highlight)
    return Markup(' class="{}"').format(" ".join(names)) if names else Markup()


def _is_right(table: Table, column: int) -> bool:
    """Whether a column is one of numbers, and stands to the right."""
    texts = [number(row[column]) for row in table.rows]
    return column > 0 and is_numeric([text.split(" [")[0] for text in texts if text not in (NOT_MEASURED, "undefined")])
