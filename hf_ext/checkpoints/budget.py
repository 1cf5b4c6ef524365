"""Whether a disk budget can hold a run's checkpoints: the arithmetic, said before the first step.

A run needs room for the checkpoint being written, the latest one until that is verified, and what it was asked to keep
beside them (the best one, the newest that ends an epoch). Backups and plain checkpoints use what room is left, so they
need none. Where that is too much, the checkpoints can be made smaller in named steps, least harm first.

GB is 10**9 bytes, as disks and quotas are sold.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from hf_ext.checkpoints.retention import Policy
from hf_ext.errors import ArgumentError

GB = 10**9
SMALL_FILES_BYTES = 2**20  # tokenizer, configs, and what logs grow by between two checkpoints
STEPS = {
    "best_weights_only": "the best checkpoint keeps its weights only: it can be used, but training cannot resume there",
    "optimizer_in_newest_only": "only the newest checkpoint keeps its optimizer state",
}


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

    @property
    def weights_only_bytes(self) -> int:
        return self.weights + self.other


@dataclass(frozen=True)
class Degradation:
    """How checkpoints become small enough.

    Attributes:
        steps: names out of `STEPS`, in the order taken; empty where everything fits as it is.
        policy: as it is with these steps, for `plan_save`.
        needed_bytes: the most that is then ever on disk at once.
    """

    steps: tuple[str, ...]
    policy: Policy
    needed_bytes: int


def needed_bytes(sizes: Sizes, policy: Policy, other_bytes: int) -> int:
    """Returns the smallest budget in bytes with which nothing that was asked for is ever given up to make room.

    Checkpoints pinned by an upload or a copy come on top while they are pinned.

    Args:
        sizes: bytes of one checkpoint.
        policy: what is kept; its budget is not looked at.
        other_bytes: all else that the run will have on disk, as in `plan_save`.
    """
    return sum(num_bytes for _, num_bytes in _list_needs(sizes, policy, other_bytes))


def check_budget(sizes: Sizes, policy: Policy, other_bytes: int) -> int:
    """Checks that the budget holds the run's checkpoints, and returns what they need in bytes.

    Raises:
        ArgumentError: it does not; with each part in GB, their sum, the smallest budget that does, and what
            `--disk_policy degrade` would do.
    """
    needed = needed_bytes(sizes, policy, other_bytes)
    if policy.budget_bytes is None or needed <= policy.budget_bytes:
        return needed
    smaller = _degrade(sizes, policy, other_bytes)
    if not smaller.steps:
        degrade = "--disk_policy degrade would not make them smaller."
    elif smaller.needed_bytes <= policy.budget_bytes:
        degrade = f"--disk_policy degrade would need {_gb(smaller.needed_bytes)} GB:\n{_explain(smaller.steps)}"
    else:
        degrade = f"--disk_policy degrade would need {_gb(smaller.needed_bytes)} GB, too much as well."
    raise ArgumentError(_refusal(sizes, policy, other_bytes, degrade))


def choose_degradation(sizes: Sizes, policy: Policy, other_bytes: int) -> Degradation:
    """Makes checkpoints smaller in named steps until the budget holds them: best_weights_only, then
    optimizer_in_newest_only. Steps that would gain nothing are left out.

    Args:
        sizes: bytes of one checkpoint as it would be without any step.
        policy: what is kept, and the budget; without a budget no step is taken.
        other_bytes: all else that the run will have on disk, as in `plan_save`.

    Raises:
        ArgumentError: all steps together are not enough; with the arithmetic after them.
    """
    smaller = _degrade(sizes, policy, other_bytes)
    if policy.budget_bytes is None or smaller.needed_bytes <= policy.budget_bytes:
        return smaller
    taken = f"These steps of --disk_policy degrade are counted in:\n{_explain(smaller.steps)}" if smaller.steps else ""
    raise ArgumentError(_refusal(sizes, smaller.policy, other_bytes, taken))


def _degrade(sizes: Sizes, policy: Policy, other_bytes: int) -> Degradation:
    """Returns the first steps that fit, or all that gain something where none fit."""
    chosen = Degradation((), policy, needed_bytes(sizes, policy, other_bytes))
    for name in STEPS:
        if policy.budget_bytes is None or chosen.needed_bytes <= policy.budget_bytes:
            break
        new_policy = dataclasses.replace(chosen.policy, **{name: True})
        needed = needed_bytes(sizes, new_policy, other_bytes)
        if needed < chosen.needed_bytes:
            chosen = Degradation((*chosen.steps, name), new_policy, needed)
    return chosen


def _list_needs(sizes: Sizes, policy: Policy, other_bytes: int) -> list[tuple[str, int]]:
    """Returns what is on disk at the worst moment, as (what it is, bytes)."""
    needs = [
        ("all other files of the run", other_bytes),
        ("checkpoint being written", sizes.full_bytes),
        ("latest checkpoint, until the new one is verified", sizes.full_bytes),
    ]
    if policy.keep_best:
        light = policy.best_weights_only or policy.optimizer_in_newest_only
        needs.append(_name_need("best checkpoint", sizes, light))
    if policy.keep_epoch:
        needs.append(_name_need("newest checkpoint that ends an epoch", sizes, policy.optimizer_in_newest_only))
    return needs


def _name_need(what: str, sizes: Sizes, weights_only: bool) -> tuple[str, int]:
    return (f"{what}, weights only", sizes.weights_only_bytes) if weights_only else (what, sizes.full_bytes)


def _refusal(sizes: Sizes, policy: Policy, other_bytes: int, remedy: str) -> str:
    assert policy.budget_bytes is not None
    needs = _list_needs(sizes, policy, other_bytes)
    total = sum(num_bytes for _, num_bytes in needs)
    lines = [*needs, ("sum, at the moment of a save", total), ("budget", policy.budget_bytes)]
    width = max(len(what) for what, _ in lines)
    table = "\n".join(f"  {what:<{width}}  {num_bytes / GB:12.6f} GB" for what, num_bytes in lines)
    return (
        f"save_total_size_gb={policy.budget_bytes / GB:g} cannot hold this run's checkpoints (each: weights "
        f"{sizes.weights / GB:.6f}, optimizer {sizes.optimizer / GB:.6f}, other {sizes.other / GB:.6f} GB):\n{table}\n"
        f"Smallest budget that works: --save_total_size_gb {_gb(total)}. {remedy}"
    ).rstrip()


def _explain(steps: tuple[str, ...]) -> str:
    return "\n".join(f"  {name}: {STEPS[name]}" for name in steps)


def _gb(num_bytes: int) -> str:
    """Returns GB rounded up to a microGB, so that the printed budget works."""
    return f"{math.ceil(num_bytes / 1000) / 10**6:.6f}".rstrip("0").rstrip(".")
