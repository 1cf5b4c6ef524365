"""Checkpoints of a training run: whole or absent, without pickle, within a budget of disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..checkpoints.disk import describe_failure, is_disk_failure
from ..checkpoints.finite import not_finite, optimizer_tensors
from ..checkpoints.rng import capture_rng
from ..checkpoints.staging import Staging
from ..checkpoints.state import optimizer_tree, scaler_tree, scheduler_tree
from ..checkpoints.store import CheckpointStore
from ..checkpoints.trees import save_tree
from ..checkpoints.weights import save_weights
from ..errors import NotFiniteError
from .committing import CommitMixin
from .mirroring import local_folder

PROGRESS = "progress.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """What moves inside an optimizer step, as it was when the step began."""

    rng: dict[str, Any]
    unlogged_loss: torch.Tensor
    num_input_tokens_seen: int


class CheckpointMixin(CommitMixin):
    """Replaces Trainer's in-place checkpoints: staged beside the target, hashed, renamed, then rotated.

    `trainer.checkpoints` is the store. A checkpoint that cannot be written leaves the one before it valid; training
    goes on without, until `save_failures_allowed` in a row have failed.

    Raises (while training):
        DiskFailure: too many checkpoints in a row could not be written.
        NotFiniteError: the loss or the weights are NaN or infinite; such weights are never saved.
    """

    args: Any
    model: Any
    state: Any
    control: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        local = self.args.local_checkpoint_dir
        folder = self.args.output_dir if local is None else local_folder(local, self.args.output_dir)
        self.checkpoints = CheckpointStore(folder)
        self._rng_between_epochs: dict[str, Any] = {}
        self._step_began: Moment | None = None
        self.add_callback(StepMomentCallback(self))  # type: ignore[attr-defined]

    # --- what a checkpoint is written from --------------------------------------------------------------------------

    def capture_moment(self) -> Moment:
        """Random states, the loss since the last log, and tokens seen, of this process."""
        return Moment(
            capture_rng(self.args.device),
            self._tr_loss.detach().clone(),  # type: ignore[attr-defined]
            int(self.state.num_input_tokens_seen),
        )

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self._step_began = self.capture_moment()  # an evaluation that is given up is begun again from here
        metrics = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        if not self.evaluation_pending:  # type: ignore[attr-defined]
            self._step_began = None
        return metrics

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:  # a hyperparameter search has a folder per trial and resumes nothing
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
            return
        step = self.state.global_step
        if step == self._saved_step or (self._commit and self._commit.step == step):
            return
        self.finish_save()
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled  # type: ignore[attr-defined]
        self.check_finite(with_optimizer=not is_sharded and not self.args.save_only_model)
        self.store_flos()  # type: ignore[attr-defined]
        failure = self._write_checkpoint()
        if failure is not None:
            self.note_failed_save(step, failure)
        elif self.is_commit_awaited():
            self.finish_save()

    def _write_checkpoint(self) -> str | None:
        """Writes the last optimizer step's checkpoint and begins its commit; why that failed, the same on all."""
        step, began = self.state.global_step, time.perf_counter()
        is_main = self.args.should_save
        moment = self._step_began or self.capture_moment()
        staging: list[Staging] = []

        def prepare() -> None:
            self.make_room(step)  # type: ignore[attr-defined]
            staging.append(self.checkpoints.stage(step))

        def write() -> None:
            self._write_state(staging[0] if staging else None, self.checkpoints.staging_path(step), moment)

        for action in (prepare if is_main else None, write):
            failure = self._together(action)
            if failure is not None:
                for started in staging:
                    started.abandon()
                return failure
        self.begin_commit(step, self.state.epoch, began, staging[0] if staging else None)
        return None

    def _together(self, action: Callable[[], None] | None) -> str | None:
        """Runs `action`, if any; returns what the disk refused to any process, the same on all."""
        failure = None
        try:
            if action is not None:
                action()
        except (OSError, SafetensorError) as error:
            if not is_disk_failure(error):
                raise
            needed = self.checkpoint_sizes().full_bytes  # type: ignore[attr-defined]
            failure = describe_failure(error, self.checkpoints.folder, needed)
        if self.args.world_size == 1:
            return failure
        return next(filter(None, gather_object([failure])), None)

    def _write_state(self, staging: Staging | None, folder: Path, moment: Moment) -> None:
        """Writes this process's part of a checkpoint; the main process's holds what all share."""
        is_main, only_model = self.args.should_save, self.args.save_only_model
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled  # type: ignore[attr-defined]
        save_tree(folder, f"rank_{self.args.process_index}", {"rng": moment.rng, "unlogged_loss": moment.unlogged_loss})
        if is_main:
            self._save_companions(folder)  # type: ignore[attr-defined]
            if not only_model:
                self.save_watching(folder)  # type: ignore[attr-defined]
            if getattr(self.accelerator, "scaler", None) is not None and not only_model:
                save_tree(folder, "scaler", scaler_tree(self.accelerator.scaler))
            self._write_progress(folder, moment)
        if is_sharded:
            self.save_model(str(folder), _internal_call=True)  # type: ignore[attr-defined]
            if not only_model:
                self._save_optimizer_and_scheduler(str(folder))  # type: ignore[attr-defined]
        elif is_main and staging is not None:
            if not only_model:
                save_tree(folder, "scheduler", scheduler_tree(self.lr_scheduler))
                dtype = self.optimizer_state_dtype  # type: ignore[attr-defined]
                save_tree(folder, "optimizer", optimizer_tree(self.optimizer, dtype))
            save_weights(self.model, folder)

    def _write_progress(self, folder: Path, moment: Moment) -> None:
        """`trainer_state.json` as Trainer writes it, and what only we keep."""
        exported = [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]
        states: dict[str, Any] = {}
        for callback in exported:
            states.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {name: s[0] if len(s) == 1 else s for name, s in states.items()}
        tokens, self.state.num_input_tokens_seen = self.state.num_input_tokens_seen, moment.num_input_tokens_seen
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None  # found by step: folders move
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self.state.num_input_tokens_seen, self.state.best_model_checkpoint = tokens, best
        progress = {
            "format": 1,
            "last_logged_step": self._globalstep_last_logged,  # type: ignore[attr-defined]
            "evaluation_pending": self.evaluation_pending,  # type: ignore[attr-defined]
            "data_position": self.data_position(),  # type: ignore[attr-defined]
            "best_saved_step": self.best_saved_step(),  # type: ignore[attr-defined]
            "only_model": self.args.save_only_model,
        }
        (folder / PROGRESS).write_text(json.dumps(progress, indent=2) + "\n")

    # --- numbers that are none --------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in Trainer; before a training loss is shown, the weights are checked.

        Whatever the loss is: under `logging_nan_inf_filter` that of a step that went wrong reads 0.0.
        """
        if "loss" in logs:
            self.check_finite()
        super().log(logs, start_time)  # type: ignore[misc]

    def check_finite(self, with_optimizer: bool = False) -> None:
        """Raises NotFiniteError if a trainable weight, or optimizer state, is NaN or infinite.

        Cost: one pass over them and one device synchronisation.
        """
        tensors = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        if with_optimizer:
            tensors += optimizer_tensors(self.optimizer, self.model.named_parameters())
        names = not_finite(tensors)
        if not names:
            return
        raise NotFiniteError(
            f"{len(names)} of the weights and optimizer states are NaN or infinite at step {self.state.global_step} "
            f"(first: {names[0]}); {self.name_last_good()}. "
            "Nothing was overwritten. Usual causes: a learning rate that is too high, labels that are not finite, "
            "float16 without loss scaling. Continue with --resume auto --allow_changed learning_rate and a lower rate."
        )


def read_progress(folder: str | Path) -> dict[str, Any]:
    """What `_write_progress` wrote beside `trainer_state.json`."""
    return json.loads((Path(folder) / PROGRESS).read_text())


class StepMomentCallback(TrainerCallback):
    """Remembers the moment an accumulation cycle begins, to which a checkpoint in the middle of it goes back."""

    def __init__(self, trainer: CheckpointMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights that are not finite would make all others so."""
        self.trainer.check_finite()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Of a checkpoint between two epochs Trainer restores the random state before the loader draws from it."""
        self.trainer._rng_between_epochs = capture_rng(args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Cost: about 20 microseconds, and nothing without accumulation."""
        if args.gradient_accumulation_steps == 1:
            return
        moment = self.trainer.capture_moment()
        if float(state.epoch).is_integer():
            moment = dataclasses.replace(moment, rng=self.trainer._rng_between_epochs)
        self.trainer._step_began = moment

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The cycle is complete."""
        self.trainer._step_began = None
