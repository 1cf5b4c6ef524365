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
from ..checkpoints.format.stored import Stored
from ..checkpoints.format.trees import load_tree
from ..checkpoints.state.progress import check_trainer_state, read_progress
from ..errors import CheckpointError
from ..training_args import FastTrainingArguments
from .backends import Backend
from .places import Places
from .team import Team

# Allowed to change, these move the place in the data that a number of optimizer steps stands for.
ORDER = frozenset({"data", "world_size", "seed", "data_seed", *STEP_SIZE})
STOCK_FILES = ("optimizer.pt", "scheduler.pt", "trainer_state.json")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint of ours that a run continues from, verified and compared.

    Attributes:
        stored: the checkpoint.
        allowed: names of what differs from its run and was allowed to.
        progress: its `progress.json`.
        is_own: whether it is in this run's own folder.
    """

    stored: Stored
    allowed: frozenset[str]
    progress: dict[str, Any]
    is_own: bool

    @property
    def position(self) -> dict[str, Any] | None:
        """Where a stream of training data stood; None for other data, and where it does not say."""
        return self.progress["data_position"]

    @property
    def pending(self) -> bool:
        """Whether a stop interrupted an evaluation that is still to be made."""
        return self.progress["evaluation_pending"]

    @property
    def best(self) -> int | None:
        """Step of the best checkpoint in this run's own folder."""
        return self.progress["best_saved_step"] if self.is_own else None

    @property
    def own_step(self) -> int | None:
        """Its step, if it is one of this run's own folder."""
        return self.stored.step if self.is_own else None

    def tree(self, name: str) -> dict[str, Any] | None:
        """What was saved under a name; None where the checkpoint has nothing of it."""
        return load_tree(self.stored.path, name) if f"{name}.json" in self.stored.manifest.files else None

    def tree_of(self, rank: int) -> dict[str, Any] | None:
        """What a process wrote for itself; None where there were fewer processes."""
        return self.tree(f"rank_{rank}")


class Resumer:
    """Takes "auto", True, a folder, or nothing (then `args.resume` decides).

    "auto" continues from the newest checkpoint of the output folder that verifies, whatever its run, or starts anew if
    there is none; what does not verify is reported and set aside. A run that differs from the checkpoint's in what
    would make the continuation another run is refused, difference by difference, unless `allow_changed` names it.

    Attributes:
        resumed: what the run continues from; None for a new run, and for one that continues stock Trainer's.
        why_not_again: why the same call would not go on from what this run saves; None where it would.
    """

    def __init__(self, args: FastTrainingArguments, team: Team, places: Places, backend: Backend):
        self._args, self._team, self._places, self._backend = args, team, places, backend
        self.resumed: Resumed | None = None
        self.why_not_again: str | None = None

    def find(self, asked: str | bool | None, facts: dict[str, Any]) -> str | None:
        """The folder to continue from, the same on all processes, which all call it; sets `resumed`.

        Args:
            asked: see the class.
            facts: of the run that wants to continue, see `describe_run`.

        Raises:
            CheckpointError: a checkpoint that was named is damaged, or the run contradicts the checkpoint.
        """
        self._places.adopt(uuid.uuid4().hex)  # a second call of `train` is another run, unless it continues one
        self.resumed = None
        if asked is None:
            asked = self._args.resume_from_checkpoint or self._args.resume
        self.why_not_again = self._find_why_not_again(asked)
        found = self._look_together(asked)
        if isinstance(found, Stored):
            self._backend.agrees_with(found, self._places.own_folders)
            self.resumed = self._agree(found, facts)
            return str(found.path)
        return None if found is None else str(found)

    def check_arguments(self, facts: dict[str, Any], undecided: Collection[str]) -> None:
        """Raises what `find` would for arguments, the `undecided` left out; of "auto" alone, on the main process."""
        stored = self._places.newest() if (self._args.resume_from_checkpoint or self._args.resume) == "auto" else None
        if stored is not None:
            left_out = {*undecided, *STEP_SIZE}  # steps depend on more than arguments
            allowed = {*(self._args.allow_changed or ())} & {*GROUPS, *ANOTHER_RUN}
            old, new = (
                {"arguments": {name: value for name, value in one["arguments"].items() if name not in left_out}}
                for one in (stored.manifest.facts, facts)
            )
            refuse(stored.path, compare_runs(old, new, sorted(allowed)).contradictions)

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
        places = self._places
        places.sweep()
        if asked in (None, False, "no"):
            places.set_aside_after(-1)
            return None
        if asked is True or asked == "auto":
            stored = places.newest()
            if stored is None and asked is True:
                raise CheckpointError(
                    f"{places.folder}: no checkpoint there that could be continued.{self._name_stock()}"
                )
            if stored is None:
                places.set_aside_after(-1)
                logger.info("No checkpoint in %s: training starts at step 0.", places.folder)
            return stored
        folder = Path(str(asked))
        return places.store.open(folder) or _check_stock(folder)

    def _name_stock(self) -> str:
        last = get_last_checkpoint(self._args.output_dir)
        if last is None:
            return ""
        return (
            f" One that hf_ext did not write cannot be verified, and is continued by its name alone: "
            f"resume_from_checkpoint={last!r}."
        )

    def _agree(self, stored: Stored, facts: dict[str, Any]) -> Resumed:
        """Compares this run with the checkpoint's, and takes over its identity."""
        changes = compare_runs(stored.manifest.facts, facts, self._args.allow_changed)
        for note in changes.notes:
            logger.info("Since %s: %s", stored.path.name, note)
        refuse(stored.path, changes.contradictions)
        allowed = frozenset(changes.allowed)
        if allowed & ORDER:
            logger.warning("Rows come in another order from here on: some may be seen twice in this epoch, others not.")
        progress = read_progress(stored.path)
        check_trainer_state(stored.path, stored.step)
        if progress["only_model"]:
            raise CheckpointError(
                f"{stored.path} holds weights alone (save_only_model), from which training cannot be continued: load "
                "it as the model to start from, or --resume no."
            )
        is_own = self._places.is_own(stored)
        if is_own:
            self._places.adopt(stored.run_id)
        if self._team.writes:
            self._places.set_aside_after(stored.step if is_own else -1)
        self._args.restore_callback_states_from_checkpoint = True  # else early stopping forgets its patience
        logger.info("Continuing from %s (epoch %.2f).", stored.path, stored.manifest.epoch)
        return Resumed(stored, allowed, progress, is_own)


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
