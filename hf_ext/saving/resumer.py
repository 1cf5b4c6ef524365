"""Continuing a run exactly: the newest checkpoint that verifies, checked against the run that wants to continue it."""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints import PROGRESS, STEP_SIZE, Stored, check_unlisted, compare_runs, describe_run, read_json, refuse
from ..errors import CheckpointError
from ..files import Json
from ..plan import Plan
from ..processes import do_on_main
from ..training import Backend, Carried, Host, name_evaluation_sets
from ..training_args import FastTrainingArguments
from .saver import Saver

# Allowed to change, these move the place in the data that a number of optimizer steps stands for.
ORDER = frozenset({"data", "world_size", "seed", "data_seed", "accelerator_config.split_batches", *STEP_SIZE})
RATES = frozenset({"learning_rate", "encoder_learning_rate"})
SETTINGS = ("initial_lr", "weight_decay", "betas", "eps")  # of the optimizer's groups, as arguments make them
STOCK_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state*.pth")
NEW_SEARCH = (
    "The same search begins anew, unless its study is stored: hyperparameter_search(..., study_name=NAME, "
    'storage="sqlite:///FILE", load_if_exists=True) goes on with further trials.'
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that a run continues from; of ours, verified and compared.

    Attributes:
        folder: of the checkpoint; `stored`: the same if it is one of ours, None for one of stock Trainer.
        allowed: names of what differs from its run and was allowed to.
        progress: its `progress.json`; empty for one of stock Trainer.
        is_own: whether it is in this run's own folder.
    """

    folder: Path
    stored: Stored | None = None
    allowed: Collection[str] = ()
    progress: Json = field(default_factory=dict)
    is_own: bool = False


class Resumer:
    """Takes "auto", True, a folder, or nothing (then `args.resume` decides).

    "auto" continues from the newest checkpoint of the output folder that verifies, whatever its run, or starts anew if
    there is none; what does not verify is reported and set aside. A run that differs from the checkpoint's in what
    would make the continuation another run is refused, difference by difference, unless `allow_changed` names it.

    Args:
        carried: the parts whose states are in each checkpoint.

    Attributes:
        resumed: what the run continues from; None for a new run.
        why_not_again: why the same call would not go on from what this run saves; None where it would.
    """

    def __init__(
        self,
        trainer: Host,
        backend: Backend,
        plan: Plan,
        saver: Saver,
        carried: Sequence[Carried],
    ):
        self._trainer = trainer
        self._backend = backend
        self._plan = plan
        self._saver = saver
        self._carried = carried
        self.resumed: Resumed | None = None
        self.why_not_again: str | None = None
        self._made: list[Json] = []

    def describe(self) -> Json:
        """Returns the facts of the run, see `describe_run`."""
        held_out = {**name_evaluation_sets(self._trainer.eval_dataset), "test": self._trainer.test_dataset}
        return describe_run(self._trainer, held_out, self._backend.written_by, self._plan.compared())

    def begin(self, asked: str | bool | None, is_trial: bool = False) -> str | None:
        """Finds the folder to continue from, the same on all processes, which all call it; sets `resumed`.

        Args:
            asked: see the class. is_trial: whether it is one of a search, which begins anew unless `asked` says more.

        Raises:
            CheckpointError: a checkpoint that was named is damaged, or the run contradicts the checkpoint.
        """
        args = self._trainer.args
        store = self._saver.store
        facts = self.describe()
        store.adopt(uuid.uuid4().hex)  # a second call of `train` is another run, unless it continues one
        if asked is None:
            asked = "no" if is_trial else args.resume_from_checkpoint or args.resume
        self.why_not_again = NEW_SEARCH if is_trial else _find_why_not_again(args, asked)
        found = do_on_main(args, lambda: self._look(asked))
        self.resumed = None
        if found is not None:
            args.restore_callback_states_from_checkpoint = True  # else early stopping forgets its patience
            self._check_trusted(found.path if isinstance(found, Stored) else found)
            self.resumed = self._compare(found, facts) if isinstance(found, Stored) else Resumed(found)
        resumed = self.resumed
        own = Resumed(Path())
        if resumed is not None and resumed.is_own:
            own = resumed
        step = None if own.stored is None else own.stored.step
        self._saver.begin_run(facts, step, own.progress.get("best_saved_step"))
        return None if resumed is None else str(resumed.folder)

    def go_on(self) -> None:
        """Restores what Trainer does not: states of parts, and arguments that were allowed to change."""
        trainer = self._trainer
        resumed = self.resumed
        state = trainer.state
        for part in self._carried:
            part.load(None if resumed is None else resumed.progress.get(part.name))
        if resumed is None:
            return
        if (losses := resumed.progress.get("losses")) and state.global_step < state.max_steps:  # since the last log
            each = losses["unlogged"]  # of each process: a sum of means is rounded otherwise than a mean of sums
            mean = sum(each) / len(each)
            is_same = len(each) == trainer.args.world_size
            trainer._tr_loss.fill_(each[trainer.args.process_index] if is_same else mean)
            trainer._total_loss_scalar = -mean  # which Trainer's `train_loss`, of this session's steps, is not to count
            trainer._globalstep_last_logged = losses["last_logged_step"]
        state.compute_steps(trainer.args, state.max_steps)  # Trainer goes on with the intervals of the checkpoint
        self._apply_changes()
        has_other_scores = {*resumed.allowed} & {"metric_for_best_model", "greater_is_better", "eval_data"}
        if has_other_scores and state.global_step < state.max_steps:  # else no evaluation comes that could be the best
            state.best_metric = state.best_global_step = state.best_model_checkpoint = None
            self._saver.retention.best_saved = None

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self, asked: str | bool | None) -> Stored | Path | None:
        """Looks, verifies and sets aside, on the main process."""
        store = self._saver.store
        store.sweep()
        if asked is True or asked == "auto":
            stored = store.find_newest()
            if stored is not None:
                return stored
            if asked is True:
                last = get_last_checkpoint(self._trainer.args.output_dir)
                hint = f" One of stock Trainer is continued by its name: resume_from_checkpoint={last!r}."
                raise CheckpointError(
                    f"{store.folder}: no checkpoint there that could be continued.{hint if last else ''}"
                )
            logger.info("No checkpoint in %s: training starts at step 0.", store.folder)
        elif asked not in (None, False, "no"):
            folder = Path(str(asked))
            return store.open(folder) or _check_stock(folder)
        store.set_aside_after(-1)
        return None

    def _check_trusted(self, folder: Path) -> None:
        """Refuses foreign folders where files are unpickled, as FSDP and DeepSpeed do; Trainer loads plain values."""
        backend = self._backend
        if backend.is_sharded and not self._saver.store.has(folder):
            raise CheckpointError(
                f"{folder} is not in this run's output folder, and {backend.written_by} reads its files in a way that "
                "can run anything. If you trust it, give its folder as --output_dir with --resume auto, or start a new "
                "run from its weights (--model_name_or_path)."
            )

    def _compare(self, stored: Stored, facts: Json) -> Resumed:
        """Compares this run with the checkpoint's, and takes over its identity."""
        trainer = self._trainer
        store = self._saver.store
        check_unlisted(stored)
        changes = compare_runs(stored.manifest.facts, facts, trainer.args.allow_changed)
        refuse(stored.path, changes)
        if changes.allowed & ORDER:
            logger.warning("Rows come in another order from here on: some may be seen twice in this epoch, others not.")
        progress = read_json(stored.path / PROGRESS)
        is_own = store.has(stored.path)
        if progress.get("only_model"):
            raise CheckpointError(
                f"{stored.path} holds weights alone (save_only_model), from which training cannot be continued: load "
                "it as the model to start from, or --resume no."
            )
        if is_own:
            store.adopt(stored.run_id)
        if trainer.args.should_save:
            store.set_aside_after(stored.step if is_own else -1)
        logger.info("Continuing from %s (epoch %.2f).", stored.path, stored.manifest.epoch)
        return Resumed(stored.path, stored, changes.allowed, progress, is_own)

    # --- what may change --------------------------------------------------------------------------------------------

    def remember(self, optimizer: Optimizer) -> None:
        """Keeps what this run's arguments made of the optimizer's groups, before a checkpoint brings back its own."""
        # None of an optimizer that DeepSpeed makes from its own file, which is compared instead.
        groups = [{"initial_lr": group["lr"], **group} for group in getattr(optimizer, "param_groups", ())]
        self._made = [{key: copy.copy(value) for key, value in group.items() if key != "params"} for group in groups]

    def _apply_changes(self) -> None:
        """Makes allowed changes take effect, although the states that Trainer has loaded brought the old values back.

        With nothing allowed that concerns them, optimizer and schedule stay as they are, bit for bit. A new learning
        rate goes on where the schedule stands; of one that is no function of the step it starts again.
        """
        optimizer = self._trainer.optimizer
        schedule = self._trainer.lr_scheduler
        schedule = getattr(schedule, "scheduler", schedule)  # which Accelerate wrapped
        allowed = {*self.resumed.allowed} if self.resumed is not None else set()
        if optimizer is None or schedule is None or not (allowed and self._made):
            return
        groups = optimizer.param_groups
        for group, made in zip(groups, self._made):  # what was not allowed is the same in both
            group.update({key: made[key] for key in SETTINGS if key in made})
        if isinstance(schedule, LambdaLR):  # as all of transformers' schedules that do not follow a metric
            schedule.base_lrs = [group["initial_lr"] for group in groups]
            rates = [base * at(schedule.last_epoch) for base, at in zip(schedule.base_lrs, schedule.lr_lambdas)]
        elif allowed & RATES:
            rates = [made["initial_lr"] for made in self._made]
        else:
            return
        schedule._last_lr = rates
        for group, rate in zip(groups, rates):
            group["lr"] = rate


def _find_why_not_again(args: FastTrainingArguments, asked: str | bool | None) -> str | None:
    if args.save_only_model:
        return "With save_only_model it holds weights alone: they can be a start, but no run goes on from them."
    if asked is True or asked == "auto":
        return None
    begins = "anew" if asked in (None, False, "no") else f"from {asked}"
    return f'The same command begins {begins}; with --resume auto (resume="auto" in a script) it continues from there.'


def _check_stock(folder: Path) -> Path:
    """Checks that a folder is a checkpoint of stock Trainer; warns of what it lacks."""
    if not (folder / "trainer_state.json").is_file():
        raise CheckpointError(f"{folder}: no checkpoint there (no manifest.json and no trainer_state.json).")
    missing = [name.replace("*", "") for name in STOCK_FILES if not any(folder.glob(name))]
    logger.warning(
        "%s is a stock Trainer checkpoint: its files cannot be verified. Data and most arguments are not compared%s.",
        folder,
        f", and it lacks {', '.join(missing)}, so that training does not continue exactly" if missing else "",
    )
    return folder
