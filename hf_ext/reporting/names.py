"""What pages that strangers read may name: ids of the Hub, last parts of local paths, no tokens."""

from __future__ import annotations

import re
import shlex
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

_ABSOLUTE_PATH = re.compile(r"(?<![\w./:~])(?:~|/|[A-Za-z]:[\\/])[^\s'\",;:\]]*[\\/]([^\\/\s'\",;:\]]+)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DATA_FILE = re.compile(r"\.(csv|tsv|jsonl?|parquet|fa|faa|fasta|gz|txt|yaml)$")
# Arguments that hold a local path, whatever it looks like.
_PATHS = re.compile(r"(.*_(dir|from|json|file|path|checkpoint)|config)")


def hide_folders(text: str) -> str:
    """Keeps the last part of absolute paths: a page may be shared, and folders name people and machines.

    Relative paths, URLs and Hub ids stay as they are.
    """
    return _ABSOLUTE_PATH.sub(r".../\1", text)


def is_hub_id(name: Any, revision: Any = None) -> bool:
    """Whether `name` is OWNER/NAME on the Hub and not a file or folder here. A commit beside it proves the Hub."""
    if not isinstance(name, str) or not name:
        return False
    if isinstance(revision, str) and _COMMIT.fullmatch(revision):
        return True
    # A relative path counts from where the run was started, which is where its card is written.
    return bool(_HUB_ID.fullmatch(name)) and not _DATA_FILE.search(name) and not Path(name).exists()


def last_part(path: str) -> str:
    """The last part of a path, of this system or of Windows."""
    return PureWindowsPath(path).name if "\\" in path else PurePath(path).name or path


def show_source(name: Any, revision: Any = None) -> str:
    """A Hub id with its revision, of anything local the last part of its path."""
    if not is_hub_id(name, revision):
        return f"{last_part(str(name))} (local)"
    return f"{name}, revision {revision[:12]}" if revision else f"{name}, not pinned"


def show_argument(name: str, value: Any) -> str:
    """An argument's value on one line; of local paths the last part."""
    if isinstance(value, list | tuple):
        return " ".join(show_argument(name, item) for item in value) or "(none)"
    if not isinstance(value, str):
        return hide_folders(repr(value))
    looks_local = value.startswith(("/", "~", "./", "../", ".\\")) or "\\" in value or value[1:3] == ":/"
    is_local = bool(_PATHS.fullmatch(name)) and not is_hub_id(value)
    is_file = "/" in value and bool(_DATA_FILE.search(value))
    return last_part(value) if looks_local or is_local or is_file else hide_folders(" ".join(value.split()))


def show_command(command: str) -> str:
    """A command line with the last parts of local paths."""
    shown: list[str] = []
    flag = ""
    for word in shlex.split(command):
        if word.startswith("--"):
            flag, joined, value = word.partition("=")
            word = f"{flag}={show_argument(flag[2:], value)}" if joined else word
        elif flag:
            word = show_argument(flag[2:], word)
        shown.append(word)
    return shlex.join(shown)
