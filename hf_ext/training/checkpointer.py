"""Checkpoints of a training run: whole or absent, without pickle, within a budget of disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState

from ..checkpoints.format.trees import save_tree, tree_bytes
from ..checkpoints.retention.budget import Sizes
from ..checkpoints.state.finite import not_finite, optimizer_tensors
from ..checkpoints.state.rng import capture_rng
from ..checkpoints.state.steppers import optimizer_tree, scaler_tree, scheduler_tree
from ..checkpoints.state.weights import stored_model
from ..checkpoints.storage.staging import Staging
from ..disk import describe_failure
from ..errors import CheckpointError, NotFiniteError
from ..out_of_memory import attempt_twice, is_out_of_memory
from ..training_args import FastTrainingArguments
from ..zero import own_part
from .backends import Backend
from .carried import Carried
from .commit import Committer, Written
from .disk_space import DiskSpace
from .now import Training
from .places import Places
from .progress_file import LossSums, Moment, write_progress
from .team import Team


@dataclass(frozen=True)
class Writers:
    """What of Trainer takes part in a save, in which users' classes have a say; handed over for one call.

    Attributes:
        model: writes it into a folder, along Trainer's chain; see `CheckpointModel`.
        library_states: `Trainer._save_optimizer_and_scheduler`, where a library keeps its own files.
        sizes: upper bounds of what one checkpoint takes.
    """

    model: Callable[[Path], None]
    library_states: Callable[[str], None]
    sizes: Callable[[], Sizes]


class Checkpointer:
    """Replaces Trainer's in-place checkpoints: staged beside the target, hashed, renamed, then rotated.

    A checkpoint that cannot be written leaves the one before it valid; training goes on without, until
    three in a row have failed. All processes call `save` and `check_finite`.

    It also keeps the moment that a checkpoint in the middle of an optimizer step, or of an evaluation that is given up,
    goes back to.
    """

    def __init__(
        self,
        args: FastTrainingArguments,
        team: Team,
        places: Places,
        disk_space: DiskSpace,
        committer: Committer,
        backend: Backend,
        carried: Carried,
    ):
        self._args, self._team, self._places, self._disk_space = args, team, places, disk_space
        self._committer, self._backend, self._carried = committer, backend, carried
        self._rng_between_epochs: dict[str, Any] = {}
        self._held: Moment | None = None
        self._is_checked = False  # whether a save would work, since training began

    # --- the moment that a checkpoint goes back to ------------------------------------------------------------------

    def moment(self, unlogged_loss: torch.Tensor, state: TrainerState) -> Moment:
        """Random states, the loss since the last log, and tokens seen, of this process."""
        at_step = {part.name: part.state() for part in self._carried.at_step}
        tokens = int(state.num_input_tokens_seen)
        return Moment(capture_rng(self._args.device), unlogged_loss.detach().clone(), tokens, at_step)

    def hold(self, moment: Moment) -> None:
        """Checkpoints go back to this moment until `let_go`."""
        self._held = moment

    def let_go(self) -> None:
        """Checkpoints are of the moment when they are written."""
        self._held = None

    def begin_epoch(self) -> None:
        """Of a checkpoint between two epochs Trainer restores the random state before the loader draws from it."""
        self._rng_between_epochs = capture_rng(self._args.device)

    def begin_step(self, unlogged_loss: torch.Tensor, state: TrainerState) -> None:
        """An accumulation cycle begins. Cost: about 20 microseconds, and nothing without accumulation."""
        if self._args.gradient_accumulation_steps == 1:
            return
        moment = self.moment(unlogged_loss, state)
        if float(state.epoch or 0).is_integer():
            moment = dataclasses.replace(moment, rng=self._rng_between_epochs)
        self.hold(moment)

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, now: Training, sums: LossSums, writers: Writers, is_read_at_once: bool) -> None:
        """Writes the checkpoint of the last optimizer step, and begins its commit.

        Args:
            is_read_at_once: whether something, on this process, reads the checkpoint as soon as it is saved. Who then
                waited for the commit alone would wait for the others, who train on: if one process waits, all do.

        Raises:
            DiskFailure: too many checkpoints in a row could not be written.
            CheckpointError: the optimizer or the schedule holds what no checkpoint can.
        """
        failure = self.write(now, sums, writers)
        if failure is not None:
            self._committer.note_failure(now.state.global_step, failure)
        elif self._team.agree([is_read_at_once])[0]:
            self._committer.place(now.state)

    def write(self, now: Training, sums: LossSums, writers: Writers) -> str | None:
        """As `save`, without waiting for it; why the disk refused, the same on all processes, or None."""
        step, began, store = now.state.global_step, time.perf_counter(), self._places.store
        moment = self._held or self.moment(sums.unlogged, now.state)
        prepared: list[tuple[Staging, int]] = []
        spread: dict[str, torch.Tensor] = {}

        def prepare() -> None:
            sizes = writers.sizes()
            self._disk_space.make_room(now, sizes)
            prepared.append((store.stage(step), sizes.full_bytes))

        def write() -> None:
            write_once = partial(self._write_state, store.staging_path(step), now, sums, moment, writers)
            # What is spread is gathered while it is written, which no process can begin again alone.
            spread.update(write_once() if self._backend.is_spread else attempt_twice(write_once))

        def write_spread() -> None:
            self._backend.write_parts(stored_model(now.model), store.staging_path(step), spread)

        def describe(error: Exception) -> str:
            if is_out_of_memory(error):
                return f"{store.folder}: checkpoint-{step} was not written, out of memory twice ({error})."
            return describe_failure(error, store.folder, writers.sizes().full_bytes)

        actions = [prepare if self._team.writes else None, write]
        actions += [write_spread] if self._backend.writes_parts else []
        for action in actions:
            failure = self._team.together(action, describe)
            if failure is not None:
                for staging, _ in prepared:
                    staging.abandon()
                return failure
        self._committer.begin(Written(step, float(now.state.epoch or 0), began, *(prepared[0] if prepared else ())))
        return None

    def _write_state(
        self, folder: Path, now: Training, sums: LossSums, moment: Moment, writers: Writers
    ) -> dict[str, torch.Tensor]:
        """Writes this process's part of a checkpoint; the main process's holds what all share.

        Returns:
            Optimizer state that is spread over processes, which `Backend.write_parts` writes.
        """
        writes, only_model = self._team.writes, self._args.save_only_model
        if not folder.is_dir():  # made by the main process
            raise CheckpointError(
                f"Process {self._team.rank} does not see {folder}. Several machines need an output_dir (and "
                "local_checkpoint_dir) on a disk that they share."
            )
        own = {"rng": moment.rng, "unlogged_loss": moment.unlogged_loss}
        own |= {part.name: part.state() for part in self._carried.of_process}
        save_tree(folder, f"rank_{self._team.rank}", own)
        if writes:
            scaler = getattr(now.accelerator, "scaler", None)
            trees = [] if only_model else [(part.name, part.state()) for part in self._carried.trees]
            trees += [] if only_model or scaler is None else [("scaler", scaler_tree(scaler))]
            for name, tree in trees:
                if tree is not None:
                    save_tree(folder, name, tree)
            self._write_progress(folder, now, sums, moment)
        writers.model(folder)
        if not self._backend.keeps_library_files:
            return {} if only_model else self._write_steppers(folder, now)
        if not only_model:
            writers.library_states(str(folder))
        return {}

    def _write_progress(self, folder: Path, now: Training, sums: LossSums, moment: Moment) -> None:
        best, only_model = self._disk_space.best_saved_step(now.state), self._args.save_only_model
        entries = {"best_saved_step": best, "only_model": only_model, **moment.at_step}
        entries |= {part.name: part.state() for part in self._carried.progress}
        write_progress(folder, now, sums, moment, entries)

    def _write_steppers(self, folder: Path, now: Training) -> dict[str, torch.Tensor]:
        """Optimizer and schedule: the main process writes what all share, and what is spread is returned."""
        if not (self._team.writes or self._backend.writes_parts):
            return {}
        tree = optimizer_tree(now.optimizer, self._disk_space.optimizer_state_dtype)
        tree, spread = self._backend.take_out_spread(tree)
        if self._team.writes:
            save_tree(folder, "scheduler", scheduler_tree(now.lr_scheduler))
            save_tree(folder, "optimizer", tree)
        return spread

    # --- what must not, or cannot, be saved -------------------------------------------------------------------------

    def begin_training(self) -> None:
        """`check_storable` is due after the first optimizer step."""
        self._is_checked = False

    def end_step(self, now: Training) -> None:
        """The accumulation cycle is complete; after the first step that was made, the optimizer has state."""
        self.let_go()
        if not (self._is_checked or now.accelerator.optimizer_step_was_skipped):
            self._is_checked = True
            self.check_storable(now)

    def check_storable(self, now: Training) -> None:
        """Raises CheckpointError where a save would fail, whatever the disk: known after a step, not after hours.

        Cost: no tensor is copied.
        """
        args = self._args
        is_saved = args.save_strategy != "no" or args.save_minutes or args.max_hours
        is_library = self._backend.keeps_library_files
        if not is_saved or args.save_only_model or is_library or now.state.is_hyper_param_search:
            return
        optimizer = optimizer_tree(now.optimizer, self._disk_space.optimizer_state_dtype)
        scheduler = scheduler_tree(now.lr_scheduler)
        try:
            tree_bytes(self._backend.take_out_spread(optimizer)[0])
            tree_bytes(scheduler)
        except CheckpointError as error:
            names = f"{optimizer['class']} and {scheduler['class']}"
            raise CheckpointError(
                f"No checkpoint can hold the state of {names}: {error} Keep it as one of these, or "
                'give save_only_model=True (weights alone, with which no run can be continued) or save_strategy="no".'
            ) from error

    def check_finite(self, now: Training, name_last_good: Callable[[], str], with_optimizer: bool = False) -> None:
        """Raises NotFiniteError if a trainable weight, or optimizer state, is NaN or infinite.

        Args:
            name_last_good: what is left to continue from; all processes call it, if any.

        Cost: one pass over them and one device synchronisation.
        """
        tensors = [(name, own_part(p)) for name, p in now.model.named_parameters() if p.requires_grad]
        if with_optimizer and not (self._backend.keeps_library_files or self._args.save_only_model):
            tensors += optimizer_tensors(now.optimizer, now.model.named_parameters())
        names = attempt_twice(partial(not_finite, tensors))
        if self._backend.is_spread:  # each process looked at its part
            count = torch.tensor(len(names), device=now.accelerator.device)
            names = names or (["in another process's part"] if now.accelerator.reduce(count).item() else [])
        if not names:
            return
        raise NotFiniteError(
            f"{len(names)} of the weights and optimizer states are NaN or infinite at step {now.state.global_step} "
            f"(first: {names[0]}); {name_last_good()}. "
            "Nothing was overwritten. Usual causes: a learning rate that is too high, labels that are not finite, "
            "float16 without loss scaling. Continue with --resume auto --allow_changed learning_rate and a lower rate."
        )
