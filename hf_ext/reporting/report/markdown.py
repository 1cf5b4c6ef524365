"""A report as Markdown, as GitHub and the Hub show it: the same words and tables, images where the run drew them."""

from __future__ import annotations

from collections.abc import Sequence

from ..markdown import code, code_block, plain, plain_line
from ..tables import format_markdown_table
from ..units import number
from .blocks import Block, Bullets, Code, Command, Figure, Fold, Paragraph, Report, Table


def render_markdown(report: Report) -> str:
    """The report as text. What a run wrote can start no heading, link, image or HTML."""
    lines = [f"# {plain(report.title)}", f"**{plain(report.verdict)}**"]
    if report.alarms:
        lines.append("\n".join(f"- **ALARM** {plain(alarm)}" for alarm in report.alarms))
    lines.append(plain_line(report.subtitle))
    rows = [[entry.label, entry.value, entry.note] for entry in report.key_numbers]
    lines.append(render_table(Table(["", "value", "note"], rows)))
    for section in report.sections:
        lines.append(f"## {plain(section.title)}")
        lines += _blocks(section.blocks)
    return "\n\n".join([*(line for line in lines if line), plain_line(report.footer)]) + "\n"


def _blocks(blocks: Sequence[Block]) -> list[str]:
    return [text for block in blocks for text in _block(block)]


def _block(block: Block) -> list[str]:
    if isinstance(block, Paragraph):
        return [plain_line(block.text)]
    if isinstance(block, Bullets):
        return ["\n".join(f"- {plain_line(item)}" for item in block.items)]
    if isinstance(block, Command):
        return [code_block(block.text)]
    if isinstance(block, Figure):
        return [f"![{plain(block.chart.caption)}]({block.png})"] if block.png else []
    if isinstance(block, Fold):
        return [f"<details><summary>{plain(block.summary)}</summary>", *_blocks(block.blocks), "</details>"]
    return [plain_line(block.caption), render_table(block)] if block.caption else [render_table(block)]


def render_table(table: Table) -> str:
    """A table without its caption."""
    rows = [[_cell(cell) for cell in row] for row in table.rows]
    return format_markdown_table(rows, [plain(header) for header in table.headers])


def _cell(value: object) -> str:
    return code(value) if isinstance(value, Code) else plain(number(value))
