"""Room for checkpoints: what stays, what goes, and what is stored less of where the budget is small."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import TrainerState

from ..disk import free_bytes, used_bytes
from ..memory.stored import optimizer_bytes
from .budget import GB, SMALL_FILES_BYTES, Degradation, Sizes, check_budget, choose_degradation
from .places import Places
from .retention import Entry, Policy, SavePlan, plan_cleanup, plan_save
from .store import STAGING
from .stored import Stored
from .weights import export_bytes, weights_bytes

# As Trainer, accelerate (FSDP) and DeepSpeed call them.
OPTIMIZER_FILES = re.compile(r"optimizer(\.pt|\.bin|_0/.*)|global_step\d+/.*")
TENSOR_BYTES = 512  # torch.save's description of one tensor

logger = logging.getLogger(__name__)


class DiskSpace:
    """Keeps the output folder within `save_total_size_gb`, at the moment of writing too, and rotates checkpoints.

    For the main process; any process may ask for sizes and for the best checkpoint.
    """

    def __init__(self, args: Any, places: Places, backend: Any):
        self._args, self._places, self._backend = args, places, backend
        self._degradation: Degradation | None = None
        self._best_saved: int | None = None

    # --- what is asked for ------------------------------------------------------------------------------------------

    def sizes(self, model: nn.Module, carried_bytes: int) -> Sizes:
        """Upper bounds of what one checkpoint takes, without degradation.

        Args:
            carried_bytes: the most that other parts' arrays take.
        """
        small_bytes = SMALL_FILES_BYTES + carried_bytes
        of_library = self._backend.checkpoint_sizes(model, small_bytes)
        if of_library is not None:
            return of_library
        weights = weights_bytes(model)
        if self._args.save_only_model:
            return Sizes(weights, 0, SMALL_FILES_BYTES)
        return Sizes(weights, self._optimizer_bytes(model), small_bytes)

    def _optimizer_bytes(self, model: nn.Module) -> int:
        """Of the optimizer's state, by its name; of one that is not known, what AdamW takes."""
        is_muon = "muon" in (self._args.optim_ext or ())
        known = optimizer_bytes(model, str(self._args.optim), is_muon, self._args.block_pattern)[0]
        return known + 3 * TENSOR_BYTES * sum(p.requires_grad for p in model.parameters())

    def policy(self) -> Policy:
        """What the arguments ask to keep; with degradation, what was decided when training began."""
        if self._degradation:
            return self._degradation.policy
        gb = self._args.save_total_size_gb
        return Policy(
            limit=self._args.save_total_limit,
            keep_best=self._args.metric_for_best_model is not None,
            keep_epoch=self._args.keep_epoch_checkpoint,
            budget_bytes=None if gb is None else round(gb * GB),
        )

    def check(self, model: nn.Module, count: Callable[[], Sizes]) -> None:
        """Refuses a budget that cannot hold what will be written, or decides to store less; without one, nothing.

        Args:
            count: says what a checkpoint takes.

        Raises:
            ArgumentError: it is too small for what is to be kept; the message has the arithmetic.
        """
        self._degradation = None
        if self._args.save_total_size_gb is None:
            return
        sizes, policy, other_bytes = count(), self.policy(), self.other_bytes(model)
        if self._args.disk_policy == "refuse":
            check_budget(sizes, policy, other_bytes)
            return
        self._degradation = choose_degradation(sizes, policy, other_bytes)
        if self._degradation.steps:
            logger.warning("save_total_size_gb: checkpoints store less: %s.", ", ".join(self._degradation.steps))

    # --- the best one -----------------------------------------------------------------------------------------------

    def begin_run(self, best_saved: int | None) -> None:
        """`best_saved`: step of the best checkpoint that a continued run finds in its folder."""
        self._best_saved = best_saved

    def best_saved_step(self, state: TrainerState) -> int | None:
        """Step of the best checkpoint there is: where the best step itself was not saved, that of the best before."""
        return next((step for step in (state.best_global_step, self._best_saved) if self._places.path(step)), None)

    def find_best(self, state: TrainerState) -> tuple[int | None, str | None]:
        """Step and folder of the best checkpoint there is."""
        best = self.best_saved_step(state)
        return best, None if best is None else str(self._places.path(best))

    # --- making room ------------------------------------------------------------------------------------------------

    def make_room(self, now: Any, sizes: Sizes) -> None:
        """Deletes, before anything is written, what budget or disk cannot hold beside the checkpoint of this step.

        Args:
            now: the trainer, whose `state` and `model` are to be saved.

        Raises:
            OSError: the budget has no room for it, whatever is deleted.
        """
        store, policy = self._places.store, self.policy()
        store.make_way(now.state.global_step)
        if policy.budget_bytes is not None:
            self._free_room(now.state, policy, sizes, self.other_bytes(now.model))
        free = free_bytes(store.folder)
        if free < sizes.full_bytes:
            held = sum(entry.num_bytes for entry in self._entries())
            plan = self._plan(now.state, dataclasses.replace(policy, budget_bytes=free + held), sizes, 0)
            self._carry_out(plan.strip_first, plan.delete_first)

    def _free_room(self, state: TrainerState, policy: Policy, sizes: Sizes, other_bytes: int) -> None:
        plan = self._plan(state, policy, sizes, other_bytes)
        if not plan.shortfall_bytes and self._carry_out(plan.strip_first, plan.delete_first):
            return
        short = self._plan(state, policy, sizes, other_bytes).shortfall_bytes  # what was being copied stayed
        logger.error("save_total_size_gb=%g is %d bytes short.", self._args.save_total_size_gb, short)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def _plan(self, state: TrainerState, policy: Policy, sizes: Sizes, other_bytes: int) -> SavePlan:
        step, entries = state.global_step, self._entries()
        # What was logged so far, and a large tokenizer, are in the newest one: the bound knows neither.
        like_newest = entries[-1].num_bytes + SMALL_FILES_BYTES // 2 if entries and entries[-1].is_resumable else 0
        new = Entry(
            step,
            max(sizes.full_bytes, like_newest),
            ends_epoch=float(state.epoch or 0).is_integer(),
            is_resumable=not self._args.save_only_model,
            optimizer_bytes=sizes.optimizer,
        )
        best = step if state.best_global_step == step else self.best_saved_step(state)
        return plan_save(entries, new, best, policy, other_bytes, self._best_saved)

    def rotate(self, state: TrainerState) -> None:
        """Deletes and strips what no role keeps, now that the newest checkpoint is in place."""
        plan = plan_cleanup(self._entries(), self.best_saved_step(state), self.policy())
        self._carry_out(plan.strip_after, plan.delete_after)
        self._best_saved = self.best_saved_step(state)

    def _carry_out(self, strip: Sequence[int], delete: Sequence[int]) -> bool:
        """Whether all of it could be done; what is being copied stays."""
        store = self._places.store
        files = {stored.step: _optimizer_files(stored) for stored in store.checkpoints()}
        done = [store.strip(step, files.get(step, [])) for step in strip]
        done += [self._places.delete(step) for step in delete]
        return all(done)

    def _entries(self) -> list[Entry]:
        store = self._places.store
        return [
            Entry(
                stored.step,
                stored.num_bytes,
                ends_epoch=stored.ends_epoch,
                is_pinned=store.is_pinned(stored.step),
                is_resumable=bool(_optimizer_files(stored)),
                optimizer_bytes=sum(stored.manifest.files[name].size for name in _optimizer_files(stored)),
            )
            for stored in store.checkpoints()
        ]

    def other_bytes(self, model: nn.Module) -> int:
        """What the output folder holds beside checkpoints, with the model that is saved into it at the end.

        Less what pinned checkpoints take, which come on top of the budget.
        """
        folder = self._places.output_dir
        if self._args.local_checkpoint_dir is None:
            kept = sum(stored.num_bytes for stored in self._places.store.checkpoints())
        else:  # copies of the local ones, made and deleted in the background
            kept = sum(
                used_bytes(path)
                for path in [*folder.glob("checkpoint-*"), *folder.glob(".*-checkpoint-*"), folder / STAGING]
            )
        beside = used_bytes(folder) - kept + SMALL_FILES_BYTES // 2
        # Rounded up: a log that grows by a block must not make the budget that a refusal named too small.
        rounded = -(-beside // SMALL_FILES_BYTES) * SMALL_FILES_BYTES
        store = self._places.store  # a slow Hub, or Drive, takes no room from a run
        pinned = sum(stored.num_bytes for stored in store.checkpoints() if store.is_pinned(stored.step))
        return rounded + export_bytes(model) - pinned

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy(self, state: TrainerState) -> None:
        """With a mirror, asks for the copy of the newest checkpoint. After `rotate`."""
        self._places.copy(state.best_global_step, self.best_saved_step(state))

    def finish_copies(self, state: TrainerState) -> str | None:
        """Waits for the copies; rotates once more, now that none holds an older checkpoint; see `Places`."""
        lacking = self._places.finish_copies()
        if self._places.mirror is None or lacking:
            return lacking
        self.rotate(state)
        self.copy(state)
        return self._places.finish_copies()


def _optimizer_files(stored: Stored) -> list[str]:
    return [name for name in stored.manifest.files if OPTIMIZER_FILES.fullmatch(name)]
