"""Pinned copies: what is uploaded stays as it is, whatever rotation and the run do to the folder it came from."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

PREFIX = ".push-"
_MARKER = ".pushed.json"  # who made the copy, and of which folder
_FILES = "files"


def pin_files(files: Mapping[str, Path], place: Path, owner: str) -> Path:
    """Makes a copy of some files in a new folder of `place`; returns the folder that holds them. `unpin` removes it.

    Args:
        files: name in the copy -> file. Weights are hard links where the disk can; all else is copied.
        place: on the disk of the files, since hard links do not cross disks.
        owner: name of the folder whose copy this is; what a dead process left of it is removed first.

    Raises:
        OSError: the disk is full or not writable, or a file is gone; nothing is left behind.
    """
    sweep_pins(place, owner)
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    try:
        (scratch / _MARKER).write_text(json.dumps({"owner": owner, "pid": os.getpid()}))
        for name, source in files.items():
            target = scratch / _FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # A link survives deletion but not rewriting, so the small files, which a run rewrites, are copied.
            if not (name.endswith(".safetensors") and _link(source, target)):
                shutil.copyfile(source, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return scratch / _FILES


def unpin(pinned: Path) -> None:
    """Removes what `pin_files` made. What the disk refuses is left to the next push of the same folder."""
    shutil.rmtree(pinned.parent, ignore_errors=True)


@contextmanager
def pinned_files(files: Mapping[str, Path], place: Path, owner: str) -> Iterator[Path]:
    """`pin_files` for the time of a `with` block."""
    pinned = pin_files(files, place, owner)
    try:
        yield pinned
    finally:
        unpin(pinned)


def sweep_pins(place: Path, owner: str) -> None:
    """Removes from `place` the copies that a killed process left; never those of a process that is alive.

    Of another machine's processes, which cannot be asked, copies of the folder `owner` count as left: a run moves
    between machines, and two of them cannot share a folder.
    """
    for pin in place.glob(f"{PREFIX}*"):
        if _is_left(pin, owner):
            shutil.rmtree(pin, ignore_errors=True)


def _is_left(pin: Path, owner: str) -> bool:
    try:
        maker = json.loads((pin / _MARKER).read_text())
        return bool(maker["owner"] == owner) and not psutil.pid_exists(maker["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not ours, or being made at this moment


def _link(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # FAT, many network folders and some containers have no hard links
        return False
    return True
