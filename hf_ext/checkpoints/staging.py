"""A checkpoint while it is being written: beside its final name, hashed while the next file is written."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..disk import follow_umask, remove_folder, sync
from ..errors import CheckpointError
from .manifest import MANIFEST, MANIFEST_DRAFT, Manifest, hash_file
from .stored import Stored

logger = logging.getLogger(__name__)

_NOT_LISTED = (MANIFEST, MANIFEST_DRAFT)


class Staging:
    """A folder that becomes `checkpoint-<step>` with `commit`, or nothing with `abandon`. See `CheckpointStore.stage`.

    Attributes:
        path: where to write the checkpoint's files, subfolders included; no links.
        step: optimizer steps done.
    """

    def __init__(self, path: Path, step: int, run_id: str, publish: Callable[[Path, int], Path]):
        self.path = path
        self.step = step
        self._run_id = run_id
        self._publish = publish
        self.is_open = True

    def commit(self, epoch: float, facts: dict[str, Any]) -> Stored:
        """Makes this the checkpoint of its step; when it returns, a power cut does not undo it.

        Args:
            epoch: epochs done, as in `TrainerState`.
            facts: JSON-able; what a resumed run should know.

        Raises:
            OSError: hashing, syncing or renaming failed; `abandon` then, the checkpoints that stand are untouched.
            CheckpointError: a link, or a pinned checkpoint of the same step.
        """
        names = sorted(list_contents(self.path))
        for name in names:
            follow_umask(self.path / name)
        # Four, so that two large files, weights and optimizer, are hashed while files wait for the disk.
        with ThreadPoolExecutor(4, thread_name_prefix="checkpoint-hash") as pool:
            synced = pool.map(sync, [self.path / name for name in names])
            files = dict(zip(names, pool.map(hash_file, [self.path / name for name in names])))
            list(synced)  # raises what a sync raised
        for folder in {self.path / Path(name).parent for name in names} - {self.path}:
            sync(folder)
        manifest = Manifest(self._run_id, self.step, float(epoch), facts, files)
        manifest.write(self.path)
        target = self._publish(self.path, self.step)
        self.is_open = False
        return Stored(target, Manifest.read(target))

    def abandon(self) -> None:
        """Removes what was written; does nothing after `commit`. What cannot be removed is warned of."""
        self.is_open = False
        try:
            remove_folder(self.path)
            with suppress(OSError):  # another one is in it
                self.path.parent.rmdir()
        except OSError as error:
            logger.warning("%s could not be removed: %s. The next start removes it.", self.path, error.strerror)


def list_contents(folder: Path, skips_links: bool = False) -> dict[str, os.stat_result]:
    """Files below `folder` by relative name, without what this package itself writes there.

    Raises:
        CheckpointError: there are links or devices, unless `skips_links`.
    """
    found = {}
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(place) / name
            relative = path.relative_to(folder).as_posix()
            try:
                status = path.lstat()
            except FileNotFoundError:  # a temporary file of another process, renamed meanwhile
                continue
            if relative in _NOT_LISTED or stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                if skips_links:
                    continue
                raise CheckpointError(f"{path}: a checkpoint holds files and folders only, no links or devices.")
            found[relative] = status
    return found
