"""Continuing a run exactly: the newest checkpoint that verifies, checked against the run that wants to continue it."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints.agreement import compare_runs, refuse
from ..checkpoints.argument_roles import STEP_SIZE
from ..checkpoints.run_facts import describe_run
from ..checkpoints.run_state import check_trainer_state, read_progress
from ..checkpoints.stored import Stored
from ..errors import CheckpointError, TrainingStopped

# Allowed to change, these move the place in the data that a number of optimizer steps stands for.
ORDER = frozenset({"data", "world_size", "seed", "data_seed", *STEP_SIZE})
STOCK_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")

logger = logging.getLogger(__name__)


class ResumeMixin:
    """`train(resume_from_checkpoint=...)` takes "auto", True, a folder, or nothing (then `args.resume` decides).

    "auto" continues from the newest checkpoint of the output folder that verifies, whatever its run, or starts anew if
    there is none; what does not verify is reported and set aside. A run that differs from the checkpoint's in what
    would make the continuation another run is refused, difference by difference, unless `allow_changed` names it.

    Raises (from `train`):
        CheckpointError: a named checkpoint is damaged, or the run contradicts the checkpoint.
        TrainingStopped: a signal or a time limit stopped training, after a checkpoint.
    """

    args: Any
    model: Any
    state: Any
    accelerator: Any
    train_dataset: Any
    data_collator: Any
    plan: Any
    checkpoints: Any
    _saved_step: int | None
    _best_step_saved: int | None
    _resume_position: dict[str, Any] | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._facts: dict[str, Any] = {}
        self._resumed: Stored | None = None
        self._allowed_changes: frozenset[str] = frozenset()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in Trainer; see the class."""
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint or self.args.resume
        self._facts = describe_run(
            self.args, self.model, self.train_dataset, self.data_collator, self.args.world_size, self.plan
        )
        self._saved_step = self._best_step_saved = None
        self.checkpoints.adopt(uuid.uuid4().hex)  # a second call of `train` is another run, unless it continues one
        folder = self._find_checkpoint(resume_from_checkpoint)
        output = super().train(folder, *args, **kwargs)  # type: ignore[misc]
        if self.stop_reason:  # type: ignore[attr-defined]
            self.accelerator.wait_for_everyone()  # torchrun ends the others as soon as one has ended
            raise TrainingStopped(
                f"{self.stop_reason}: saved checkpoint-{self.state.global_step} and stopped. "  # type: ignore[attr-defined]
                "The same command with --resume auto (the recipes' default) continues from it."
            )
        return output

    # --- which checkpoint -------------------------------------------------------------------------------------------

    def _find_checkpoint(self, resume: str | bool | None) -> str | None:
        """The folder to continue from, the same on all processes; the main process looks, verifies and sets aside."""
        found: list[Any] = [None, None]
        if self.args.should_save:
            try:
                found = [self._look(resume), None]
            except CheckpointError as error:
                found = [None, error]
        if self.args.world_size > 1:
            broadcast_object_list(found)
        stored, refusal = found
        if refusal is not None:
            raise refusal
        self._resumed = stored if isinstance(stored, Stored) else None
        self._resume_position = None
        if self._resumed is not None:
            self._agree_with(self._resumed)
        return None if stored is None else str(getattr(stored, "path", stored))

    def _look(self, resume: str | bool | None) -> Stored | Path | None:
        self.sweep_checkpoints()  # type: ignore[attr-defined]
        if resume in (None, False, "no"):
            self.set_checkpoints_aside_after(-1)  # type: ignore[attr-defined]
            return None
        if resume is True or resume == "auto":
            stored = self.find_newest_checkpoint()  # type: ignore[attr-defined]
            if stored is None and resume is True:
                raise CheckpointError(
                    f"{self.checkpoints.folder}: no checkpoint there that could be continued.{self._name_stock()}"
                )
            if stored is None:
                self.set_checkpoints_aside_after(-1)  # type: ignore[attr-defined]
                logger.info("No checkpoint in %s: training starts at step 0.", self.checkpoints.folder)
            return stored
        folder = Path(str(resume))
        return self.checkpoints.open(folder) or _check_stock(folder)

    def _name_stock(self) -> str:
        last = get_last_checkpoint(self.args.output_dir)
        if last is None:
            return ""
        return (
            f" One that hf_ext did not write cannot be verified, and is continued by its name alone: "
            f"resume_from_checkpoint={last!r}."
        )

    def _agree_with(self, stored: Stored) -> None:
        """Compares this run with the checkpoint's, and takes over its identity and its place in the data."""
        changes = compare_runs(stored.manifest.facts, self._facts, self.args.allow_changed)
        for note in changes.notes:
            logger.info("Since %s: %s", stored.path.name, note)
        refuse(stored.path, changes.contradictions)
        self._allowed_changes = frozenset(changes.allowed)
        if self._allowed_changes & ORDER:
            logger.warning("Rows come in another order from here on: some may be seen twice in this epoch, others not.")
        progress = read_progress(stored.path)
        check_trainer_state(stored.path, stored.step)
        if progress["only_model"]:
            raise CheckpointError(
                f"{stored.path} holds weights alone (save_only_model), from which training cannot be continued: load "
                "it as the model to start from, or --resume no."
            )
        own = (Path(self.args.output_dir), self.checkpoints.folder)
        is_own = stored.path.parent.resolve() in [folder.resolve() for folder in own]
        if is_own:
            self._saved_step = stored.step
            self.checkpoints.adopt(stored.run_id)
        if self.args.should_save:
            self.set_checkpoints_aside_after(stored.step if is_own else -1)  # type: ignore[attr-defined]
        self._resume_position = progress["data_position"]
        self._best_step_saved = progress["best_saved_step"] if is_own else None
        self.args.restore_callback_states_from_checkpoint = True  # else early stopping forgets its patience
        logger.info("Continuing from %s (epoch %.2f).", stored.path, stored.manifest.epoch)


def _check_stock(folder: Path) -> Path:
    """A checkpoint of stock Trainer, with what it lacks said."""
    if not (folder / "trainer_state.json").is_file():
        raise CheckpointError(f"{folder}: no checkpoint there (no manifest.json and no trainer_state.json).")
    missing = [name for name in STOCK_FILES if not (folder / name).is_file()]
    if not any(folder.glob("rng_state*.pth")):
        missing.append("rng_state.pth")
    logger.warning(
        "%s is a stock Trainer checkpoint: its files cannot be verified. Data and most arguments are not compared%s.",
        folder,
        f", and it lacks {', '.join(missing)}, so that training does not continue exactly" if missing else "",
    )
    return folder
