"""A report as Markdown, as GitHub and the Hub show it: the same words and tables, images where the run drew them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..tables import format_markdown_table
from .blocks import Block, Bullets, Code, Command, Figure, Fold, Paragraph, Report, Table
from .values import number


def render_markdown(report: Report) -> str:
    """The report as text. What a run wrote can start no heading, link, image or HTML."""
    lines = [f"# {_plain(report.title)}", f"**{_plain(report.verdict)}**"]
    if report.alarms:
        lines.append("\n".join(f"- **ALARM** {_plain(alarm)}" for alarm in report.alarms))
    lines.append(_line(report.subtitle))
    rows = [[entry.label, entry.value, entry.note] for entry in report.key_numbers]
    lines.append(_table(Table(["", "value", "note"], rows)))
    for section in report.sections:
        lines.append(f"## {_plain(section.title)}")
        lines += _blocks(section.blocks)
    return "\n\n".join([*(line for line in lines if line), _line(report.footer)]) + "\n"


def _blocks(blocks: Sequence[Block]) -> list[str]:
    return [text for block in blocks for text in _block(block)]


def _block(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        return [_line(block.text)]
    if isinstance(block, Bullets):
        return ["\n".join(f"- {_line(item)}" for item in block.items)]
    if isinstance(block, Command):
        return [f"````\n{block.text.replace('````', '')}\n````"]
    if isinstance(block, Figure):
        return [f"![{_plain(block.caption)}]({block.png})"] if block.png else []
    if isinstance(block, Fold):
        return [f"<details><summary>{_plain(block.summary)}</summary>", *_blocks(block.blocks), "</details>"]
    return [_line(block.caption), _table(block)] if block.caption else [_table(block)]


def _table(table: Table) -> str:
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    return format_markdown_table(rows, [_plain(header) for header in table.headers])


def _cell(value: object) -> str:
    if isinstance(value, Code):
        text = " ".join(value.split())
        fence = "`" * (max((len(run) for run in re.findall("`+", text)), default=0) + 1)
        room = " " if text.startswith("`") or text.endswith("`") else ""
        return f"{fence}{room}{text}{room}{fence}" if text else ""
    return _plain(number(value))


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, nothing in it is markup."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = re.sub(r"([`*])", r"\\\1", text).replace("](", "]\\(").replace("][", "]\\[")
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def _line(text: str) -> str:
    """`_plain` at the start of a line, where more characters begin headings, lists and quotes."""
    text = re.sub(r"^([#>+=~|-])", r"\\\1", _plain(text))
    return re.sub(r"^(\d+)([.)] )", r"\1\\\2", text)
