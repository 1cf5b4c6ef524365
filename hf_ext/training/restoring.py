"""What a resumed run takes from its checkpoint: weights, optimizer, schedule, random states, unlogged losses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import nn
from transformers import TrainerState

from ..checkpoints.agreement.comparing import refuse
from ..checkpoints.agreement.hyperparameters import apply_changes, changed_hyperparameters, read_hyperparameters
from ..checkpoints.format.stored import Stored
from ..checkpoints.format.trees import load_tree
from ..checkpoints.state.rng import capture_rng, restore_rng
from ..checkpoints.state.sharded_steppers import put_back_spread
from ..checkpoints.state.sharded_weights import OPTIMIZER
from ..checkpoints.state.steppers import load_optimizer_tree, load_scaler_tree, load_scheduler_tree
from ..checkpoints.state.weights import check_listed, load_weights, stored_model
from ..checkpoints.storage.additions import own_place
from ..errors import CheckpointError
from ..held import replaced
from ..training_args import FastTrainingArguments
from .backends import Backend
from .disk_space import DiskSpace
from .now import Training
from .places import Places
from .progress_file import LossSums
from .resuming import Resumer
from .stateful import Stateful
from .team import Team

Describe = Callable[[Exception], str]  # what the disk refused, for all processes to hear

logger = logging.getLogger(__name__)


class Restorer:
    """Loads our checkpoints where Trainer asks for what it would unpickle; those of stock Trainer are left to it.

    All processes call each method.

    Attributes:
        knows_whole_loss: whether the sum of the losses of all steps of the run is known; checkpoints of stock Trainer
            do not say.
    """

    def __init__(
        self,
        args: FastTrainingArguments,
        team: Team,
        places: Places,
        disk_space: DiskSpace,
        resumer: Resumer,
        backend: Backend,
    ):
        self._args, self._team, self._places = args, team, places
        self._disk_space, self._resumer, self._backend = disk_space, resumer, backend
        self._best: Stored | None = None
        self._rng_after_evaluation: dict[str, Any] | None = None
        self.knows_whole_loss = True

    # --- weights ----------------------------------------------------------------------------------------------------

    def leaves_to_library(self, folder: str | Path) -> bool:
        """Whether DeepSpeed or Accelerate wrote the weights and states in a checkpoint, and alone can read them."""
        resumed = self._resumer.resumed
        return self._backend.is_of_library(Path(folder), None if resumed is None else resumed.stored)

    def load_model(self, model: nn.Module, folder: str, describe: Describe) -> None:
        """Loads the weights of a folder: of the checkpoint that the run continues from, the best one, or any other.

        Raises:
            CheckpointError: they do not fit, or files were put before them.
        """
        resumed = self._resumer.resumed
        known = [stored for stored in (resumed.stored if resumed else None, self._best) if stored is not None]
        own = next((stored for stored in known if stored.path.resolve() == Path(folder).resolve()), None)
        self._load_weights(model, Path(folder) if own is None else _find_weights(own), describe)

    def load_best(self, now: Training, describe: Describe, load_by_own: Callable[[str], None] | None) -> bool:
        """Loads the weights of the best checkpoint, at the end of training; False where that is left to Trainer.

        Args:
            load_by_own: the user's own `_load_from_checkpoint`, if there is one.
        """
        best = str(now.state.best_model_checkpoint)
        if self.leaves_to_library(best) and not self._backend.loads_itself:
            return False
        stored = self._team.on_main(lambda: self._places.store.open(best))
        if stored is None:  # of stock Trainer
            return False
        logger.info("Loading the best model, of step %d.", stored.step)
        if self._backend.loads_itself:
            self._backend.load_model(stored, self._places.own_folders, now.model_wrapped)
        elif load_by_own is None:
            self._load_weights(now.model, _find_weights(stored), describe)
        else:
            self._best = stored
            load_by_own(str(stored.path))
        return True

    def _load_weights(self, model: nn.Module, folder: Path, describe: Describe) -> None:
        checks_frozen = self._backend.checks_frozen
        self._team.load_together(lambda: load_weights(stored_model(model), folder, checks_frozen), describe)

    # --- optimizer, schedule, loss scale ----------------------------------------------------------------------------

    def reads_steppers(self, checkpoint: str | None) -> bool:
        """Whether optimizer and schedule are for `load_steppers`."""
        return checkpoint is not None and self._resumer.resumed is not None and not self.leaves_to_library(checkpoint)

    def load_steppers(self, optimizer: Any, lr_scheduler: Any, describe: Describe) -> None:
        """The states of optimizer and schedule, but for those that were allowed to change.

        Raises:
            CheckpointError: they do not fit.
        """
        resumed = self._resumer.resumed
        assert resumed is not None
        made, folder = read_hyperparameters(optimizer), resumed.stored.path

        def load() -> None:
            if "optim" not in resumed.allowed:
                tree = put_back_spread(load_tree(folder, "optimizer"), optimizer, folder / OPTIMIZER)
                load_optimizer_tree(optimizer, tree)
            if "lr_scheduler_type" not in resumed.allowed:
                load_scheduler_tree(lr_scheduler, load_tree(folder, "scheduler"))

        self._team.load_together(load, describe)
        apply_changes(optimizer, lr_scheduler, made, resumed.allowed, resumed.stored.step)

    @contextmanager
    def stock_steppers(
        self, checkpoint: str | None, optimizer: Any, lr_scheduler: Any, state: TrainerState
    ) -> Iterator[None]:
        """While Trainer, or a library, loads optimizer and schedule.

        Stock Trainer goes on with its checkpoint's learning rate, whatever the arguments say now.

        Raises:
            CheckpointError: a hyperparameter differs that `allow_changed` does not name, or a file holds more than
                tensors.
        """
        is_stock = checkpoint is not None and not self.leaves_to_library(checkpoint)
        made = read_hyperparameters(optimizer) if is_stock else []
        with tensors_only(checkpoint, "optimizer.pt or scheduler.pt"):
            yield
        if not is_stock:
            return
        changed, may_change = changed_hyperparameters(optimizer, made), self._args.allow_changed
        allowed = changed.keys() if "all" in may_change else changed.keys() & set(may_change)
        refuse(str(checkpoint), [line for name, line in changed.items() if name not in allowed])
        apply_changes(optimizer, lr_scheduler, made, allowed, state.global_step)

    def load_scaler(self, scaler: Any) -> None:
        """The loss scale, where the checkpoint has one."""
        resumed = self._resumer.resumed
        tree = None if resumed is None else resumed.tree("scaler")
        if tree is not None:
            load_scaler_tree(scaler, tree)

    # --- counters ---------------------------------------------------------------------------------------------------

    def correct_state(self, state: TrainerState, max_steps: int) -> None:
        """After Trainer has read its own state from the checkpoint."""
        # Trainer goes on with the intervals of the checkpoint (transformers 5.23), whatever the arguments say now.
        state.compute_steps(self._args, max_steps)
        resumed = self._resumer.resumed
        if resumed is not None and resumed.allowed & {"metric_for_best_model", "greater_is_better"}:
            state.best_metric = state.best_global_step = None
            self._disk_space.begin_run(None)

    def load_losses(self, global_step: int) -> LossSums | None:
        """The losses, logged and since the last log, so that what is logged is as in the uninterrupted run.

        Logs show the mean over the processes: where they are more or fewer now, each goes on with that mean. None
        where the checkpoint does not say, or there is none. Sets `knows_whole_loss`.
        """
        self.knows_whole_loss, resumed = global_step == 0, self._resumer.resumed
        if resumed is None:
            return None
        num_before = int(resumed.stored.manifest.facts.get("world_size", 1))
        ranks = [self._team.rank] if num_before == self._team.size else range(num_before)
        trees = [tree for rank in ranks if (tree := resumed.tree_of(rank)) is not None]
        if not trees:
            return None
        loss = torch.stack([tree["unlogged_loss"] for tree in trees]).mean(0).to(self._args.device)
        # Of a checkpoint that does not say, the sum over its steps is lost, or of how many it is.
        logged, left_out = resumed.progress.get("logged_loss"), resumed.progress.get("num_left_out")
        self.knows_whole_loss = logged is not None and (left_out is not None or self._args.nan_policy != "skip")
        return LossSums(loss.clone(), logged or 0.0, resumed.progress["last_logged_step"])

    def whole_loss(self, total: float, num_steps: int) -> float | None:
        """The mean loss over all steps taken; None if that is not known.

        Trainer 5.23 divides the losses of this call by the steps of this call, those left out among them.
        """
        return total / num_steps if num_steps > 0 and self.knows_whole_loss else None

    def load_parts(self, parts: Sequence[Stateful]) -> None:
        """What parts keep in `progress.json`; None for those that the checkpoint does not know."""
        resumed = self._resumer.resumed
        if resumed is None:
            return
        for part in parts:
            part.load(resumed.progress.get(part.name))

    # --- random states, and the evaluation between them -------------------------------------------------------------

    def load_rng(self) -> None:
        """Puts back this process's random states, those after an evaluation that was made up if there was one."""
        resumed = self._resumer.resumed
        assert resumed is not None
        own = resumed.tree_of(self._team.rank)
        if own is not None:
            restore_rng(self._rng_after_evaluation or own["rng"])
            return
        logger.warning("The checkpoint has no random state of process %d: seeded anew.", self._team.rank)
        set_seed(self._args.seed + resumed.stored.step + self._team.rank)

    def make_up_evaluation(self, evaluate: Callable[[], None]) -> None:
        """Runs the evaluation that a stop interrupted, from the random state it began with."""
        self._rng_after_evaluation, resumed = None, self._resumer.resumed
        if resumed is None or not resumed.pending:
            return
        own = resumed.tree_of(self._team.rank)
        if own is not None:
            restore_rng(own["rng"])
        evaluate()
        if own is not None:
            self._rng_after_evaluation = capture_rng(self._args.device)

    # --- the end ----------------------------------------------------------------------------------------------------

    @contextmanager
    def finalizing(self, state: TrainerState) -> Iterator[None]:
        """While Trainer ends training: it finds the best checkpoint, wherever it is, and deletes none."""
        # The main process alone knows of copies; the others would not join it in loading the best model.
        best, state.best_model_checkpoint = self._team.on_main(lambda: self._find_best(state))
        if self._args.load_best_model_at_end and state.best_global_step != best:
            logger.warning(
                "No checkpoint of the best step, %s, was saved: %s.",
                state.best_global_step,
                "the last weights are kept" if best is None else f"checkpoint-{best}, the best one that was, is taken",
            )
        # With a limit of 1, Trainer now deletes every other `checkpoint-*` folder, foreign ones too.
        with replaced(self._args, save_total_limit=None):
            yield

    def _find_best(self, state: TrainerState) -> tuple[int | None, str | None]:
        best = self._disk_space.best_saved_step(state)
        return best, None if best is None else str(self._places.path(best))


def _find_weights(stored: Stored) -> Path:
    """The folder of a checkpoint's weights, once it is sure that none were put before them."""
    place, listed = own_place(stored.path, frozenset(stored.manifest.files))
    check_listed(place, listed)
    return place


@contextmanager
def tensors_only(folder: str | None, names: str) -> Iterator[None]:
    """Says which file of a stock checkpoint was refused by Trainer, which unpickles tensors and plain values alone."""
    try:
        yield
    except Exception as error:  # of `pickle`, which hf_ext does not import; all others go on
        if type(error).__name__ != "UnpicklingError":
            raise
        raise CheckpointError(
            f"{folder}: {names} is damaged, or holds more than tensors; nothing was run. Continue from another "
            "checkpoint, or start from its weights alone (--model_name_or_path)."
        ) from error
