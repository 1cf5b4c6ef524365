"""What stands beside checkpoints in a folder: half-written, half-deleted and set aside, and what the next run does."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...disk import used_bytes
from ..format.stored import is_folder, read_stored, verify
from ..run_folder.folder_lock import find_other_run

_NAME = re.compile(r"(\.staging|\.trash|damaged|previous)-checkpoint-(0|[1-9][0-9]*)(-[0-9]+)?")


@dataclass(frozen=True)
class Remains:
    """A folder that a run left beside its checkpoints.

    Attributes:
        fate: what it is, and what the next run does with it.
        commits_step: the step as whose checkpoint the next run commits it; None where it does not.
    """

    name: str
    num_bytes: int
    fate: str
    commits_step: int | None = None


def find_remains(folder: Path) -> tuple[Remains, ...]:
    """Everything of that kind in `folder`, by name. Cost: reads staged checkpoints that have a manifest."""
    found = ((name, _NAME.fullmatch(name)) for name in sorted(os.listdir(folder)))
    return tuple(_describe(folder / name, parts[1], int(parts[2])) for name, parts in found if parts)


def _describe(path: Path, kind: str, step: int) -> Remains:
    is_whole = False
    if kind == ".staging":
        is_whole, fate = _describe_staging(path, step)
    elif kind == ".trash":
        is_known = read_stored(path, step) or (is_folder(path) and not any(path.iterdir()))
        fate = "its deletion was cut short; the next run finishes it" if is_known else "not of hf_ext; left alone"
    elif kind == "damaged":
        fate = "did not verify; kept until you delete it"
    else:
        fate = "of another run or branch; kept until you delete it"
    return Remains(path.name, used_bytes(path), fate, step if is_whole else None)


def _describe_staging(path: Path, step: int) -> tuple[bool, str]:
    """As `CheckpointStore.sweep` judges it."""
    if find_other_run(path.parent):
        return False, "a run that goes on now is writing it"
    is_free = not os.path.lexists(path.parent / f"checkpoint-{step}")
    if is_folder(path) and is_free and verify(path, step)[0]:
        return True, f"complete but for its name; the next run makes it checkpoint-{step}"
    return False, "not complete; the next run removes it"
