"""Checkpoints on a fast local disk first, copied to a slow output folder while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoints.mirror import Mirror
from ..checkpoints.stored import Stored
from ..errors import DiskFailure, RunEnded


class MirrorMixin:
    """With `local_checkpoint_dir`, a background thread copies every committed checkpoint to `output_dir`.

    Training waits for the local disk alone. What stands in `output_dir` was read back and verified; it may be some
    checkpoints behind. A run that starts on a machine without the local folder continues from there.
    """

    args: Any
    state: Any
    checkpoints: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.mirror: Mirror | None = None
        if self.args.local_checkpoint_dir is not None and self.args.should_save:
            self.mirror = Mirror(self.checkpoints, self.args.output_dir)

    def checkpoint_folder(self, step: int | None) -> Path | None:
        """Where checkpoint `step` is, locally or at the target; None where it is nowhere."""
        stores = [self.checkpoints, *([self.mirror.target] if self.mirror else [])]
        places = [] if step is None else [store.path(step) for store in stores]
        return next((place for place in places if place.is_dir()), None)

    def find_newest_checkpoint(self) -> Stored | None:
        """The newest one that verifies, in either place."""
        return (self.mirror or self.checkpoints).find_newest()

    def sweep_checkpoints(self) -> None:
        """Clears up in both places after a process that was killed."""
        self.checkpoints.sweep()
        if self.mirror:
            self.mirror.target.sweep()

    def set_checkpoints_aside_after(self, step: int) -> None:
        """Renames what is newer in both places: this run is another branch."""
        self.checkpoints.set_aside_after(step)
        if self.mirror:
            self.mirror.target.adopt(self.checkpoints.run_id)
            self.mirror.target.set_aside_after(step)

    def delete_checkpoint(self, step: int) -> bool:
        """Deletes it locally, and at the target once a newer one is there; False where it is in use."""
        if self.mirror:
            self.mirror.delete(step)
        return self.checkpoints.delete(step)

    def copy_checkpoints(self) -> None:
        """With a mirror, asks for the copy of the newest, and drops what only the target still has. After `rotate`."""
        if self.mirror is None:
            return
        steps = {stored.step for stored in self.checkpoints.checkpoints()}
        if steps:
            self.mirror.copy(max(steps), is_best=max(steps) == self.state.best_global_step)
        best = self.best_saved_step()  # type: ignore[attr-defined]
        for stored in self.mirror.target.checkpoints():
            if stored.step not in {*steps, best}:
                self.mirror.delete(stored.step)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; returns when the last checkpoint is in `output_dir`.

        Raises:
            DiskFailure: it could not be copied there.
        """
        try:
            output = super().train(*args, **kwargs)  # type: ignore[misc]
        except RunEnded:
            self._finish_copies()
            raise
        if self.mirror and not self._finish_copies():
            raise DiskFailure(
                f"{self.args.output_dir} lacks the newest checkpoint, which is in {self.checkpoints.folder}: "
                f"{self.mirror.last_failure}"
            )
        return output

    def _finish_copies(self) -> bool:
        """Whether the newest checkpoint is at the target; rotates once more, now that no copy holds an older one."""
        if self.mirror is None or not self.mirror.wait():
            return False
        self.rotate()  # type: ignore[attr-defined]
        self.copy_checkpoints()
        return self.mirror.wait()
