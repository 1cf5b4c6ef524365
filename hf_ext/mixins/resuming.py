"""Continuing a run exactly: the newest checkpoint that verifies, checked against the run that wants to continue it."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, set_seed
from transformers import TrainerCallback

from ..checkpoints.agreement import compare_runs
from ..checkpoints.argument_roles import STEP_SIZE
from ..checkpoints.hyperparameters import apply_changes, changed_hyperparameters, read_hyperparameters
from ..checkpoints.run_facts import describe_run
from ..checkpoints.state import capture_rng, load_optimizer_tree, load_scaler_tree, load_scheduler_tree, restore_rng
from ..checkpoints.stored import Stored
from ..checkpoints.trees import load_tree
from ..checkpoints.weights import check_listed, load_weights
from ..errors import CheckpointError, TrainingStopped
from .checkpointing import PROGRESS

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
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    train_dataset: Any
    data_collator: Any
    plan: Any
    checkpoints: Any
    _saved_step: int | None
    _best_step_saved: int | None
    _rng_between_epochs: dict[str, Any]
    _resume_position: dict[str, Any] | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._facts: dict[str, Any] = {}
        self._resumed: Stored | None = None
        self._allowed_changes: frozenset[str] = frozenset()
        self._rng_after_evaluation: dict[str, Any] | None = None
        self.add_callback(ResumeCallback(self))  # type: ignore[attr-defined]

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
                raise CheckpointError(f"{self.checkpoints.folder}: no checkpoint there that could be continued.")
            if stored is None:
                self.set_checkpoints_aside_after(-1)  # type: ignore[attr-defined]
                logger.info("No checkpoint in %s: training starts at step 0.", self.checkpoints.folder)
            return stored
        folder = Path(str(resume))
        return self.checkpoints.open(folder) or _check_stock(folder)

    def _agree_with(self, stored: Stored) -> None:
        """Compares this run with the checkpoint's, and takes over its identity and its place in the data."""
        changes = compare_runs(stored.manifest.facts, self._facts, self.args.allow_changed)
        for note in changes.notes:
            logger.info("Since %s: %s", stored.path.name, note)
        _refuse(stored.path, changes.contradictions)
        self._allowed_changes = frozenset(changes.allowed)
        if self._allowed_changes & ORDER:
            logger.warning("Rows come in another order from here on: some may be seen twice in this epoch, others not.")
        progress = self._progress(stored.path)
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

    def _progress(self, folder: str | Path) -> dict[str, Any]:
        return json.loads((Path(folder) / PROGRESS).read_text())

    # --- what it holds ----------------------------------------------------------------------------------------------

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._is_sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            if self._resumed is not None:
                check_listed(self._resumed.path, self._resumed.manifest.files)
            load_weights(self.model if model is None else model, Path(resume_from_checkpoint))

    @property
    def _is_sharded(self) -> bool:
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)  # type: ignore[attr-defined]

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        places = super()._init_training_state(max_steps, *args)  # type: ignore[misc]
        # Trainer goes on with the intervals of the checkpoint (transformers 5.23), whatever the arguments say now.
        self.state.compute_steps(self.args, max_steps)
        if self._allowed_changes & {"metric_for_best_model", "greater_is_better"}:
            self.state.best_metric = self.state.best_global_step = self._best_step_saved = None
        return places

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._is_sharded:
            with _tensors_only(checkpoint, "optimizer.pt or scheduler.pt"):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        allowed, made = self._allowed_changes, read_hyperparameters(self.optimizer)
        if self._resumed is None:
            with _tensors_only(checkpoint, "optimizer.pt or scheduler.pt"):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            self._agree_with_stock(checkpoint, made)
            return
        if "optim" not in allowed:
            load_optimizer_tree(self.optimizer, load_tree(Path(checkpoint), "optimizer"))
        if "lr_scheduler_type" not in allowed:
            load_scheduler_tree(self.lr_scheduler, load_tree(Path(checkpoint), "scheduler"))
        apply_changes(self.optimizer, self.lr_scheduler, made, allowed, self._resumed.step)

    def _agree_with_stock(self, checkpoint: str, made: list[dict[str, Any]]) -> None:
        """Stock Trainer goes on with the checkpoint's learning rate, whatever the arguments say now."""
        changed = changed_hyperparameters(self.optimizer, made)
        allowed = changed.keys() & self.args.allow_changed if "all" not in self.args.allow_changed else changed.keys()
        _refuse(checkpoint, [line for name, line in changed.items() if name not in allowed])
        apply_changes(self.optimizer, self.lr_scheduler, made, allowed, self.state.global_step)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if self._resumed is None:
            if getattr(self.accelerator, "scaler", None) is not None:  # else Trainer fails on a stock run's with one
                with _tensors_only(checkpoint, "scaler.pt"):
                    super()._load_scaler(checkpoint)  # type: ignore[misc]
        elif "scaler.json" in self._resumed.manifest.files and getattr(self.accelerator, "scaler", None) is not None:
            load_scaler_tree(self.accelerator.scaler, load_tree(self._resumed.path, "scaler"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        own = None if self._resumed is None else self._own_tree()
        if self._resumed is None:
            with _tensors_only(checkpoint, "rng_state.pth"):
                super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif own is not None:
            restore_rng(self._rng_after_evaluation or own["rng"])
        else:
            logger.warning("The checkpoint has no random state of process %d: seeded anew.", self.args.process_index)
            set_seed(self.args.seed + self._resumed.step + self.args.process_index)
        self._rng_between_epochs = capture_rng(self.args.device)

    def _own_tree(self) -> dict[str, Any] | None:
        """What this process wrote into the checkpoint; None where there were fewer processes."""
        assert self._resumed is not None
        name = f"rank_{self.args.process_index}"
        return load_tree(self._resumed.path, name) if f"{name}.json" in self._resumed.manifest.files else None

    def restore_unlogged_loss(self) -> None:
        """Puts back the loss since the last log, so that the next log is that of the uninterrupted run."""
        own = None if self._resumed is None else self._own_tree()
        if own is None:
            return
        loss = own["unlogged_loss"].to(self.args.device)
        self._tr_loss = loss.clone()
        self._total_loss_scalar = -loss.item()  # `train_loss` is the mean over the steps of this call
        self._globalstep_last_logged = self._progress(self._resumed.path)["last_logged_step"]  # type: ignore[union-attr]

    def make_up_evaluation(self) -> None:
        """Runs the evaluation that a stop interrupted, from the random state it began with."""
        self._rng_after_evaluation = None
        if self._resumed is None or not self._progress(self._resumed.path)["evaluation_pending"]:
            return
        own = self._own_tree()
        if own is not None:
            restore_rng(own["rng"])
        self.evaluate_pending()  # type: ignore[attr-defined]
        if own is not None:
            self._rng_after_evaluation = capture_rng(self.args.device)

    # --- the best one -----------------------------------------------------------------------------------------------

    def _load_best_model(self) -> None:
        if self.stop_reason:  # type: ignore[attr-defined]
            return
        if self._is_sharded:
            super()._load_best_model()  # type: ignore[misc]
            return
        stored = self.checkpoints.open(Path(self.state.best_model_checkpoint))
        check_listed(stored.path, stored.manifest.files)
        logger.info("Loading the best model, of step %d.", stored.step)
        load_weights(self.model, stored.path)

    def _finalize_training(self, *args: Any) -> Any:
        self.finish_save()  # type: ignore[attr-defined]
        self.check_finite()  # type: ignore[attr-defined]
        best = self.best_saved_step()  # type: ignore[attr-defined]
        self.state.best_model_checkpoint = best and str(self.checkpoint_folder(best))  # type: ignore[attr-defined]
        if self.args.load_best_model_at_end and self.state.best_global_step != best:
            logger.warning(
                "No checkpoint of the best step, %s, was saved: %s.",
                self.state.best_global_step,
                "the last weights are kept" if best is None else f"checkpoint-{best}, the best one that was, is taken",
            )
        # With a limit of 1, Trainer now deletes every other `checkpoint-*` folder, foreign ones too.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args)  # type: ignore[misc]
        finally:
            self.args.save_total_limit = limit


class ResumeCallback(TrainerCallback):
    """Finishes what a checkpoint left open, once Trainer has set its counters to zero."""

    def __init__(self, trainer: ResumeMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loss since the last log; an evaluation that a stop interrupted."""
        self.trainer.restore_unlogged_loss()
        self.trainer.make_up_evaluation()


def _refuse(checkpoint: Path | str, contradictions: list[str]) -> None:
    """Raises CheckpointError if there are any."""
    if contradictions:
        listed = "\n  ".join(contradictions)
        raise CheckpointError(
            f"{checkpoint} was written by a run that differs:\n  {listed}\nUse the old values, "
            "--allow_changed NAME [NAME ...] to continue with the new ones, another --output_dir, or --resume no."
        )


@contextmanager
def _tensors_only(folder: str | None, names: str) -> Iterator[None]:
    """Says which file of a stock checkpoint was refused by Trainer, which unpickles tensors and plain values alone."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "UnpicklingError":  # of `pickle`, which hf_ext does not import
            raise
        raise CheckpointError(
            f"{folder}: {names} is damaged, or holds more than tensors; nothing was run. Continue from another "
            "checkpoint, or start from its weights alone (--model_name_or_path)."
        ) from error


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
