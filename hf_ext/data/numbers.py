"""Numbers in text: ASCII digits, a point, an exponent; nothing else that Python would take for one."""

from __future__ import annotations

import re

NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"  # linear: no digit can be matched in two places

_NUMBER = re.compile(NUMBER).fullmatch
_NOT_ZERO = re.compile(r"[+-]?[0.]*[1-9]").match


def parse_number(text: str) -> float | None:
    """Returns the number that `text` spells; None where it is none, or is not 0 but would be read as 0.

    Python's `float` also takes digits of every script, underscores, "nan" and "infinity", and reads 1e-400 as 0.0.
    Too large a number is infinite, as in Python; surrounding white space is no part of a number.
    """
    if not _NUMBER(text):
        return None
    value = float(text)
    return None if value == 0 and _NOT_ZERO(text) else value
