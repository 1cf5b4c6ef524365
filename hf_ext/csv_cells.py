"""Text cells of CSV files that people open in a spreadsheet, which runs a text that begins like a formula."""

from __future__ import annotations

import re
from typing import Any

# As OWASP lists them for CSV injection: what begins a formula, also in full width, and white space that is skipped.
_FORMULA = re.compile("'*[=+\\-@\\t\\r\\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?").fullmatch


def write_cell(value: Any) -> Any:
    """Returns `value` as it belongs into a CSV: text that a spreadsheet would take for a formula gets a `'` in front.

    Numbers, also in text (`-1.5`), and all other text stay as they are. `read_cell` undoes it exactly.
    """
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER(value) else value


def read_cell(text: str) -> str:
    """Returns the text that `write_cell` wrote as `text`."""
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text
