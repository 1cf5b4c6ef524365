"""Continuing a run exactly: the newest checkpoint that verifies, checked against the run that wants to continue it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import get_last_checkpoint

from ..checkpoints.agreement.argument_roles import ANOTHER_RUN, STEP_SIZE
from ..checkpoints.agreement.comparing import GROUPS, compare_runs, refuse
from ..checkpoints.agreement.hyperparameters import apply_changes, changed_hyperparameters
from ..checkpoints.manifest import PROGRESS, Stored, check_unlisted, read_json
from ..checkpoints.store import CheckpointStore
from ..errors import CheckpointError
from ..training_args import FastTrainingArguments
from .backends import Backend
from .team import Team

# Allowed to change, these move the place in the data that a number of optimizer steps stands for.
ORDER = frozenset({"data", "world_size", "seed", "data_seed", *STEP_SIZE})
STOCK_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")

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
    allowed: frozenset[str] = frozenset()
    progress: dict[str, Any] | None = None
    is_own: bool = False

    def state_of(self, name: str) -> Any:
        """What a part saved under a name; None where the checkpoint has nothing of it."""
        return (self.progress or {}).get(name)


class Resumer:
    """Takes "auto", True, a folder, or nothing (then `args.resume` decides).

    "auto" continues from the newest checkpoint of the output folder that verifies, whatever its run, or starts anew if
    there is none; what does not verify is reported and set aside. A run that differs from the checkpoint's in what
    would make the continuation another run is refused, difference by difference, unless `allow_changed` names it.

    Attributes:
        resumed: what the run continues from; None for a new run.
        why_not_again: why the same call would not go on from what this run saves; None where it would.
    """

    def __init__(self, trainer: Any, args: FastTrainingArguments, team: Team, backend: Backend):
        self._trainer, self._args, self._team, self._backend = trainer, args, team, backend
        self.resumed: Resumed | None = None
        self.why_not_again: str | None = None

    @property
    def _store(self) -> CheckpointStore:
        return self._trainer.checkpoints

    def find(self, asked: str | bool | None, facts: dict[str, Any]) -> Resumed | None:
        """What to continue from, the same on all processes, which all call it; sets `resumed`.

        Args:
            asked: see the class.
            facts: of the run that wants to continue, see `describe_run`.

        Raises:
            CheckpointError: a checkpoint that was named is damaged, or the run contradicts the checkpoint.
        """
        self._store.adopt(uuid.uuid4().hex)  # a second call of `train` is another run, unless it continues one
        self.resumed = None
        if asked is None:
            asked = self._args.resume_from_checkpoint or self._args.resume
        self.why_not_again = self._find_why_not_again(asked)
        found = self._look_together(asked)
        if found is not None:
            self._check_trusted(found.path if isinstance(found, Stored) else found)
            self._args.restore_callback_states_from_checkpoint = True  # else early stopping forgets its patience
            self.resumed = self._agree(found, facts) if isinstance(found, Stored) else Resumed(found)
        return self.resumed

    def check_arguments(self, facts: dict[str, Any], undecided: Collection[str]) -> None:
        """Raises what `find` would for arguments, the `undecided` left out; of "auto" alone, on the main process."""
        stored = (
            self._store.find_newest() if (self._args.resume_from_checkpoint or self._args.resume) == "auto" else None
        )
        if stored is not None:
            left_out = {*undecided, *STEP_SIZE}  # steps depend on more than arguments
            allowed = {*(self._args.allow_changed or ())} & {*GROUPS, *ANOTHER_RUN}
            old, new = (
                {"arguments": {name: value for name, value in one["arguments"].items() if name not in left_out}}
                for one in (stored.manifest.facts, facts)
            )
            refuse(stored.path, compare_runs(old, new, sorted(allowed)).contradictions)

    def apply_changes(self, optimizer: Any, lr_scheduler: Any, made: Any) -> None:
        """Makes allowed changes of rates and the like take effect, once Trainer has loaded the states.

        Args:
            made: settings of the optimizer's groups as the arguments of this run made them, see `read_hyperparameters`.

        Raises:
            CheckpointError: a stock checkpoint, which does not say what its run's arguments were, has others.
        """
        resumed = self.resumed
        if resumed is None:
            return
        allowed: Collection[str] = resumed.allowed
        if resumed.stored is None:
            changed, may_change = changed_hyperparameters(optimizer, made), self._args.allow_changed
            allowed = changed.keys() if "all" in may_change else changed.keys() & set(may_change)
            refuse(resumed.folder, [line for name, line in changed.items() if name not in allowed])
        apply_changes(optimizer, lr_scheduler, made, allowed)

    # --- looking ----------------------------------------------------------------------------------------------------

    def _find_why_not_again(self, asked: str | bool | None) -> str | None:
        if self._args.save_only_model:
            return "With save_only_model it holds weights alone: they can be a start, but no run goes on from them."
        if asked is True or asked == "auto":
            return None
        begins = "anew" if asked in (None, False, "no") else f"from {asked}"
        return f"The same command begins {begins}; with --resume auto (the recipes' default) it continues from there."

    def _look_together(self, asked: str | bool | None) -> Stored | Path | None:
        """The main process looks, verifies and sets aside."""
        outcome: list[Any] = [None, None]
        if self._team.writes:
            try:
                outcome = [self._look(asked), None]
            except CheckpointError as error:
                outcome = [None, error]
        if self._team.size > 1:
            broadcast_object_list(outcome)
        found, refusal = outcome
        if refusal is not None:
            raise refusal
        return found

    def _look(self, asked: str | bool | None) -> Stored | Path | None:
        store = self._store
        store.sweep()
        if asked in (None, False, "no"):
            store.set_aside_after(-1)
            return None
        if asked is True or asked == "auto":
            stored = store.find_newest()
            if stored is None and asked is True:
                raise CheckpointError(
                    f"{store.folder}: no checkpoint there that could be continued.{self._name_stock()}"
                )
            if stored is None:
                store.set_aside_after(-1)
                logger.info("No checkpoint in %s: training starts at step 0.", store.folder)
            return stored
        folder = Path(str(asked))
        return store.open(folder) or _check_stock(folder)

    def _name_stock(self) -> str:
        last = get_last_checkpoint(self._args.output_dir)
        if last is None:
            return ""
        return (
            f" One that hf_ext did not write cannot be verified, and is continued by its name alone: "
            f"resume_from_checkpoint={last!r}."
        )

    def _check_trusted(self, folder: Path) -> None:
        """Trainer loads tensors and plain values; FSDP and DeepSpeed unpickle what they find."""
        if self._backend.is_spread and not self._store.has(folder):
            raise CheckpointError(
                f"{folder} is not in this run's output folder, and {self._backend.written_by} reads its files in a way "
                "that can run anything. If you trust it, give its folder as --output_dir with --resume auto, or start "
                "a new run from its weights (--model_name_or_path)."
            )

    # --- comparing --------------------------------------------------------------------------------------------------

    def _agree(self, stored: Stored, facts: dict[str, Any]) -> Resumed:
        """Compares this run with the checkpoint's, and takes over its identity."""
        check_unlisted(stored)
        changes = compare_runs(stored.manifest.facts, facts, self._args.allow_changed)
        for note in changes.notes:
            logger.info("Since %s: %s", stored.path.name, note)
        refuse(stored.path, changes.contradictions)
        allowed = frozenset(changes.allowed)
        if allowed & ORDER:
            logger.warning("Rows come in another order from here on: some may be seen twice in this epoch, others not.")
        progress, is_own = read_json(stored.path / PROGRESS), self._store.has(stored.path)
        if progress.get("only_model"):
            raise CheckpointError(
                f"{stored.path} holds weights alone (save_only_model), from which training cannot be continued: load "
                "it as the model to start from, or --resume no."
            )
        if is_own:
            self._store.adopt(stored.run_id)
        if self._team.writes:
            self._store.set_aside_after(stored.step if is_own else -1)
        logger.info("Continuing from %s (epoch %.2f).", stored.path, stored.manifest.epoch)
        return Resumed(stored.path, stored, allowed, progress, is_own)


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
