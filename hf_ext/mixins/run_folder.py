"""One run per folder, also for whoever trains without a recipe."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..checkpoints.folder_lock import Hold
from ..checkpoints.run_folder import hold_run_folders
from .main_process import MainProcessMixin

logger = logging.getLogger(__name__)


class RunFolderMixin(MainProcessMixin):
    """While `train` and `save_model` work, no other process's run can have `output_dir` or `local_checkpoint_dir`.

    Trainers of one process share a folder, one after the other. A recipe holds its folder from its first line to its
    last (`run_folder`); a trainer that only evaluates needs none.

    Raises (from `train`, on all processes, and from `save_model`, on the main one):
        FolderError: another process's run has the folder.
    """

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer, alone in the folder."""
        with self._alone(self._on_main):
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in Trainer, alone in the folder if it is the output folder."""
        is_own = output_dir is None or os.path.realpath(output_dir) == os.path.realpath(self.args.output_dir)
        needs_folder = self._is_main and is_own and not _internal_call
        with self._alone(lambda hold: hold() if needs_folder else None):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    @contextmanager
    def _alone(self, run: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        holds: list[Hold] = []

        def hold() -> None:
            try:
                holds.extend(hold_run_folders(self.args))
            except OSError as error:  # as with Trainer, a run that saves nothing needs no folder that it may write to
                logger.warning("%s is not locked against other runs: %s.", self.args.output_dir, error.strerror)

        try:
            run(hold)
            yield
        finally:
            for one in holds:
                one.release()
