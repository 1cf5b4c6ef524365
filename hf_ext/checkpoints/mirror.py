"""A second copy of the checkpoints on a slow disk (a mounted Drive), made while training goes on.

Effect: checkpoints are committed on a fast local disk, which is all that training waits for, and copied by one
background thread to the folder that outlives the machine. What stands there as `checkpoint-<step>` was read back.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import CheckpointError, FolderError
from ..files import StrPath, describe_failure, is_disk_failure, sync
from .manifest import CHECKPOINT_NAME, MANIFEST, Stored, verify
from .store import CheckpointStore

logger = logging.getLogger(__name__)


class MirroredStore(CheckpointStore):
    """A store on a local disk, whose newest and best checkpoint `begin_copies` copies to `target_folder`.

    A copy is staged at the target, read back, compared with the manifest, and renamed; meanwhile the local checkpoint
    is pinned. A target slower than the saves gets some of them. A failed copy is logged, and tried again with the next.
    Nothing is deleted at the target before that holds a newer checkpoint from which training can go on. A run that
    starts on a machine without the local folder continues from the target.

    Args:
        target_folder: the slow folder. It is created, its parent is not: where a Drive is not mounted the parent is
            missing, and a folder of that name on the local disk would be no second copy.

    Attributes:
        target: the store at the target.

    Raises:
        CheckpointError: the parent of `target_folder` does not exist, or the target is, holds or lies in the local
            folder.

    Cost: every byte is read once locally, written once and read once at the target, in the background. A local
    checkpoint that is pinned cannot make room: the local disk needs space for one more than rotation keeps.
    """

    def __init__(self, folder: StrPath, target_folder: StrPath):
        super().__init__(folder)
        self.target = CheckpointStore(target_folder, self.run_id)
        self.target.empties_trash = True
        _check_places(self.folder, self.target.folder)
        self.target.folder.mkdir(exist_ok=True)
        self._failure: str | None = None  # of the last try
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-mirror")

    # --- both folders -----------------------------------------------------------------------------------------------

    def adopt(self, run_id: str) -> None:
        """Goes on as the run `run_id`, in both folders."""
        super().adopt(run_id)
        self.target.adopt(run_id)

    def locate(self, step: int | None) -> Path | None:
        """Returns where checkpoint `step` stands, locally or at the target."""
        return super().locate(step) or self.target.locate(step)

    def has(self, checkpoint: Path) -> bool:
        """Returns whether a checkpoint is in either folder."""
        return super().has(checkpoint) or self.target.has(checkpoint)

    def find_newest(self) -> Stored | None:
        """Finds the newest checkpoint that verifies, over both folders; of two copies of one step the local one.

        The target's files are not read where it has no higher step than the local folder.

        Raises:
            OSError: the target cannot be read. A run that started from nothing would go past what it holds.
        """
        here = super().find_newest()
        numbers = [CHECKPOINT_NAME.fullmatch(name) for name in os.listdir(self.target.folder)]
        if here is not None and all(int(found[1]) <= here.step for found in numbers if found):
            return here
        there = self.target.find_newest()
        return there if here is None or (there is not None and there.step > here.step) else here

    def sweep(self) -> None:
        """Clears up in both folders, once the copy under way has ended."""
        self._thread.submit(int).result()
        super().sweep()
        self.target.sweep()

    def set_aside_after(self, step: int) -> None:
        """Renames what is newer in both folders: this run is another branch."""
        super().set_aside_after(step)
        self.target.set_aside_after(step)

    # --- copies -----------------------------------------------------------------------------------------------------

    def begin_copies(self, best_step: int | None) -> None:
        """Begins to copy the newest and the best checkpoint, and to drop what is not here any more; returns at once."""
        self._thread.submit(self._update, best_step)

    def finish_copies(self, best_step: int | None) -> str | None:
        """Tries once more, and waits; what the target lacks then, and why, as a sentence, or None."""
        last = self._thread.submit(self._update, best_step)
        logger.info("Waiting for copies to %s.", self.target.folder)
        last.result()  # raises what is no failure of a disk
        if self._failure is None:
            return None
        lacking = f"{self.target.folder} lacks the newest checkpoint, which is in {self.folder}: {self._failure}"
        logger.error("%s", lacking)
        return lacking

    def _update(self, best_step: int | None) -> None:
        try:
            if not self.target.folder.is_dir():  # making it anew would fill the folder under a Drive's mount point
                gone = "The folder is gone; is its disk still mounted?"
                raise FileNotFoundError(errno.ENOENT, gone, str(self.target.folder))
            self._drop_old(best_step)  # what an update before could not
            for newest in self.checkpoints()[-1:]:
                self._copy(newest.step)
            if best_step is not None:
                self._copy(best_step)
            self._drop_old(best_step)
            self._failure = None
        except (OSError, CheckpointError, FolderError) as error:
            is_disk = is_disk_failure(error)
            self._failure = describe_failure(error, self.target.folder) if is_disk else f"{error}."
            logger.warning(
                "Not copied to %s: %s It is tried again with the next checkpoint and at the end.",
                self.target.folder,
                self._failure,
            )

    def _copy(self, step: int) -> None:
        with self.pinned(step):
            stored = self._find(step)
            there = [copied.manifest.files.items() for copied in self.target.checkpoints()]
            if stored is None or any(stored.manifest.files.items() <= copied for copied in there):
                return
            self.target.sweep()
            staged = self.target.stage(step)
            try:
                for name in [*stored.manifest.files, MANIFEST]:
                    for parent in reversed(Path(name).parents[:-1]):  # not parents=True: it would make a gone target
                        (staged / parent).mkdir(exist_ok=True)
                    copy_file(stored.path / name, staged / name)
                if problems := verify(staged, step)[1]:
                    raise CheckpointError("What was read back differs: " + "; ".join(problems))
                self.target.publish(step)
            except BaseException:
                self.target.abandon(step)
                raise
        logger.info("%s is copied to %s.", stored.path, self.target.folder)

    def _drop_old(self, best_step: int | None) -> None:
        here = {best_step, *(stored.step for stored in self.checkpoints())}
        there = self.target.checkpoints()
        for stored in there[:-1]:  # the newest goes only once a newer one stands
            if stored.step not in here:
                self.target.delete(stored.step)


def copy_file(source: Path, target: Path) -> None:
    """Copies one file and waits until it is on the disk, where the file system can tell.

    Raises:
        OSError: reading or writing failed. A file system that cannot fsync, as some mounted Drives, is no error.
    """
    shutil.copyfile(source, target)
    sync(target)


def _check_places(local: Path, target: Path) -> None:
    here = local.resolve()
    there = target.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise CheckpointError(
            f"{target}: expected a folder outside of {local}, where training saves. Choose another one."
        )
    if not there.parent.is_dir():
        raise CheckpointError(
            f"{target}: expected {there.parent} to exist, found nothing. Mount the disk that it is on, or create it."
        )
