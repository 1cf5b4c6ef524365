"""What others write into a checkpoint that has its name: a user's `_save_checkpoint`, a callback's `on_save`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from ..disk import sync
from .manifest import hash_file
from .staging import list_contents
from .stored import Stored
from .weights import TRAINABLE

# Where a resumed run looks first: what others put there stays unlisted, and is refused or not read.
_RESERVED = frozenset({TRAINABLE, "optimizer.pt", "scheduler.pt", "trainer_state.json"})

logger = logging.getLogger(__name__)

Look = dict[str, tuple[int, int, int]]


def look(folder: Path) -> Look:
    """Size, time and inode of each file, by which `add_files` knows those that were written since."""
    return {name: (s.st_size, s.st_mtime_ns, s.st_ino) for name, s in list_contents(folder, skips_links=True).items()}


def add_files(stored: Stored, before: Look) -> Stored:
    """Puts files that were written since `before`, new or over old ones, into the manifest; and new ones of before.

    Links are left alone: a checkpoint vouches for bytes. Cost: a stat per file; what was written is hashed and synced.

    Raises:
        OSError: the disk refuses; the manifest is as it was.
    """
    known, now = stored.manifest.files, look(stored.path)
    written = [name for name in sorted(now) if now[name] != before.get(name) or name not in known]
    written = [name for name in written if name not in _RESERVED]
    if not written:
        return stored
    for name in written:
        sync(stored.path / name)
    for folder in {(stored.path / name).parent for name in written}:
        sync(folder)
    files = {**known, **{name: hash_file(stored.path / name) for name in written}}
    manifest = dataclasses.replace(stored.manifest, files=dict(sorted(files.items())))
    manifest.write(stored.path)
    changed = [name for name in written if name in known]
    logger.info("%s: %s of others are part of it now.", stored.path, ", ".join(written))
    if changed:
        logger.warning("%s: %s were written over after the save.", stored.path, ", ".join(changed))
    return Stored(stored.path, manifest)
