"""Which checkpoints stay: roles, Trainer's limit, and a disk budget that also holds while a checkpoint is written.

Of most value are the newest that training can continue from and the best one; then the others by step. A save makes
room first, if the budget or the disk asks for it, then writes, and deletes what is beyond the limit once the new
checkpoint is in place. The last one to continue from goes only then. Those of every n-th epoch are beyond no limit, and
make room after all others but the best, the oldest first.

GB is 10**9 bytes, as disks and quotas are sold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import TrainingArguments

from ..errors import ArgumentError
from ..memory import optimizer_bytes
from .weights import drop_ties, frozen_entries, stored_entries, stores_part

SLACK_BYTES = 64 * 1024  # configurations, a model card, generation settings, an index
HEADER_BYTES = 160  # safetensors' description of one tensor, without its name

GB = 10**9
SMALL_FILES_BYTES = 2**20  # tokenizer, configs, and what logs grow by between two checkpoints
TENSOR_BYTES = 512  # torch.save's description of one tensor


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
        is_kept: it is of an n-th epoch.
    """

    step: int
    num_bytes: int
    is_pinned: bool = False
    is_resumable: bool = True
    is_kept: bool = False


def ends_nth_epoch(epoch: float, every: int | None) -> bool:
    """Returns whether a checkpoint at so many epochs is one of `keep_every_epochs`."""
    return every is not None and epoch > 0 and epoch % every == 0


# --- what stays -----------------------------------------------------------------------------------------------------


def rank(entries: Sequence[Entry], best_step: int | None, policy: Policy) -> list[int]:
    """Steps by their value, highest first."""
    newest_first = sorted(entries, key=lambda entry: -entry.step)
    resumable = [entry.step for entry in newest_first if entry.is_resumable]
    steps = [entry.step for entry in newest_first]
    best = [step for step in steps if step == best_step and policy.keep_best]
    return [*dict.fromkeys([*(resumable or steps)[:1], *best, *resumable, *steps])]


def steps_beyond_limit(entries: Sequence[Entry], best_step: int | None, policy: Policy) -> list[int]:
    """Steps to delete once the newest of `entries` is in place; pinned and kept ones stay."""
    if policy.limit is None or policy.limit < 1:
        return []
    ranked = rank(entries, best_step, policy)
    least = 2 if policy.keep_best and best_step in ranked[1:] else 1
    staying = {entry.step for entry in entries if entry.is_pinned or entry.is_kept}
    return sorted({*ranked[max(policy.limit, least) :]} - staying)


def steps_for_room(
    entries: Sequence[Entry], excess_bytes: int, best_step: int | None, policy: Policy, is_new_best: bool
) -> list[int] | None:
    """Steps to delete before a checkpoint is written, so that `excess_bytes` are free; None where that cannot be.

    Of least value first. Never the newest to continue from, nor the best while it is that.

    Args:
        best_step: of `entries`. is_new_best: whether the checkpoint to be written is better.
    """
    num_bytes = {entry.step: entry.num_bytes for entry in entries if not entry.is_pinned}
    kept = best_step if policy.keep_best and not is_new_best else None
    given_up: list[int] = []
    of_epochs = {entry.step for entry in entries if entry.is_kept}
    for step in sorted(rank(entries, best_step, policy)[:0:-1], key=of_epochs.__contains__):
        if excess_bytes > 0 and step in num_bytes and step != kept:
            given_up.append(step)
            excess_bytes -= num_bytes[step]
    return None if excess_bytes > 0 else given_up


# --- whether the budget can hold it ---------------------------------------------------------------------------------


def needed_bytes(sizes: Sizes, policy: Policy, other_bytes: int) -> int:
    """Returns the smallest budget in bytes with which nothing that was asked for is ever given up to make room.

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
    needs = _list_needs(sizes, policy, other_bytes)
    budget = policy.budget_bytes
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
    """Lists what is on disk at the worst moment, as (what it is, bytes)."""
    needs = [
        ("all other files of the run", other_bytes),
        ("checkpoint being written", sizes.full_bytes),
        ("latest checkpoint, until the new one is verified", sizes.full_bytes),
    ]
    needs += [("best checkpoint", sizes.full_bytes)] if policy.keep_best else []
    return needs


# --- of a run -------------------------------------------------------------------------------------------------------


def read_policy(args: Any) -> Policy:
    """Reads what the arguments ask to keep."""
    gb = args.save_total_size_gb
    return Policy(
        limit=args.save_total_limit,
        keep_best=args.metric_for_best_model is not None,
        budget_bytes=None if gb is None else round(gb * GB),
    )


def bound_sizes(model: nn.Module, args: TrainingArguments, small_bytes: int, is_muon: bool) -> Sizes:
    """Returns upper bounds of what a checkpoint of one process takes; of a model on the meta device, too.

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


# --- how large they are -----------------------------------------------------------------------------------------------


def weights_bytes(model: nn.Module) -> int:
    """Bounds the bytes of weights in a checkpoint from above. Cost: none; nothing is hashed."""
    is_part = isinstance(model, PeftModel) or stores_part(model)
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()  # weights that are stored by reference
    whole = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in left_out}
    entries = drop_ties(stored_entries(model) if is_part else whole)
    names = [*entries, *(frozen_entries(model) if is_part else ())]  # of frozen ones, their hashes
    total = sum(tensor.nbytes for tensor in entries.values()) + sum(len(name) + HEADER_BYTES for name in names)
    return total + SLACK_BYTES * (1 + len(getattr(model, "peft_config", None) or ()))


def export_bytes(model: nn.Module) -> int:
    """Bounds the bytes of what `Trainer.save_model` writes from above: frozen weights too, but for adapters."""
    if isinstance(model, PeftModel) or not stores_part(model):
        return weights_bytes(model)
    return weights_bytes(model) + sum(tensor.nbytes for tensor in drop_ties(frozen_entries(model)).values())
