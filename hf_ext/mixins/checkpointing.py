"""Checkpoints of a training run: whole or absent, without pickle, within a budget of disk."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ..checkpoints.finite import not_finite, optimizer_tensors
from ..checkpoints.rng import capture_rng
from ..checkpoints.run_folder import local_folder
from ..checkpoints.run_state import PROGRESS
from ..checkpoints.sharded_state import take_out_spread
from ..checkpoints.sharded_weights import OPTIMIZER, save_sharded_weights
from ..checkpoints.shards import save_shards
from ..checkpoints.staging import Staging
from ..checkpoints.state import optimizer_tree, scaler_tree, scheduler_tree
from ..checkpoints.store import CheckpointStore
from ..checkpoints.trees import save_tree, tree_bytes
from ..checkpoints.weights import remember_frozen
from ..errors import CheckpointError, NotFiniteError
from ..zero import own_part
from .checkpoint_model import CheckpointModelMixin
from .committing import CommitMixin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moment:
    """What moves inside an optimizer step, as it was when the step began."""

    rng: dict[str, Any]
    unlogged_loss: torch.Tensor
    num_input_tokens_seen: int
    begun_loaders: list[str]


class CheckpointMixin(CheckpointModelMixin, CommitMixin):
    """Replaces Trainer's in-place checkpoints: staged beside the target, hashed, renamed, then rotated.

    `trainer.checkpoints` is the store. A checkpoint that cannot be written leaves the one before it valid; training
    goes on without, until `save_failures_allowed` in a row have failed.

    Raises (while training):
        CheckpointError: the optimizer or the schedule holds what no checkpoint can.
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
            self.begun_loaders(),  # type: ignore[attr-defined]
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
        self.check_finite(with_optimizer=not self.keeps_library_files and not self.args.save_only_model)
        self.store_flos()  # type: ignore[attr-defined]
        failure = self._write_checkpoint()
        if failure is not None:
            self.note_failed_save(step, failure)
        elif self.is_commit_awaited():
            self.place_save()

    def _write_checkpoint(self) -> str | None:
        """Writes the last optimizer step's checkpoint and begins its commit; why that failed, the same on all."""
        step, began = self.state.global_step, time.perf_counter()
        is_main = self.args.should_save
        moment = self._step_began or self.capture_moment()
        staging: list[Staging] = []
        spread: dict[str, torch.Tensor] = {}

        def prepare() -> None:
            self.make_room(step)  # type: ignore[attr-defined]
            staging.append(self.checkpoints.stage(step))

        def write() -> None:
            spread.update(self._write_state(self.checkpoints.staging_path(step), moment))

        def write_spread() -> None:
            self._write_spread(self.checkpoints.staging_path(step), spread)

        for action in (prepare if is_main else None, write, *([write_spread] if self.is_fsdp2 else [])):
            failure = self._together(action)
            if failure is not None:
                for started in staging:
                    started.abandon()
                return failure
        self.begin_commit(step, self.state.epoch, began, staging[0] if staging else None)
        return None

    def _write_state(self, folder: Path, moment: Moment) -> dict[str, torch.Tensor]:
        """Writes this process's part of a checkpoint; the main process's holds what all share.

        Returns:
            Optimizer state that is spread over processes, which `_write_spread` writes.
        """
        is_main, only_model = self.args.should_save, self.args.save_only_model
        if not folder.is_dir():  # made by the main process
            raise CheckpointError(
                f"Process {self.args.process_index} does not see {folder}. Several machines need an output_dir (and "
                "local_checkpoint_dir) on a disk that they share."
            )
        own = {"rng": moment.rng, "unlogged_loss": moment.unlogged_loss, "row_order": self.row_order()}  # type: ignore[attr-defined]
        save_tree(folder, f"rank_{self.args.process_index}", own)
        if is_main:
            if not only_model:
                self.save_watching(folder)  # type: ignore[attr-defined]
            if getattr(self.accelerator, "scaler", None) is not None and not only_model:
                save_tree(folder, "scaler", scaler_tree(self.accelerator.scaler))
            self._write_progress(folder, moment)
        self._write_model(folder)
        if self.keeps_library_files:
            if not only_model:
                self._save_optimizer_and_scheduler(str(folder))  # type: ignore[attr-defined]
            return {}
        return {} if only_model else self._write_steppers(folder)

    def _write_steppers(self, folder: Path) -> dict[str, torch.Tensor]:
        """Optimizer and schedule: the main process writes what all share, and what is spread is returned."""
        if not (self.args.should_save or self.is_fsdp2):
            return {}
        tree = optimizer_tree(self.optimizer, self.optimizer_state_dtype)  # type: ignore[attr-defined]
        tree, spread = take_out_spread(tree) if self.is_fsdp2 else (tree, {})
        if self.args.should_save:
            save_tree(folder, "scheduler", scheduler_tree(self.lr_scheduler))
            save_tree(folder, "optimizer", tree)
        return spread

    def check_storable(self) -> None:
        """Raises CheckpointError where a save would fail, whatever the disk: known after a step, not after hours.

        Cost: no tensor is copied.
        """
        is_saved = self.args.save_strategy != "no" or self.args.save_minutes or self.args.max_hours
        is_ours = not (self.args.save_only_model or self.keeps_library_files or self.state.is_hyper_param_search)
        if not (is_saved and is_ours):
            return
        optimizer = optimizer_tree(self.optimizer, self.optimizer_state_dtype)  # type: ignore[attr-defined]
        scheduler = scheduler_tree(self.lr_scheduler)
        try:
            tree_bytes(take_out_spread(optimizer)[0] if self.is_fsdp2 else optimizer)
            tree_bytes(scheduler)
        except CheckpointError as error:
            names = f"{optimizer['class']} and {scheduler['class']}"
            raise CheckpointError(
                f"No checkpoint can hold the state of {names}: {error} Keep it as one of these, or "
                'give save_only_model=True (weights alone, with which no run can be continued) or save_strategy="no".'
            ) from error

    def _write_spread(self, folder: Path, spread: dict[str, torch.Tensor]) -> None:
        """Each process its part of what is spread; they wait for each other, so nothing else may fail here."""
        save_sharded_weights(self.stored_model, folder)
        if spread:
            save_shards(spread, folder / OPTIMIZER)

    def _begin_sharding(self) -> None:
        if self.args.should_save:
            remember_frozen(self.stored_model)  # while one process holds them whole
        super()._begin_sharding()  # type: ignore[misc]

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
        logged = self._total_loss_scalar  # type: ignore[attr-defined]
        progress = {
            "format": 1,
            "logged_loss": logged if math.isfinite(logged) and self.knows_whole_loss else None,  # type: ignore[attr-defined]
            "num_left_out": self.num_left_out,  # type: ignore[attr-defined]
            "last_logged_step": self._globalstep_last_logged,  # type: ignore[attr-defined]
            "evaluation_pending": self.evaluation_pending,  # type: ignore[attr-defined]
            "begun_loaders": moment.begun_loaders,
            "data_position": self.data_position(),  # type: ignore[attr-defined]
            "best_saved_step": self.best_saved_step(),  # type: ignore[attr-defined]
            "only_model": self.args.save_only_model,
            "run_clock": self.run_clock.state(),  # type: ignore[attr-defined]
            "evaluation_seconds": self.evaluation_record.seconds,  # type: ignore[attr-defined]
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
        tensors = [(name, own_part(p)) for name, p in self.model.named_parameters() if p.requires_grad]
        if with_optimizer:
            tensors += optimizer_tensors(self.optimizer, self.model.named_parameters())
        names = not_finite(tensors)
        if self.is_fsdp2 or self.is_deepspeed_enabled:  # each process looked at its part
            found = torch.tensor(len(names), device=self.accelerator.device)
            names = names or (["in another process's part"] if self.accelerator.reduce(found).item() else [])
        if not names:
            return
        raise NotFiniteError(
            f"{len(names)} of the weights and optimizer states are NaN or infinite at step {self.state.global_step} "
            f"(first: {names[0]}); {self.name_last_good()}. "
            "Nothing was overwritten. Usual causes: a learning rate that is too high, labels that are not finite, "
            "float16 without loss scaling. Continue with --resume auto --allow_changed learning_rate and a lower rate."
        )


class StepMomentCallback(TrainerCallback):
    """Remembers the moment an accumulation cycle begins, to which a checkpoint in the middle of it goes back."""

    def __init__(self, trainer: CheckpointMixin):
        self.trainer = trainer
        self._is_checked = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights that are not finite would make all others so."""
        self._is_checked = False
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
        """The cycle is complete; after the first, the optimizer has state."""
        self.trainer._step_began = None
        if not (self._is_checked or self.trainer.accelerator.optimizer_step_was_skipped):
            self._is_checked = True
            self.trainer.check_storable()
