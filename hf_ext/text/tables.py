"""Tables of text: aligned for a terminal, or as Markdown for a README."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import ArgumentError
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
        ArgumentError: there are no headers, or a row has another number of cells.
    """
    cells, right = _prepare(rows, headers)
    lines = [list(headers), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    texts = ["  ".join(_pad(*cell) for cell in zip(line, widths, right)).rstrip() for line in lines]
    return "\n".join([texts[0], "  ".join("-" * width for width in widths), *texts[1:]])


def format_markdown_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """Returns the same table as GitHub Markdown, its source aligned too; arguments and errors as in `format_table`."""
    cells, right = _prepare(rows, headers)
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (list(headers), *cells)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(headers))]
    rule = [("-" * (width - 1) + ":") if is_right else "-" * width for width, is_right in zip(widths, right)]
    padded = [[_pad(*cell) for cell in zip(line, widths, right)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in [padded[0], rule, *padded[1:]])


def _prepare(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> tuple[list[list[str]], list[bool]]:
    """Turns cells into text, and says for each column whether it holds numbers only (and at least one)."""
    if not headers:
        raise ArgumentError("headers is empty: one header per column is needed.")
    for number, row in enumerate(rows):
        if len(row) != len(headers):
            raise ArgumentError(f"row {number} has {len(row)} cells for {len(headers)} headers; as many are needed.")
    cells = [[format_cell(value) for value in row] for row in rows]
    right = [is_numeric([line[column] for line in cells]) for column in range(len(headers))]
    return cells, right


def is_numeric(texts: Sequence[str]) -> bool:
    """Returns whether cells are numbers only, and at least one; "-" and empty cells do not count."""
    filled = [text for text in texts if text not in (MISSING, "")]
    return bool(filled) and all(text in ("nan", "inf", "-inf") or _NUMERIC_TEXT.fullmatch(text) for text in filled)


def _pad(text: str, width: int, right: bool) -> str:
    return text.rjust(width) if right else text.ljust(width)
