"""Text of a run in Markdown: shown as it is, whatever it holds; it starts no heading, link, image, code or HTML."""

from __future__ import annotations

import re


def plain(text: object) -> str:
    """Text that Markdown shows as it is: on one line, nothing in it is markup."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace("\\", "\\\\")
    text = re.sub(r"([`*])", r"\\\1", text).replace("](", "]\\(").replace("][", "]\\[")
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def plain_line(text: object) -> str:
    """`plain` at the start of a line, where more characters begin headings, lists, quotes and link targets."""
    line = re.sub(r"^([#>+=~|-])", r"\\\1", plain(text))
    line = re.sub(r"^\[(?=[^]]*\]:)", r"\\[", line)
    return re.sub(r"^(\d+)([.)] )", r"\1\\\2", line)


def code(text: object) -> str:
    """A code span: a name or a value, on one line; nothing for no text."""
    text = " ".join(str(text).split())
    fence = _fence(text, 1)
    room = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{room}{text}{room}{fence}" if text else ""


def code_block(text: str, language: str = "") -> str:
    """A block of code, which only its own end can close."""
    fence = _fence(text, 3)
    return f"{fence}{language}\n{text}\n{fence}"


def _fence(text: str, shortest: int) -> str:
    return "`" * max(shortest, max((len(run) + 1 for run in re.findall("`+", text)), default=0))
