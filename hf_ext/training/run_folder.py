"""One run per folder, also for whoever trains without a recipe."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..checkpoints.run_folder.folder_lock import Hold
from ..checkpoints.run_folder.holding import hold_run_folders
from ..training_args import FastTrainingArguments
from .team import Team

logger = logging.getLogger(__name__)


class RunFolder:
    """While a run works in `output_dir` and `local_checkpoint_dir`, no other process's run can have them.

    Trainers of one process share a folder, one after the other. A recipe holds its folder from its first line to its
    last (`run_folder`); a trainer that only evaluates needs none.
    """

    def __init__(self, args: FastTrainingArguments, team: Team):
        self._args, self._team = args, team

    @contextmanager
    def while_training(self) -> Iterator[None]:
        """Alone in the folders; all processes enter.

        Raises:
            FolderError: on all processes: another process's run has one of them.
        """
        with self._held(self._team.on_main):
            yield

    @contextmanager
    def while_saving(self, output_dir: str | None, is_for_checkpoint: bool) -> Iterator[None]:
        """Alone in the folders, if a model is saved into the output folder; raises on the main process."""
        is_own = output_dir is None or os.path.realpath(output_dir) == os.path.realpath(str(self._args.output_dir))
        needs_folder = self._team.is_main and is_own and not is_for_checkpoint
        with self._held(lambda hold: hold() if needs_folder else None):
            yield

    @contextmanager
    def _held(self, run: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        holds: list[Hold] = []

        def hold() -> None:
            try:
                holds.extend(hold_run_folders(self._args))
            except OSError as error:  # as with Trainer, a run that saves nothing needs no folder that it may write to
                logger.warning("%s is not locked against other runs: %s.", self._args.output_dir, error.strerror)

        try:
            run(hold)
            yield
        finally:
            for one in holds:
                one.release()
