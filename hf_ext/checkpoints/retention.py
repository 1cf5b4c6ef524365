"""Which checkpoints stay: roles, Trainer's limit, and a disk budget that also holds while a checkpoint is written.

Of most value are the newest that training can continue from and the best one; then the others by step. A save makes
room first, if the budget or the disk asks for it, then writes, and deletes what is beyond the limit once the new
checkpoint is in place. The last one to continue from goes only then.

GB is 10**9 bytes, as disks and quotas are sold.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..files import free_bytes, used_bytes
from ..memory.stored import optimizer_bytes
from .store import STAGING, CheckpointStore
from .weights import export_bytes, weights_bytes

GB = 10**9
SMALL_FILES_BYTES = 2**20  # tokenizer, configs, and what logs grow by between two checkpoints
TENSOR_BYTES = 512  # torch.save's description of one tensor
# As Trainer, accelerate (FSDP) and DeepSpeed call them.
OPTIMIZER_FILES = re.compile(r"optimizer(\.pt|\.bin|_0/.*)|global_step\d+/.*")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one checkpoint on disk, each an upper bound.

    Attributes:
        weights: weights, configuration, tokenizer.
        optimizer: optimizer state, which a weights-only checkpoint lacks.
        other: all else (random states, trainer_state.json, manifest, the folder itself).
    """

    weights: int
    optimizer: int
    other: int

    @property
    def full_bytes(self) -> int:
        return self.weights + self.optimizer + self.other


@dataclass(frozen=True)
class Policy:
    """What the user wants kept.

    Attributes:
        limit: as Trainer's save_total_limit: at most so many checkpoints after a save, the best one included; 1 means
            two while the best is not the newest; None or below 1 means no limit. Pinned ones may exceed it for a while.
        keep_best: the best checkpoint is kept.
        budget_bytes: everything the run has on disk, at every moment; None means no budget.
    """

    limit: int | None
    keep_best: bool
    budget_bytes: int | None = None


@dataclass(frozen=True)
class Entry:
    """One checkpoint of this run.

    Attributes:
        num_bytes: what it takes on disk.
        is_pinned: it is being uploaded or copied, so it is not deleted now.
        is_resumable: training can continue from it; False where it holds weights only.
    """

    step: int
    num_bytes: int
    is_pinned: bool = False
    is_resumable: bool = True


# --- what stays -----------------------------------------------------------------------------------------------------


def rank(entries: Sequence[Entry], best_step: int | None, policy: Policy) -> list[int]:
    """Steps by their value, highest first."""
    newest_first = sorted(entries, key=lambda entry: -entry.step)
    resumable = [entry.step for entry in newest_first if entry.is_resumable]
    steps = [entry.step for entry in newest_first]
    best = [step for step in steps if step == best_step and policy.keep_best]
    return [*dict.fromkeys([*(resumable or steps)[:1], *best, *resumable, *steps])]


def steps_beyond_limit(entries: Sequence[Entry], best_step: int | None, policy: Policy) -> list[int]:
    """Steps to delete once the newest of `entries` is in place; pinned ones stay."""
    if policy.limit is None or policy.limit < 1:
        return []
    ranked = rank(entries, best_step, policy)
    least = 2 if policy.keep_best and best_step in ranked[1:] else 1
    pinned = {entry.step for entry in entries if entry.is_pinned}
    return sorted({*ranked[max(policy.limit, least) :]} - pinned)


def steps_for_room(
    entries: Sequence[Entry], excess_bytes: int, best_step: int | None, policy: Policy, is_new_best: bool = False
) -> list[int] | None:
    """Steps to delete before a checkpoint is written, so that `excess_bytes` are free; None where that cannot be.

    Of least value first. Never the newest to continue from, nor the best while it is that.

    Args:
        best_step: of `entries`. is_new_best: whether the checkpoint to be written is better.
    """
    num_bytes = {entry.step: entry.num_bytes for entry in entries if not entry.is_pinned}
    kept = best_step if policy.keep_best and not is_new_best else None
    given_up: list[int] = []
    for step in reversed(rank(entries, best_step, policy)[1:]):
        if excess_bytes > 0 and step in num_bytes and step != kept:
            given_up.append(step)
            excess_bytes -= num_bytes[step]
    return None if excess_bytes > 0 else given_up


# --- whether the budget can hold it ---------------------------------------------------------------------------------


def needed_bytes(sizes: Sizes, policy: Policy, other_bytes: int) -> int:
    """The smallest budget in bytes with which nothing that was asked for is ever given up to make room.

    Backups and plain checkpoints use what room is left. Checkpoints pinned by an upload or a copy come on top.

    Args:
        other_bytes: all else that the run will have on disk.
    """
    return sum(num_bytes for _, num_bytes in _list_needs(sizes, policy, other_bytes))


def check_budget(sizes: Sizes, policy: Policy, other_bytes: int) -> None:
    """Refuses a budget that cannot hold the run's checkpoints.

    Raises:
        ArgumentError: with each part in GB, their sum, and the smallest budget that works.
    """
    needs, budget = _list_needs(sizes, policy, other_bytes), policy.budget_bytes
    total = sum(num_bytes for _, num_bytes in needs)
    if budget is None or total <= budget:
        return
    lines = [*needs, ("sum, at the moment of a save", total), ("budget", budget)]
    width = max(len(what) for what, _ in lines)
    table = "\n".join(f"  {what:<{width}}  {num_bytes / GB:12.6f} GB" for what, num_bytes in lines)
    smallest = f"{math.ceil(total / 1000) / 10**6:.6f}".rstrip("0").rstrip(".")  # rounded up, so that it works
    raise ArgumentError(
        f"save_total_size_gb={budget / GB:g} cannot hold this run's checkpoints (each: weights "
        f"{sizes.weights / GB:.6f}, optimizer {sizes.optimizer / GB:.6f}, other {sizes.other / GB:.6f} GB):\n{table}\n"
        f"Smallest budget that works: --save_total_size_gb {smallest}."
    )


def _list_needs(sizes: Sizes, policy: Policy, other_bytes: int) -> list[tuple[str, int]]:
    """What is on disk at the worst moment, as (what it is, bytes)."""
    needs = [
        ("all other files of the run", other_bytes),
        ("checkpoint being written", sizes.full_bytes),
        ("latest checkpoint, until the new one is verified", sizes.full_bytes),
    ]
    needs += [("best checkpoint", sizes.full_bytes)] if policy.keep_best else []
    return needs


# --- carrying it out ------------------------------------------------------------------------------------------------


def read_policy(args: Any) -> Policy:
    """What the arguments ask to keep."""
    gb = args.save_total_size_gb
    return Policy(
        limit=args.save_total_limit,
        keep_best=args.metric_for_best_model is not None,
        budget_bytes=None if gb is None else round(gb * GB),
    )


def bound_sizes(model: Any, args: Any, small_bytes: int, is_muon: bool) -> Sizes:
    """Upper bounds of what a checkpoint of one process takes; of a model on the meta device, too.

    Args:
        small_bytes: what it holds beside weights and optimizer.
        is_muon: matrices of repeated layers are Muon's, with one state; of an optimizer that is not known, AdamW's two.
    """
    weights = weights_bytes(model)
    if args.save_only_model:
        return Sizes(weights, 0, SMALL_FILES_BYTES)
    optimizer = optimizer_bytes(model, str(args.optim), is_muon)[0]
    optimizer += 3 * TENSOR_BYTES * sum(p.requires_grad for p in model.parameters())
    return Sizes(weights, optimizer, small_bytes)


class Retention:
    """Keeps the output folder within `save_total_size_gb`, at the moment of writing too, and rotates checkpoints.

    For the main process; any process may ask for sizes and for the best checkpoint.

    Args:
        trainer: the `FastTrainer`.

    Attributes:
        full_bytes: upper bound of what one checkpoint takes; None before `check`.
        best_saved: step of the best checkpoint that was saved.
    """

    def __init__(self, trainer: Any, store: CheckpointStore):
        self._trainer, self._store = trainer, store
        self.full_bytes: int | None = None
        self.best_saved: int | None = None

    def sizes(self) -> Sizes:
        """Upper bounds of what one checkpoint takes."""
        trainer, args, model = self._trainer, self._trainer.args, self._trainer.model
        small_bytes = SMALL_FILES_BYTES + trainer._ext_parts.early_stopping.num_bytes()
        of_library = trainer._ext_backend.checkpoint_sizes(model, small_bytes)
        if of_library is not None:
            return of_library
        return bound_sizes(model, args, small_bytes, trainer.plan.applied("muon"))

    def check(self) -> None:
        """When training begins: how large checkpoints will be. Refuses a budget that cannot hold what will be written.

        Raises:
            ArgumentError: see `check_budget`.
        """
        sizes, policy = self.sizes(), read_policy(self._trainer.args)
        self.full_bytes = sizes.full_bytes
        if policy.budget_bytes is not None:
            check_budget(sizes, policy, self.other_bytes())

    def best_step(self) -> int | None:
        """Step of the best checkpoint there is: where the best step itself was not saved, that of the best before."""
        known = (self._trainer.state.best_global_step, self.best_saved)
        return next((step for step in known if self._store.locate(step)), None)

    def make_room(self) -> None:
        """Deletes, before anything is written, what budget or disk cannot hold beside the checkpoint of this step.

        Raises:
            OSError: the budget has no room for it, whatever is deleted.
        """
        full_bytes, entries, policy = self.full_bytes or 0, self._entries(), read_policy(self._trainer.args)
        # What was logged so far, and a large tokenizer, are in the newest one: the bound knows neither.
        like_newest = entries[-1].num_bytes + SMALL_FILES_BYTES // 2 if entries and entries[-1].is_resumable else 0
        new_bytes = max(full_bytes, like_newest)
        if policy.budget_bytes is not None:
            planned_bytes = self.other_bytes() + sum(entry.num_bytes for entry in entries) + new_bytes
            if not self._free(entries, planned_bytes - policy.budget_bytes):
                logger.error("save_total_size_gb=%g has no room for it.", policy.budget_bytes / GB)
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        free = free_bytes(self._store.folder)
        if free < full_bytes:
            self._free(self._entries(), new_bytes - free)

    def _free(self, entries: Sequence[Entry], excess_bytes: int) -> bool:
        """Whether so many bytes could be freed; where they cannot, nothing is."""
        state = self._trainer.state
        is_new_best = state.best_global_step == state.global_step
        policy = read_policy(self._trainer.args)
        steps = steps_for_room(entries, excess_bytes, self.best_step(), policy, is_new_best)
        return steps is not None and all(self._store.delete(step) for step in steps)

    def rotate(self) -> None:
        """Deletes what is not to be kept, now that the newest checkpoint is in place."""
        best = self.best_step()
        for step in steps_beyond_limit(self._entries(), best, read_policy(self._trainer.args)):
            self._store.delete(step)
        self.best_saved = best

    def _entries(self) -> list[Entry]:
        return [
            Entry(
                stored.step,
                stored.num_bytes,
                is_pinned=self._store.is_pinned(stored.step),
                is_resumable=any(map(OPTIMIZER_FILES.fullmatch, stored.manifest.files)),
            )
            for stored in self._store.checkpoints()
        ]

    def other_bytes(self) -> int:
        """What the output folder holds beside checkpoints, with the model that is saved into it at the end.

        Less what pinned checkpoints take, which come on top of the budget.
        """
        folder, own = Path(self._trainer.args.output_dir).absolute(), self._store.checkpoints()
        if folder == self._store.folder:
            kept = sum(stored.num_bytes for stored in own)
        else:  # copies of the local ones, made and deleted in the background
            copies = [*folder.glob("checkpoint-*"), *folder.glob(".*-checkpoint-*"), folder / STAGING]
            kept = sum(used_bytes(path) for path in copies)
        beside = used_bytes(folder) - kept + SMALL_FILES_BYTES // 2
        # Rounded up: a log that grows by a block must not make the budget that a refusal named too small.
        rounded = -(-beside // SMALL_FILES_BYTES) * SMALL_FILES_BYTES
        pinned = sum(stored.num_bytes for stored in own if self._store.is_pinned(stored.step))
        return rounded + export_bytes(self._trainer.model) - pinned
