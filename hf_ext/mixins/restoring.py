"""What a resumed run takes from its checkpoint: weights, optimizer, schedule, random states, unlogged losses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from transformers import TrainerCallback

from ..checkpoints.additions import own_place
from ..checkpoints.agreement import refuse
from ..checkpoints.hyperparameters import apply_changes, changed_hyperparameters, read_hyperparameters
from ..checkpoints.rng import capture_rng, restore_rng
from ..checkpoints.run_state import read_progress
from ..checkpoints.sharded_state import put_back_spread
from ..checkpoints.sharded_weights import OPTIMIZER
from ..checkpoints.state import load_optimizer_tree, load_scaler_tree, load_scheduler_tree
from ..checkpoints.stored import Stored
from ..checkpoints.trees import load_tree
from ..checkpoints.weights import check_listed, load_weights
from ..errors import CheckpointError
from ..overrides import is_overridden
from .together import TogetherMixin

logger = logging.getLogger(__name__)


class RestoreMixin(TogetherMixin):
    """Loads our checkpoints where Trainer asks for what it would unpickle; those of stock Trainer are left to it.

    Raises (while a run is resumed):
        CheckpointError: weights or states do not fit this run, or a stock file holds more than tensors.
    """

    args: Any
    model: Any
    state: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    checkpoints: Any
    _resumed: Stored | None
    _allowed_changes: frozenset[str]
    _best_step_saved: int | None
    num_left_out: int  # of NanPolicyMixin
    _rng_between_epochs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._rng_after_evaluation: dict[str, Any] | None = None
        self.knows_whole_loss = True
        self.add_callback(RestoreCallback(self))  # type: ignore[attr-defined]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if self._is_of_library(folder):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        if self._resumed is not None:
            folder = _find_weights(self._resumed)
        self._load_weights(folder)

    def _load_weights(self, folder: Path) -> None:
        """On all processes alike. What is frozen, and spread, only the main process has hashed while it was whole."""
        checks_frozen = self.args.should_save or not self.is_fsdp2
        self._load_together(lambda: load_weights(self.stored_model, folder, checks_frozen))

    def _is_of_library(self, folder: Path) -> bool:
        """Whether DeepSpeed or Accelerate wrote the weights and states in a checkpoint, and alone can read them."""
        is_stock = self.is_fsdp_enabled and self._resumed is None and any(folder.glob("pytorch_model_fsdp*"))
        return self.keeps_library_files or is_stock

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        places = super()._init_training_state(max_steps, *args)  # type: ignore[misc]
        # Trainer goes on with the intervals of the checkpoint (transformers 5.23), whatever the arguments say now.
        self.state.compute_steps(self.args, max_steps)
        if self._allowed_changes & {"metric_for_best_model", "greater_is_better"}:
            self.state.best_metric = self.state.best_global_step = self._best_step_saved = None
        return places

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._is_of_library(Path(checkpoint)):
            with _tensors_only(checkpoint, "optimizer.pt or scheduler.pt"):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        allowed, made = self._allowed_changes, read_hyperparameters(self.optimizer)
        if self._resumed is None:
            with _tensors_only(checkpoint, "optimizer.pt or scheduler.pt"):
                super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            self._agree_with_stock(checkpoint, made)
            return
        self._load_together(lambda: self._load_steppers(Path(checkpoint)))
        apply_changes(self.optimizer, self.lr_scheduler, made, allowed, self._resumed.step)

    def _load_steppers(self, folder: Path) -> None:
        """The states of optimizer and schedule, but for those that were allowed to change."""
        if "optim" not in self._allowed_changes:
            tree = put_back_spread(load_tree(folder, "optimizer"), self.optimizer, folder / OPTIMIZER)
            load_optimizer_tree(self.optimizer, tree)
        if "lr_scheduler_type" not in self._allowed_changes:
            load_scheduler_tree(self.lr_scheduler, load_tree(folder, "scheduler"))

    def _agree_with_stock(self, checkpoint: str, made: list[dict[str, Any]]) -> None:
        """Stock Trainer goes on with the checkpoint's learning rate, whatever the arguments say now."""
        changed = changed_hyperparameters(self.optimizer, made)
        allowed = changed.keys() & self.args.allow_changed if "all" not in self.args.allow_changed else changed.keys()
        refuse(checkpoint, [line for name, line in changed.items() if name not in allowed])
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
        return self._tree_of(self.args.process_index)

    def _tree_of(self, rank: int) -> dict[str, Any] | None:
        """What a process wrote into the checkpoint; None where there were fewer processes."""
        assert self._resumed is not None
        name = f"rank_{rank}"
        return load_tree(self._resumed.path, name) if f"{name}.json" in self._resumed.manifest.files else None

    def restore_losses(self) -> None:
        """Puts back the losses, logged and since the last log, so that what is logged is as in the uninterrupted run.

        Logs show the mean over the processes: where they are more or fewer now, each goes on with that mean.
        """
        self.knows_whole_loss, self.num_left_out = self.state.global_step == 0, 0
        if self._resumed is None:
            return
        num_before = int(self._resumed.manifest.facts.get("world_size", 1))
        ranks = [self.args.process_index] if num_before == self.args.world_size else range(num_before)
        trees = [tree for rank in ranks if (tree := self._tree_of(rank)) is not None]
        if not trees:
            return
        loss = torch.stack([tree["unlogged_loss"] for tree in trees]).mean(0).to(self.args.device)
        self._tr_loss = loss.clone()
        progress = read_progress(self._resumed.path)
        self._globalstep_last_logged = progress["last_logged_step"]
        # Of a checkpoint that does not say, the sum over its steps is lost, or of how many it is.
        logged, left_out = progress.get("logged_loss"), progress.get("num_left_out")
        self.knows_whole_loss = logged is not None and (left_out is not None or self.args.nan_policy != "skip")
        self._total_loss_scalar, self.num_left_out = logged or 0.0, left_out or 0

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """As in Trainer; `train_loss` is the mean over all steps taken, or None if that is not known."""
        if "train_loss" in logs:
            logs["train_loss"] = self._whole_loss()
        super().log(logs, start_time)  # type: ignore[misc]

    def _whole_loss(self) -> float | None:
        # Trainer 5.23 divides the losses of this call by the steps of this call, those left out among them.
        steps = self.state.global_step - self.num_left_out
        return self._total_loss_scalar / steps if steps > 0 and self.knows_whole_loss else None

    def restore_clocks(self) -> None:
        """Goes on counting the seconds of the run, and of its evaluations."""
        if self._resumed is None:
            return
        progress = read_progress(self._resumed.path)
        self.run_clock.count_on(progress.get("run_clock", {}))  # type: ignore[attr-defined]
        self.evaluation_record.seconds = progress.get("evaluation_seconds", {})  # type: ignore[attr-defined]

    def make_up_evaluation(self) -> None:
        """Runs the evaluation that a stop interrupted, from the random state it began with."""
        self._rng_after_evaluation = None
        if self._resumed is None or not read_progress(self._resumed.path)["evaluation_pending"]:
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
        best = Path(self.state.best_model_checkpoint)
        if self._is_of_library(best):
            super()._load_best_model()  # type: ignore[misc]
            return
        stored = self._on_main(lambda: self.checkpoints.open(best))  # type: ignore[attr-defined]
        logger.info("Loading the best model, of step %d.", stored.step)
        if is_overridden(self, "_load_from_checkpoint"):
            self._load_from_checkpoint(str(stored.path))
        else:
            self._load_weights(_find_weights(stored))

    def _finalize_training(self, *args: Any) -> Any:
        self.finish_save()  # type: ignore[attr-defined]
        self.check_finite()  # type: ignore[attr-defined]
        # The main process alone knows of copies; the others would not join it in loading the best model.
        best, self.state.best_model_checkpoint = self._on_main(self._find_best)  # type: ignore[attr-defined]
        if self.args.load_best_model_at_end and self.state.best_global_step != best:
            logger.warning(
                "No checkpoint of the best step, %s, was saved: %s.",
                self.state.best_global_step,
                "the last weights are kept" if best is None else f"checkpoint-{best}, the best one that was, is taken",
            )
        # With a limit of 1, Trainer now deletes every other `checkpoint-*` folder, foreign ones too.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(*args)  # type: ignore[misc]
            return output._replace(training_loss=self._whole_loss())
        finally:
            self.args.save_total_limit = limit

    def _find_best(self) -> tuple[int | None, str | None]:
        best = self.best_saved_step()  # type: ignore[attr-defined]
        return best, best and str(self.checkpoint_folder(best))  # type: ignore[attr-defined]


class RestoreCallback(TrainerCallback):
    """Finishes what a checkpoint left open, once Trainer has set its counters to zero."""

    def __init__(self, trainer: RestoreMixin):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The loss since the last log; times; an evaluation that a stop interrupted."""
        self.trainer.restore_losses()
        self.trainer.restore_clocks()
        self.trainer.make_up_evaluation()


def _find_weights(stored: Stored) -> Path:
    """The folder of a checkpoint's weights, once it is sure that none were put before them."""
    place, listed = own_place(stored.path, frozenset(stored.manifest.files))
    check_listed(place, listed)
    return place


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
