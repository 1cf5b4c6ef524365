"""What a comparison that is started again finds of the one before: finished runs are kept, unfinished ones run anew."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import psutil

from ..checkpoints.run_lock import find_other_run
from ..errors import ArgumentError
from ..files import write_text
from .costs import Cost

MAX_HASHED_BYTES = 2**20  # larger files, which are data, are known by size and time


def find_finished(folder: Path, command: Sequence[str]) -> Cost | None:
    """Returns the cost of a run that ended well in `folder`, or makes `folder` new and empty for one to begin.

    Beside the folder stands `<folder>.run.json`: the command, what its files held, and how long it took. The code that
    the command runs is not part of it.

    Raises:
        ArgumentError: what is in the folder came from another command, or a comparison that writes there still runs.
    """
    record = _record_of(folder)
    found = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else None
    if found and found["seconds"] is None and _is_another_at_work(found["owner"]):
        raise ArgumentError(f"{folder}: process {found['owner']['pid']} is writing there: wait for it, or end it.")
    if folder.exists():
        if found is None or found["run"] != _describe(command):
            raise ArgumentError(
                f"{folder} is there already, from another command or other files: choose another --output_dir, or "
                "remove it."
            )
        if found["seconds"] is not None:
            return Cost(*(found.get(one.name) for one in fields(Cost)))
        if (other := find_other_run(folder)) is not None:  # a comparison that was killed leaves its child at work
            raise ArgumentError(f"{other} (Left at work by a comparison that was killed.)")
        shutil.rmtree(folder)  # killed half-way: what it measured is no run
    folder.mkdir(parents=True)
    _write(record, command, {"seconds": None})
    return None


def mark_finished(folder: Path, command: Sequence[str], cost: Cost) -> None:
    """Says that the run in `folder` ended well, and what it cost."""
    _write(_record_of(folder), command, asdict(cost))


def _record_of(folder: Path) -> Path:
    return Path(f"{folder}.run.json")


def _write(record: Path, command: Sequence[str], cost: dict[str, Any]) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "began": psutil.Process().create_time()}
    content = {"run": _describe(command), **cost, "owner": owner}
    write_text(record, json.dumps(content, indent=1) + "\n")


def _is_another_at_work(owner: dict[str, Any]) -> bool:
    """Whether the process that wrote a record still runs, here, and is not this one."""
    try:
        began = psutil.Process(owner["pid"]).create_time()
    except psutil.NoSuchProcess:
        return False
    return owner["host"] == socket.gethostname() and owner["pid"] != os.getpid() and abs(began - owner["began"]) < 2


def _describe(command: Sequence[str]) -> dict[str, Any]:
    """The command, and what the files among its words hold: a YAML that was edited makes another run."""
    files = {word: _fingerprint(Path(word)) for word in command[1:] if len(word) < 1024 and Path(word).is_file()}
    return {"command": [*command], "files": files}


def _fingerprint(path: Path) -> str:
    status = path.stat()
    if status.st_size > MAX_HASHED_BYTES:
        return f"{status.st_size} bytes, {status.st_mtime_ns}"
    return hashlib.sha256(path.read_bytes()).hexdigest()
