"""A second copy of the checkpoints on a slow disk (a mounted Drive), made while training goes on.

Effect: checkpoints are committed on a fast local disk, which is all that training waits for, and copied by one
background thread to the folder that outlives the machine. What stands there as `checkpoint-<step>` was read back.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from ..disk import describe_failure, is_disk_failure, sync
from ..errors import CheckpointError, FolderError
from .manifest import Manifest, check_files
from .store import CheckpointStore, Stored
from .stored import CHECKPOINT_NAME

logger = logging.getLogger(__name__)

CHUNK_BYTES = 4 * 2**20
LOG_EVERY_S = 10.0

Report = Callable[[int], None]
CopyFile = Callable[[Path, Path, Report], None]


def copy_file(source: Path, target: Path, report: Report) -> None:
    """Copies one file in chunks of 4 MiB and waits until it is on the disk, where the file system can tell.

    Args:
        source: an existing file.
        target: where the copy goes; overwritten.
        report: called with the number of bytes of every write.

    Raises:
        OSError: reading or writing failed. A file system that cannot fsync, as some mounted Drives, is no error.
    """
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        while chunk := reader.read(CHUNK_BYTES):
            rest = memoryview(chunk)
            while rest:
                count = writer.write(rest)
                rest = rest[count:]
                report(count)
    sync(target)
    if hasattr(os, "posix_fadvise"):  # so that reading back reads the disk and not the memory just written
        with target.open("rb") as reader:
            os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Mirror:
    """Copies committed checkpoints of `local` to `target_folder` in one background thread.

    `copy` and `delete` return at once. A copy is staged at the target, read back, compared with the local manifest,
    and renamed; meanwhile the local checkpoint is pinned. Of those that wait only the newest and the best are copied.
    A failed copy is logged, counted, and tried again with the next one and in `wait`. Nothing is deleted at the target
    before that holds a newer checkpoint from which training can go on.
    The thread ends with the process: call `wait` first. At the start of a run, ask to `delete` what the target holds
    and the local folder does not: rotation, which looks at the local folder, will not speak of it.

    Args:
        local: where training saves. The copies belong to its run, also to one that it adopts later.
        target_folder: the slow folder. It is created, its parent is not: where a Drive is not mounted the parent is
            missing, and a folder of that name on the local disk would be no second copy.
        copy_file: copies one file, as `copy_file` does.

    Attributes:
        target: the store at the target, for what happens before the first `copy` (`sweep`, `set_aside_after`, looking
            for checkpoints that a killed run had yet to delete).
        num_failures: attempts that failed so far.
        last_failure: what the newest of them said, or None.

    Raises:
        CheckpointError: the parent of `target_folder` does not exist, or the target is, holds or lies in the local
            folder.

    Cost: every byte is read once locally, written once and read twice at the target, in the background. A local
    checkpoint that is pinned cannot make room: the local disk needs space for one more than rotation keeps.
    """

    def __init__(
        self, local: CheckpointStore, target_folder: str | os.PathLike[str], copy_file: CopyFile = copy_file
    ) -> None:
        folder = Path(target_folder).absolute()
        _check_places(local.folder, folder)
        folder.mkdir(exist_ok=True)
        self.local = local
        self.target = CheckpointStore(folder, local.run_id)
        self.num_failures = 0
        self.last_failure: str | None = None
        self._copy_file = copy_file
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting: dict[int, bool] = {}  # step -> whether it is the best; to be at the target, and not there yet
        self._due: set[int] = set()  # those of _waiting to try now: a failed one is not, until the next copy or wait
        self._deletions: set[int] = set()
        self._deletions_due = False
        self._copying: int | None = None
        self._num_copied = self._num_to_copy = 0  # bytes of the copy that runs

    @property
    def waiting(self) -> tuple[int, ...]:
        """Steps that are to be at the target and are not yet: queued, being copied or failed, and not given up."""
        with self._lock:
            return tuple(sorted(self._waiting))

    def copy(self, step: int, is_best: bool = False) -> None:
        """Asks for a copy of the committed local checkpoint `step`; returns at once.

        What waits already is given up, but for the best so far, if this one is not better. A copy that has begun is
        finished, so that a target slower than the saves still gets some of them.
        """
        with self._lock:
            given_up = {older for older, was_best in self._waiting.items() if is_best or not was_best}
            for older in given_up:
                del self._waiting[older]
            self._waiting[step] = is_best
            self._deletions.discard(step)
            self._due = set(self._waiting)
            self._start()
        if skipped := given_up - {self._copying}:
            logger.info("Checkpoints %s are not copied to %s: %d is newer.", sorted(skipped), self.target.folder, step)

    def delete(self, step: int) -> None:
        """Asks to delete checkpoint `step` at the target, or not to copy it any more; returns at once.

        It stays until the target holds a newer checkpoint of this run with all that training needs to go on.
        """
        with self._lock:
            self._waiting.pop(step, None)
            self._due.discard(step)
            self._deletions.add(step)
            self._deletions_due = True
            self._start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Tries what failed once more and waits for all copies and deletions, with the progress in the log every 10 s.

        Args:
            timeout_s: seconds to wait at most; None waits without end.

        Returns:
            Whether every checkpoint that was asked for and not given up is at the target; what is not is logged as an
            error.
        """
        end = time.monotonic() + (timeout_s if timeout_s is not None else threading.TIMEOUT_MAX)
        with self._lock:
            self._due |= set(self._waiting)
            self._deletions_due = bool(self._deletions)
            self._start()
            thread = self._thread
        while thread and thread.is_alive() and (left := end - time.monotonic()) > 0:
            thread.join(min(LOG_EVERY_S, left))
            if thread.is_alive():
                logger.info("Still copying to %s: %s.", self.target.folder, self._progress())
        if missing := self.waiting:
            reason = self.last_failure or f"not finished after {timeout_s} s ({self._progress()})"
            where = f"in {self.local.folder} only, not in {self.target.folder}"
            logger.error("Checkpoints %s are %s: %s", list(missing), where, reason)
        return not missing

    def find_newest(self) -> Stored | None:
        """The newest checkpoint that verifies, over both places; of two copies of one step the local one.

        What does not verify is set aside where it lies. The target's files are not read where it has no higher step
        than the local folder. For the start of a run, before the first `copy`.

        Raises:
            OSError: the target cannot be read. A run that started from nothing would go past what it holds.
        """
        here = self.local.find_newest()
        numbers = [CHECKPOINT_NAME.fullmatch(name) for name in os.listdir(self.target.folder)]
        if here is not None and all(int(found[1]) <= here.step for found in numbers if found):
            return here
        there = self.target.find_newest()
        return there if here is None or (there is not None and there.step > here.step) else here

    # The background thread

    def _start(self) -> None:
        """Starts the thread if none runs; the lock is held. It ends when nothing is left to try."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="checkpoint-mirror", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._copying = min(self._due, default=None)
                if self._copying is None and not self._deletions_due:
                    self._thread = None
                    return
                self._due -= {self._copying}
            if self._copying is None:
                self._try_deletions()
            else:
                self._try_next(self._copying)

    def _try_next(self, step: int) -> None:
        """One copy and the deletions that it allows; after a failure once more, if they made room."""
        copied = self._try_copy(step)
        made_room = self._try_deletions()
        with self._lock:
            if copied:
                self._waiting.pop(step, None)
                self._due.discard(step)
            elif made_room and step in self._waiting:
                self._due.add(step)

    def _try_copy(self, step: int) -> bool:
        self._num_copied = self._num_to_copy = 0
        try:
            self._copy(step)
        except (OSError, CheckpointError, FolderError) as error:
            self._note_failure(f"checkpoint-{step} was not copied to {self.target.folder}", error, self._num_to_copy)
            return False
        return True

    def _copy(self, step: int) -> None:
        source = self.local.folder / f"checkpoint-{step}"
        with self.local.pinned(step):
            if not source.exists():
                logger.warning("%s was deleted before it was copied to %s.", source, self.target.folder)
                return
            manifest = Manifest.read(source)
            self._reach_target()
            if self._holds(manifest):
                return
            self.target.sweep()
            staging = self.target.stage(step)
            try:
                self._copy_files(source, staging.path, manifest)
                if problems := check_files(staging.path, manifest):
                    raise CheckpointError("What was read back differs: " + "; ".join(problems))
                committed = staging.commit(manifest.epoch, manifest.facts)
            finally:
                staging.abandon()  # nothing is left to abandon after commit
            if committed.manifest != manifest:  # commit hashed the files once more, and vouches for what it read
                self.target.delete(step)
                raise CheckpointError("It changed at the target after it was read back.")
        logger.info("%s is copied to %s.", source, self.target.folder)

    def _reach_target(self) -> None:
        """Raises OSError where the target is gone; making it anew would fill the folder under a Drive's mount point."""
        if not self.target.folder.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "The folder is gone; is its disk still mounted?", str(self.target.folder)
            )
        self.target.adopt(self.local.run_id)

    def _holds(self, manifest: Manifest) -> bool:
        return any(stored.manifest == manifest for stored in self.target.checkpoints())

    def _copy_files(self, source: Path, staged: Path, manifest: Manifest) -> None:
        self._num_to_copy = sum(record.size for record in manifest.files.values())

        def report(num_bytes: int) -> None:
            self._num_copied += num_bytes

        for name in sorted(manifest.files):
            for folder in list(PurePosixPath(name).parents)[-2::-1]:  # not parents=True: that would make a gone target
                (staged / folder).mkdir(exist_ok=True)
            self._copy_file(source / name, staged / name, report)

    def _try_deletions(self) -> bool:
        """Deletes at the target what was asked for and may go; whether anything went."""
        with self._lock:
            self._deletions_due = False
            asked = sorted(self._deletions)
        if not asked:
            return False
        gone = set()
        try:
            self._reach_target()
            here = self.target.checkpoints()
            whole = [stored.step for stored in here if not stored.stripped]
            absent = {step for step in asked if not (self.target.folder / f"checkpoint-{step}").exists()}
            gone = {step for step in asked if step < max(whole, default=0) and self.target.delete(step)}
        except OSError as error:
            self._note_failure(f"Old checkpoints were not deleted in {self.target.folder}", error)
            return False
        with self._lock:
            self._deletions -= gone | absent
        return bool(gone)

    def _note_failure(self, what: str, error: Exception, needed_bytes: int | None = None) -> None:
        is_disk = is_disk_failure(error)
        reason = describe_failure(error, self.target.folder, needed_bytes) if is_disk else f"{error}."
        self.num_failures += 1
        self.last_failure = f"{what}. {reason}"
        logger.warning("%s It is tried again with the next checkpoint and at the end.", self.last_failure)

    def _progress(self) -> str:
        if self._copying is None:
            return "old checkpoints are being deleted"
        done, total = self._num_copied / 1e9, self._num_to_copy / 1e9
        return f"checkpoint-{self._copying}, {done:.2f} of {total:.2f} GB"


def _check_places(local: Path, target: Path) -> None:
    here, there = local.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(
            f"{target}: expected a folder outside of {local}, where training saves. Choose another one."
        )
    if not there.parent.is_dir():
        raise CheckpointError(
            f"{target}: expected {there.parent} to exist, found nothing. Mount the disk that it is on, or create it."
        )
