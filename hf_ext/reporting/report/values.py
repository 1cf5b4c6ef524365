"""Numbers as a reader wants them: sensible digits, units, intervals, and words where there is no number."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from ..tables import format_cell

NOT_MEASURED = "not measured"
_ABSOLUTE_PATH = re.compile(r"(?<![\w./:~])(?:~|/|[A-Za-z]:[\\/])[^\s'\",;:\]]*[\\/]([^\\/\s'\",;:\]]+)")


def number(value: Any, unit: str = "") -> str:
    """26,000; 30; 0.819; 1.20e-05; yes; text as it is; "not measured" for None. `unit` follows numbers only."""
    if value is None:
        return NOT_MEASURED
    whole = isinstance(value, float) and value.is_integer() and abs(value) < 1e9
    text = format_cell(int(value) if whole else value)
    return f"{text} {unit}" if unit and is_finite(value) else text


def seconds(value: Any) -> str:
    """0.34 s; 34.2 s; 12 min 30 s; 3 h 12 min; 2 d 4 h."""
    if not is_finite(value):
        return NOT_MEASURED
    if value < 60:
        return f"{value:.3g} s"
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size:
            rest = int(value % size // smaller_size)
            return f"{int(value // size)} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(value)


def share(value: Any) -> str:
    """12.3 %."""
    return f"{100 * value:.3g} %" if is_finite(value) else NOT_MEASURED


def gib(value: Any) -> str:
    """1.25 GiB."""
    return f"{value:.3g} GiB" if is_finite(value) else NOT_MEASURED


def rate(value: Any, unit: str) -> str:
    """187,770 residues / s."""
    return f"{value:,.0f} {unit} / s" if is_finite(value) and value >= 100 else number(value, f"{unit} / s")


def dollars(value: Any) -> str:
    """$12.40; below a cent two digits that say something."""
    if not is_finite(value):
        return NOT_MEASURED
    return f"${value:,.2f}" if value >= 0.01 or value == 0 else f"${value:.2g}"


def score(entry: Mapping[str, Any] | None) -> str:
    """A score with its interval: 0.877 [0.850, 0.901]; "undefined" where it has no value."""
    if not entry:
        return NOT_MEASURED
    if not is_finite(entry.get("value")):
        return "undefined"
    numbers = [float(entry[key]) for key in ("value", "low", "high") if is_finite(entry.get(key))]
    # One number of digits for all three: an R2 of -0.0009 [-0.019, 0] is read at a glance.
    small = max(map(abs, numbers)) < 0.001
    value, *interval = [
        format_cell(end) if small or abs(end) >= 1000 else f"{round(end, 3) + 0.0:.3f}" for end in numbers
    ]
    return f"{value} [{', '.join(interval)}]" if len(interval) == 2 else value


def capitalize(text: str) -> str:
    """The first letter only: what follows may be the name of a column."""
    return text[:1].upper() + text[1:]


def shorten_paths(text: str) -> str:
    """Keep the last part of absolute paths: a report may be shared, and folders name people and machines.

    Relative paths, URLs and Hub ids stay as they are.
    """
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def setting(value: Any) -> str:
    """The value of an argument on one line, absolute paths shortened."""
    text = value if isinstance(value, str) else repr(value)
    return shorten_paths(" ".join(text.split()))


def of_last_session(results: Mapping[str, Any]) -> str:
    """What to add to the name of a number that Trainer measures anew after a resume."""
    sessions = as_dict(results.get("costs")).get("num_sessions")
    return " of the last session" if is_finite(sessions) and sessions > 1 else ""


def as_dict(value: Any) -> dict[str, Any]:
    """The value where it is a dictionary; an empty one where a run left nothing."""
    return dict(value) if isinstance(value, Mapping) else {}


def is_finite(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number; booleans are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
