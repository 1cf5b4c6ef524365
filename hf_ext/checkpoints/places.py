"""Where the checkpoints of a run are: on the disk that it saves to, and, with a local one, copied to `output_dir`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .mirror import Mirror
from .run_lock import local_folder
from .store import CheckpointStore
from .stored import Stored, check_unlisted


class Places:
    """The store that training saves into and, with `local_dir`, the copies of it that a background thread makes.

    Training waits for the local disk alone. What stands in `output_dir` was read back and verified; it may be some
    checkpoints behind. A run that starts on a machine without the local folder continues from there.

    Args:
        output_dir: of the run; `follow` has another one.
        local_dir: `local_checkpoint_dir`, or None to save into `output_dir` itself.
        copies: whether this process is the one that copies.

    Attributes:
        store: what training saves into.
        mirror: copies it; None without `local_dir`, and in processes that do not copy.

    Raises:
        CheckpointError: the two folders cannot go together, see `Mirror`.
    """

    def __init__(self, output_dir: str | os.PathLike[str], local_dir: str | None = None, copies: bool = True):
        self._given: Any = None
        self.follow(output_dir, local_dir, copies)

    def follow(self, output_dir: str | os.PathLike[str], local_dir: str | None, copies: bool) -> None:
        """Goes to other folders before a run; stays, with what it knows, where they are the same."""
        given = os.path.abspath(output_dir), local_dir
        if given == self._given:
            return
        self._given, self.output_dir = given, Path(output_dir)
        self.store = CheckpointStore(output_dir if local_dir is None else local_folder(local_dir, str(output_dir)))
        self.mirror = Mirror(self.store, output_dir) if local_dir is not None and copies else None
        self._stores = [self.store, *([self.mirror.target] if self.mirror else [])]

    @property
    def folder(self) -> Path:
        """The one that training saves into."""
        return self.store.folder

    # --- looking ----------------------------------------------------------------------------------------------------

    def path(self, step: int | None) -> Path | None:
        """Where checkpoint `step` is, locally or at the target; None where it is nowhere."""
        paths = [] if step is None else [store.path(step) for store in self._stores]
        return next((path for path in paths if path.is_dir()), None)

    def newest(self) -> Stored | None:
        """The newest one that verifies, in either place."""
        return (self.mirror or self.store).find_newest()

    def verify(self, checkpoint: str) -> None:
        """Raises CheckpointError unless every file in it is as its manifest says."""
        stored = self.store.open(checkpoint)
        if stored is not None:
            check_unlisted(stored)

    def has(self, checkpoint: Path) -> bool:
        """Whether a checkpoint is in a folder of this run."""
        return checkpoint.resolve().parent in [folder.resolve() for folder in (self.output_dir, self.folder)]

    # --- clearing up ------------------------------------------------------------------------------------------------

    def adopt(self, run_id: str) -> None:
        """Goes on as the run `run_id`: its checkpoints are this run's."""
        self.store.adopt(run_id)

    def sweep(self) -> None:
        """Clears up in both places after a process that was killed."""
        for store in self._stores:
            store.sweep()

    def set_aside_after(self, step: int) -> None:
        """Renames what is newer in both places: this run is another branch."""
        self.store.set_aside_after(step)
        if self.mirror:
            self.mirror.target.adopt(self.store.run_id)
            self.mirror.target.set_aside_after(step)

    def delete(self, step: int) -> bool:
        """Deletes it locally, and at the target once a newer one is there; False where it is in use."""
        if self.mirror:
            self.mirror.delete(step)
        return self.store.delete(step)

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy(self, best_step: int | None, kept_step: int | None) -> None:
        """Asks for the copy of the newest, and drops what only the target still has. Returns at once.

        Args:
            best_step: of the best model so far, whether saved or not.
            kept_step: stays at the target although it is no longer here.
        """
        if self.mirror is None:
            return
        steps = {stored.step for stored in self.store.checkpoints()}
        if steps:
            self.mirror.copy(max(steps), is_best=max(steps) == best_step)
        for stored in self.mirror.target.checkpoints():
            if stored.step not in {*steps, kept_step}:
                self.mirror.delete(stored.step)

    def finish_copies(self) -> str | None:
        """Waits for all copies and deletions; what `output_dir` lacks, and why, as a sentence, or None."""
        if self.mirror is None or self.mirror.wait():
            return None
        return f"{self.output_dir} lacks the newest checkpoint, which is in {self.folder}: {self.mirror.last_failure}"
