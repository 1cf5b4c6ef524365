"""What a run recorded, as text that may be shared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_ABSOLUTE_PATH = re.compile(r"(?<![\w./:~])(?:~|/|[A-Za-z]:[\\/])[^\s'\",;:\]]*[\\/]([^\\/\s'\",;:\]]+)")


def hide_folders(text: str) -> str:
    """Keeps the last part of absolute paths: a report may be shared, and folders name people and machines.

    Relative paths, URLs and Hub ids stay as they are.
    """
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def setting(value: Any) -> str:
    """The value of an argument on one line, without folders."""
    text = value if isinstance(value, str) else repr(value)
    return hide_folders(" ".join(text.split()))


def as_dict(value: Any) -> dict[str, Any]:
    """The value where it is a dictionary; an empty one where a run left nothing."""
    return dict(value) if isinstance(value, Mapping) else {}
