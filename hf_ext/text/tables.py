"""Tables of text: aligned for a terminal, or as Markdown for a README; and JSON that any program reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..files import StrPath, write_text
from .units import MISSING, format_cell

# A number, with a percent sign or an x at most: "12.3 %", "1.7x", "-4". An identifier such as "1A2Y" is text.
_NUMERIC_TEXT = re.compile(r"[+-]?[\d,]*\.?\d+([eE][+-]?\d+)?( ?[%x])?")


def format_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Returns a table with aligned columns, numbers to the right and text to the left.

    Args:
        rows: cells of any type; None prints as "-", floats with 3 decimals (2 in scientific notation below 0.001).
        headers: one per column.

    Returns:
        Lines joined by newlines, without one at the end: headers, a rule, the rows.

    Raises:
        ValueError: a row has another number of cells than there are headers.
    """
    head, *body = _align(rows, headers)[0]
    rule = ["-" * len(cell) for cell in head]
    return "\n".join("  ".join(line).rstrip() for line in (head, rule, *body))


def format_markdown_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Returns the same table as GitHub Markdown, its source aligned too; arguments and errors as in `format_table`."""
    (head, *body), sides = _align(rows, headers, is_markdown=True)
    rule = ["-" * (len(cell) - 1) + (":" if side == ">" else "-") for cell, side in zip(head, sides)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))


def _align(
    rows: Sequence[Sequence[object]], headers: Sequence[str], is_markdown: bool = False
) -> tuple[list[list[str]], list[str]]:
    """Returns headers and rows as cells of the width of their column, and the side where each column stands."""
    lines = [[*headers], *([format_cell(value) for value in row] for row in rows)]
    least = 3 if is_markdown else 0
    if is_markdown:
        lines = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    columns = [*zip(*lines, strict=True)]
    sides = [">" if is_numeric(cells) else "<" for _, *cells in columns]
    widths = [max(least, *map(len, cells)) for cells in columns]
    return [[f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths)] for line in lines], sides


def is_numeric(texts: Sequence[str]) -> bool:
    """Returns whether cells are numbers only, and at least one; "-" and empty cells do not count."""
    filled = [text for text in texts if text not in (MISSING, "")]
    return bool(filled) and all(text in ("nan", "inf", "-inf") or _NUMERIC_TEXT.fullmatch(text) for text in filled)


def write_json(path: StrPath, content: object) -> None:
    """Writes strict JSON, which has no NaN and no infinity: those become null. Errors: as `write_text`."""
    write_text(path, json.dumps(_strict(content), indent=2, default=str) + "\n")


def _strict(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
