"""The checkpoints of a folder: committed with one rename, verified before use, deleted only by their own run."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import re
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..disk import sync
from ..errors import CheckpointError, FolderError
from .additions import Look, add_files
from .leftovers import clear_staging, remove_trash, sweep_trash, tidy
from .run_lock import find_other_run
from .staging import Staging
from .stored import CHECKPOINT_NAME, Stored, is_folder, is_ours, read_stored, verify

__all__ = ["CheckpointStore", "Staging", "Stored"]

logger = logging.getLogger(__name__)

STAGING = ".staging"  # folder
_TRASH_NAME = re.compile(r"\.trash-checkpoint-(0|[1-9][0-9]*)(?:-[0-9]+)?")


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

    def __init__(self, folder: str | os.PathLike[str], run_id: str | None = None):
        self.folder = Path(folder).absolute()
        self.run_id = run_id or uuid.uuid4().hex
        self._pins: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._staging: Staging | None = None

    def adopt(self, run_id: str) -> None:
        """Goes on as the run `run_id`: its checkpoints are now this store's. For a resumed run, before it saves."""
        self.run_id = run_id

    # --- looking ----------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """Where checkpoint `step` is, once it is committed."""
        return self.folder / f"checkpoint-{step}"

    def staging_path(self, step: int) -> Path:
        """Where checkpoint `step` is being written between `stage` and `commit`; for processes other than the main."""
        return self.folder / STAGING / f"checkpoint-{step}"

    def checkpoints(self) -> list[Stored]:
        """This run's checkpoints by step, ascending. Files are not verified. Cost: reads the manifests."""
        found = (read_stored(path, step) for step, path in self._numbered(CHECKPOINT_NAME))
        return [stored for stored in found if stored and stored.run_id == self.run_id]

    def find_newest(self) -> Stored | None:
        """The checkpoint of the highest step, of any run, whose manifest and every file verify; None without one.

        Newer ones of hf_ext that do not verify are set aside, with a warning each; newer stripped ones, from which
        training cannot continue, are passed over with a warning. Folders that hf_ext did not write are left alone,
        with one warning. Cost: reads the files of one checkpoint, more where that is damaged.
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
            if stored and stored.stripped:
                logger.warning("%s is passed over: %s were dropped from it.", path, ", ".join(stored.stripped))
                continue
            if stored:
                return stored
            try:
                self.set_aside(path, problems)
            except OSError as error:
                problem_lines = "\n  ".join(problems)
                logger.warning("%s is damaged and could not be renamed (%s):\n  %s", path, error, problem_lines)
        return None

    def open(self, path: str | os.PathLike[str]) -> Stored | None:
        """A checkpoint named by the user; None for one of stock Trainer, which nothing can verify.

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
                f"{path} does not verify; resume from another checkpoint:\n  " + "\n  ".join(problems)
            )
        return stored

    # --- writing ------------------------------------------------------------------------------------------------------

    def stage(self, step: int) -> Staging:
        """An empty folder to write checkpoint `step` into.

        Raises:
            FolderError: another process's run holds the folder.
            OSError: the folder cannot be made.
        """
        path = self.staging_path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        if other := find_other_run(self.folder):
            raise FolderError(other)
        path.parent.mkdir(exist_ok=True)
        clear_staging(path)
        try:
            path.mkdir()
        except OSError:
            self._tidy_staging()
            raise
        self._staging = Staging(path, step, self.run_id, self._publish)
        return self._staging

    def _publish(self, staged: Path, step: int) -> Path:
        target = self.path(step)
        with self._lock:
            self.make_way(step)
            if self._pins[step]:
                raise CheckpointError(f"{target} is being uploaded or copied and cannot be replaced now.")
            # Killed between these renames, `sweep` finds the staged one complete and finishes.
            replaced = self._rename(target, f".trash-{target.name}") if target.exists() else None
            try:
                os.rename(staged, target)
            except OSError:
                if replaced:
                    os.rename(replaced, target)
                raise
            sync(self.folder)
        self._tidy_staging()
        if replaced:
            remove_trash(replaced)
        return target

    def _tidy_staging(self) -> None:
        with suppress(OSError):  # another checkpoint is in it, or it is not there
            (self.folder / STAGING).rmdir()

    def take_in(self, step: int, before: Look) -> None:
        """Makes what others wrote into this run's checkpoint `step` part of it, see `add_files`.

        Raises:
            OSError: the disk refuses; the checkpoint is as it was committed.
        """
        with self._lock:
            stored = self._find(step)
            if stored is not None:
                add_files(stored, before)

    # --- moving out of the way ----------------------------------------------------------------------------------------

    def set_aside(self, path: str | os.PathLike[str], problems: Sequence[str]) -> Path:
        """Renames a damaged checkpoint to `damaged-<name>`, with a warning that lists `problems`; returns where it is.

        Raises:
            OSError: it cannot be renamed.
        """
        moved = self._rename(Path(path), f"damaged-{Path(path).name}")
        logger.warning("%s does not verify and is now %s:\n  %s", path, moved.name, "\n  ".join(problems))
        return moved

    def make_way(self, step: int) -> Path | None:
        """Renames what stands at `checkpoint-<step>` and is not this run's to `previous-checkpoint-<step>`.

        Returns where it is now, None if nothing was in the way.

        Raises:
            OSError: it cannot be renamed.
        """
        path = self.path(step)
        if not os.path.lexists(path) or self._find(step):
            return None
        moved = self._rename(path, f"previous-{path.name}")
        logger.warning("%s was in the way of this run's checkpoint, is not its own, and is now %s.", path, moved.name)
        return moved

    def set_aside_after(self, step: int) -> list[Path]:
        """Renames hf_ext's checkpoints above `step` to `previous-checkpoint-<step>`; returns where they are now.

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
        return moved

    # --- deleting -----------------------------------------------------------------------------------------------------

    @contextmanager
    def pinned(self, step: int) -> Iterator[None]:
        """While a checkpoint is uploaded or copied: `delete` and `strip` of it are refused."""
        with self._lock:
            self._pins[step] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[step] -= 1

    def is_pinned(self, step: int) -> bool:
        """Whether checkpoint `step` is being uploaded or copied."""
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
        return remove_trash(trash)

    def strip(self, step: int, names: Sequence[str]) -> bool:
        """Drops files, such as the optimizer's, from this run's checkpoint `step`; True when they are gone.

        The manifest is rewritten first and lists all that were ever dropped in `facts["stripped"]`. False where the
        checkpoint is pinned or not this run's; where the disk refuses, with a warning.
        """
        with self._lock:
            stored = self._find(step)
            if stored is None or self._pins[step]:
                return False
            manifest = stored.manifest
            dropped = {name for name in names if name in manifest.files}
            stripped = sorted(dropped | set(stored.stripped))
            files = {name: record for name, record in manifest.files.items() if name not in dropped}
            try:
                if dropped:
                    facts = {**manifest.facts, "stripped": stripped}
                    dataclasses.replace(manifest, facts=facts, files=files).write(stored.path)
                tidy(stored.path, step)
            except OSError as error:
                logger.warning("%s could not be stripped: %s.", stored.path, error.strerror)
                return False
        return True

    def sweep(self) -> None:
        """Finishes what a killed process left half done; at start, before the first `stage`.

        A staged checkpoint that is complete is committed, any other is removed, unless another run holds the folder.
        Deletions go on. What the disk refuses is warned of.
        """
        kinds = (
            (self.folder / STAGING, CHECKPOINT_NAME, self._sweep_staging),
            (self.folder, _TRASH_NAME, sweep_trash),
            (self.folder, CHECKPOINT_NAME, tidy),
        )
        for folder, pattern, clear in kinds:
            for step, path in self._numbered(pattern, folder):
                try:
                    clear(path, step)
                except OSError as error:
                    logger.warning("%s could not be cleared: %s.", path, error.strerror)
        self._tidy_staging()

    def _sweep_staging(self, path: Path, step: int) -> None:
        is_mine = self._staging is not None and self._staging.is_open and self._staging.path == path
        if is_mine or find_other_run(self.folder):
            return
        target = self.path(step)
        # The manifest is written last, so with one the killed process had finished but for the rename.
        if is_folder(path) and not os.path.lexists(target) and verify(path, step)[0]:
            os.rename(path, target)
            sync(self.folder)
            logger.info("%s was complete when its process was killed, and is now committed.", target)
        else:
            clear_staging(path)

    # --- folders ------------------------------------------------------------------------------------------------------

    def _numbered(self, pattern: re.Pattern[str], folder: Path | None = None) -> list[tuple[int, Path]]:
        """What in a folder, the store's own for None, has a name of this form, as (step, path), by step."""
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
