"""The checkpoints of a folder: staged, committed by one rename, verified before use, deleted by their own run alone."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import stat
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError, FolderError
from ..files import Json, StrPath, follow_umask, remove, remove_folder, sync
from .manifest import (
    CHECKPOINT_NAME,
    MANIFEST,
    MANIFEST_DRAFT,
    PROGRESS,
    FileRecord,
    Manifest,
    Stored,
    hash_file,
    is_folder,
    is_ours,
    read_stored,
    verify,
)
from .run_lock import find_other_run
from .weights import TRAINABLE

STAGING = ".staging"  # folder
# Where a resumed run looks first: what others put there stays unlisted, and is refused or not read.
_RESERVED = frozenset({TRAINABLE, "optimizer.pt", "scheduler.pt", "trainer_state.json"})
_TRASH_NAME = re.compile(r"\.trash-checkpoint-(0|[1-9][0-9]*)(?:-[0-9]+)?")

logger = logging.getLogger(__name__)


class CheckpointStore:
    """Checkpoints `checkpoint-<step>` in one folder, for the main process of one run.

    A checkpoint is staged beside its place, hashed, synced and renamed, so that under its name it is whole or absent,
    whatever kills the process or the machine. Nothing is deleted but checkpoints with this run's manifest; what does
    not verify or stands in the way is renamed. Order is by step, never by file times.

    Args:
        folder: where the checkpoints are; created with the first one.
        run_id: identity of the run; a new one if None.

    Cost of a commit beyond writing: one hash and one fsync per file, four at a time.
    """

    empties_trash = False  # files are emptied before they are removed: a Drive keeps, and counts, what it removes

    def __init__(self, folder: StrPath, run_id: str | None = None):
        self.folder = Path(folder).absolute()
        self.run_id = run_id or uuid.uuid4().hex
        self._pins: Counter[int] = Counter()
        self._lock = threading.RLock()

    def adopt(self, run_id: str) -> None:
        """Goes on as the run `run_id`: its checkpoints are now this store's. For a resumed run, before it saves."""
        self.run_id = run_id

    # --- looking ----------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Returns where checkpoint `step` is, once it is committed."""
        return self.folder / f"checkpoint-{step}"

    def staging_path(self, step: int) -> Path:
        """Returns where checkpoint `step` is being written between `stage` and `commit`.

        For processes other than the main.
        """
        return self.folder / STAGING / f"checkpoint-{step}"

    def locate(self, step: int | None) -> Path | None:
        """Returns where checkpoint `step` stands; None where it stands nowhere."""
        return self.path(step) if step is not None and self.path(step).is_dir() else None

    def has(self, checkpoint: Path) -> bool:
        """Returns whether a checkpoint is in a folder of this run."""
        return checkpoint.resolve().parent == self.folder.resolve()

    def checkpoints(self) -> list[Stored]:
        """Lists this run's checkpoints by step, ascending. Files are not verified. Cost: reads the manifests."""
        found = (read_stored(path, step) for step, path in self._numbered(CHECKPOINT_NAME))
        return [stored for stored in found if stored and stored.run_id == self.run_id]

    def find_newest(self) -> Stored | None:
        """Finds the checkpoint of the highest step, of any run, whose manifest and every file verify; None without one.

        Newer ones of hf_ext that do not verify are set aside, with a warning each. Folders that hf_ext did not
        write are left alone, with one warning. Cost: reads the files of one checkpoint, more where that is damaged.
        """
        numbered = self._numbered(CHECKPOINT_NAME)
        foreign = [path for _, path in numbered if not is_folder(path) or not is_ours(path)]
        if foreign:
            logger.warning(
                "Not written by hf_ext, links, or not readable, and left alone: %s. To continue from one of them, name "
                "it: --resume_from_checkpoint PATH.",
                ", ".join(str(path) for path in foreign),
            )
        for step, path in reversed(numbered):
            if path in foreign:
                continue
            stored, problems = verify(path, step)
            if stored:
                return stored
            try:
                moved = self._rename(path, f"damaged-{path.name}")
                text = f"{path} does not verify and is now {moved.name}"
            except OSError as error:
                text = f"{path} is damaged and could not be renamed ({error})"
            logger.warning("%s:\n  %s", text, "\n  ".join(problems))
        return None

    def open(self, path: StrPath) -> Stored | None:
        """Opens a checkpoint named by the user; None for one of stock Trainer, which nothing can verify.

        Raises:
            CheckpointError: no such folder, or it does not verify; names every problem.
        """
        folder = Path(path).resolve()
        if not folder.is_dir():
            raise CheckpointError(
                f"{path}: expected a checkpoint folder, found {'a file' if folder.exists() else 'nothing'}."
            )
        if not is_ours(folder):
            return None
        numbered = CHECKPOINT_NAME.fullmatch(folder.name)  # the user may have renamed it
        stored, problems = verify(folder, int(numbered[1]) if numbered else None)
        if stored is None:
            raise CheckpointError(
                f"{path} does not verify; resume from another checkpoint:\n  "
                + "\n  ".join(problems)
                + f"\nDid you change it on purpose? Without its {MANIFEST} and {PROGRESS} it is read like a stock one."
            )
        return stored

    # --- writing ----------------------------------------------------------------------------------------------------

    def stage(self, step: int) -> Path:
        """Makes an empty folder to write checkpoint `step` into: files and folders, no links.

        Then `commit` or `abandon` it.

        Raises:
            FolderError: another process's run holds the folder.
            OSError: the folder cannot be made.
        """
        path = self.staging_path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        if other := find_other_run(self.folder):
            raise FolderError(other)
        path.parent.mkdir(exist_ok=True)
        _clear(path)
        path.mkdir()
        return path

    def commit(self, step: int, epoch: float, facts: Json) -> Stored:
        """Makes what was staged the checkpoint of its step; when it returns, a power cut does not undo it.

        Args:
            epoch: epochs done, as in `TrainerState`.
            facts: JSON-able; what a resumed run should know.

        Raises:
            OSError: hashing, syncing or renaming failed; `abandon` then, the checkpoints that stand are untouched.
            CheckpointError: there is a link.
        """
        staged = self.staging_path(step)
        names = sorted(_list_files(staged))
        # Four, so that two large files, weights and optimizer, are hashed while files wait for the disk.
        with ThreadPoolExecutor(4, thread_name_prefix="checkpoint-hash") as pool:
            files = dict(zip(names, pool.map(_seal, [staged / name for name in names])))
        for folder in {staged / Path(name).parent for name in names} - {staged}:
            sync(folder)
        manifest = Manifest(self.run_id, step, float(epoch), facts, files)
        manifest.write(staged)
        self.publish(step)
        return Stored(self.path(step), manifest)

    def publish(self, step: int) -> None:
        """Gives what was staged, its manifest included, the name of its checkpoint. Raises as `commit`.

        What stands there, where a run saves once, becomes `previous-checkpoint-<step>`.
        """
        path = self.path(step)
        if os.path.lexists(path):
            moved = self._rename(path, f"previous-{path.name}")
            logger.warning("%s was in the way of this run's checkpoint and is now %s.", path, moved.name)
        os.rename(self.staging_path(step), path)
        sync(self.folder)
        self._tidy_staging()

    def abandon(self, step: int) -> None:
        """Removes what was staged. What cannot be removed is warned of."""
        path = self.staging_path(step)
        try:
            remove_folder(path)
        except OSError as error:
            logger.warning("%s could not be removed: %s. The next start removes it.", path, error.strerror)
        self._tidy_staging()

    def take_in(self, step: int) -> None:
        """Makes what others wrote into this run's checkpoint `step` since its commit part of it.

        So a user's `_save_checkpoint`, or a callback's `on_save`. Links are left alone: a checkpoint vouches for bytes.
        Cost: all files are hashed and synced again.

        Raises:
            OSError: the disk refuses; the checkpoint is as it was committed.
        """
        with self._lock:
            stored = self._find(step)
            if stored is not None:
                known = stored.manifest.files
                names = sorted(_list_files(stored.path, skips_links=True))
                files = {name: _seal(stored.path / name) for name in names if name in known or name not in _RESERVED}
                dataclasses.replace(stored.manifest, files=files).write(stored.path)

    # --- copies, of which a store on one disk has none ----------------------------------------------------------------

    def begin_copies(self, best_step: int | None) -> None:
        """Begins copies after a save; see `MirroredStore`."""

    def finish_copies(self, best_step: int | None) -> str | None:
        """Finishes copies at the end of a run; returns what is not copied, and why, or None; see `MirroredStore`."""
        return None

    # --- moving out of the way --------------------------------------------------------------------------------------

    def set_aside_after(self, step: int) -> None:
        """Renames hf_ext's checkpoints above `step` to `previous-checkpoint-<step>`.

        For a run that starts, or resumes from an older checkpoint: it is another branch, and what is newer, also of
        other runs, would be taken for its newest.

        Raises:
            OSError: one cannot be renamed.
        """
        newer = [(n, path) for n, path in self._numbered(CHECKPOINT_NAME) if n > step and read_stored(path, n)]
        moved = [self._rename(path, f"previous-{path.name}") for _, path in newer]
        if moved:
            names = ", ".join(path.name for path in moved)
            begins = "begins anew" if step < 0 else f"goes on from step {step}"
            logger.warning("%s: this run %s; what was saved beyond is now %s.", self.folder, begins, names)

    # --- deleting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def pinned(self, step: int) -> Iterator[None]:
        """Pins a checkpoint while it is uploaded or copied: `delete` of it is refused."""
        with self._lock:
            self._pins[step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[step] -= 1

    def is_pinned(self, step: int) -> bool:
        """Returns whether checkpoint `step` is being uploaded or copied."""
        return self._pins[step] > 0

    def delete(self, step: int) -> bool:
        """Deletes this run's checkpoint `step`; False, and its room not free, where it is pinned or not this run's.

        Where the disk refuses, that is a warning and False; `sweep` tries again.
        """
        with self._lock:
            stored = self._find(step)
            if stored is None or self._pins[step]:
                return False
            try:
                trash = self._rename(stored.path, f".trash-{stored.path.name}")
            except OSError as error:
                logger.warning("%s could not be deleted: %s.", stored.path, error.strerror)
                return False
        return self._remove_trash(trash)

    def sweep(self) -> None:
        """Finishes what a killed process left half done; at start, before the first `stage`.

        A staged checkpoint that is complete is committed, any other is removed, unless another run holds the folder.
        Deletions go on. What the disk refuses is warned of.
        """
        kinds = (
            (self.folder / STAGING, CHECKPOINT_NAME, self._sweep_staged),
            (self.folder, _TRASH_NAME, self._sweep_trash),
        )
        for folder, pattern, clear in kinds:
            for step, path in self._numbered(pattern, folder):
                try:
                    clear(path, step)
                except OSError as error:
                    logger.warning("%s could not be cleared: %s.", path, error.strerror)
        self._tidy_staging()

    def _sweep_staged(self, path: Path, step: int) -> None:
        if find_other_run(self.folder):
            return
        # The manifest is written last, so with one the killed process had finished but for the rename.
        if is_folder(path) and not os.path.lexists(self.path(step)) and verify(path, step)[0]:
            os.rename(path, self.path(step))
            sync(self.folder)
            logger.info("%s was complete when its process was killed, and is now committed.", self.path(step))
        else:
            _clear(path)

    def _sweep_trash(self, trash: Path, step: int) -> None:
        # A deletion takes the manifest last: files without one were put there by someone else.
        if read_stored(trash, step) or (is_folder(trash) and not any(trash.iterdir())):
            self._remove_trash(trash)
        else:
            logger.warning("%s is not a deleted checkpoint of hf_ext and is left alone.", trash)

    def _remove_trash(self, trash: Path) -> bool:
        """Deletes a renamed checkpoint; False, with a warning, where the disk refuses."""
        try:
            for name in _list_files(trash, skips_links=True) if self.empties_trash else ():
                os.truncate(trash / name, 0)
            remove_folder(trash, last=MANIFEST)
        except OSError as error:
            logger.warning("%s could not be deleted: %s. The next start tries again.", trash, error.strerror)
            return False
        return True

    # --- folders ----------------------------------------------------------------------------------------------------

    def _tidy_staging(self) -> None:
        with suppress(OSError):  # another checkpoint is in it, or it is not there
            (self.folder / STAGING).rmdir()

    def _numbered(self, pattern: re.Pattern[str], folder: Path | None = None) -> list[tuple[int, Path]]:
        """Lists what in a folder, the store's own for None, has a name of this form, as (step, path), by step."""
        folder = folder or self.folder
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted((int(found[1]), folder / name) for name in names if (found := pattern.fullmatch(name)))

    def _find(self, step: int) -> Stored | None:
        stored = read_stored(self.path(step), step)
        return stored if stored and stored.run_id == self.run_id else None

    def _rename(self, path: Path, name: str) -> Path:
        """Gives `path` that name, or, where it is taken, the name with -2, -3, ... behind; waits for the disk."""
        names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
        target = next(path.parent / name for name in names if not os.path.lexists(path.parent / name))
        os.rename(path, target)
        sync(path.parent)
        return target


def _seal(path: Path) -> FileRecord:
    """Waits until a file is on the disk, and hashes it."""
    follow_umask(path)
    sync(path)
    return hash_file(path)


def _clear(path: Path) -> None:
    """Removes a folder, or whatever has its name."""
    if is_folder(path):
        remove_folder(path)
    else:
        remove(path)


def _list_files(folder: Path, skips_links: bool = False) -> list[str]:
    """Lists files below `folder` by relative name, but for the manifest.

    Raises:
        CheckpointError: there are links or devices, unless `skips_links`.
    """
    names = []
    for path in folder.rglob("*"):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:  # a temporary file of another process, renamed meanwhile
            continue
        if stat.S_ISREG(mode):
            names.append(path.relative_to(folder).as_posix())
        elif not stat.S_ISDIR(mode) and not skips_links:
            raise CheckpointError(f"{path}: a checkpoint holds files and folders only, no links or devices.")
    return [name for name in names if name not in (MANIFEST, MANIFEST_DRAFT)]
