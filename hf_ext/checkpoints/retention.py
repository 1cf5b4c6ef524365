"""Which checkpoints stay: roles, Trainer's limit, and a disk budget that also holds while a checkpoint is written.

Pure arithmetic over steps and bytes: no files, no torch. The caller carries a plan out in this order, and may be killed
between any two operations; the next plan starts from whatever is there then:

    strip_first, delete_first, write and verify the new checkpoint, delete_after, strip_after

Roles, from the least to the most valuable:
    plain        none of the others
    backup       the newest resumable one before the latest, where the limit has a place for it
    epoch        the newest that ends an epoch, where the policy keeps it
    old best     what the new checkpoint replaces as best; until that one is written, a resumed run still needs it
    latest       the newest resumable one, which a resumed run starts from
    best         never given up while it is the best
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from hf_ext.errors import ArgumentError, CheckpointError


@dataclass(frozen=True)
class Entry:
    """One checkpoint of this run.

    Attributes:
        step: optimizer steps done when it was written.
        num_bytes: what it takes on disk; of one that is not written yet, an upper bound.
        ends_epoch: it was written at the end of an epoch.
        is_pinned: it is being uploaded or copied, so it is neither deleted nor stripped now.
        is_resumable: training can continue from it; False where it holds weights only.
        optimizer_bytes: the part of `num_bytes` that stripping it down to the weights frees.
    """

    step: int
    num_bytes: int
    ends_epoch: bool = False
    is_pinned: bool = False
    is_resumable: bool = True
    optimizer_bytes: int = 0


@dataclass(frozen=True)
class Policy:
    """What the user wants kept.

    Attributes:
        limit: as Trainer's save_total_limit: at most so many checkpoints after a save, the best one included; 1 means
            two while the best is not the newest; None or below 1 means no limit. Pinned ones may exceed it for a while.
        keep_best: the best checkpoint is kept.
        keep_epoch: the newest checkpoint that ends an epoch is kept.
        budget_bytes: everything the run has on disk, at every moment; None means no budget.
        best_weights_only: the best checkpoint is stripped to its weights once a newer one is written.
        optimizer_in_newest_only: so is every checkpoint but the newest resumable one.

    Raises:
        ArgumentError: keep_epoch with a limit that leaves no place beside the newest and the best.
    """

    limit: int | None
    keep_best: bool
    keep_epoch: bool = False
    budget_bytes: int | None = None
    best_weights_only: bool = False
    optimizer_in_newest_only: bool = False

    def __post_init__(self) -> None:
        places = 2 + self.keep_best
        if self.keep_epoch and self.max_kept is not None and self.max_kept < places:
            raise ArgumentError(
                f"save_total_limit={self.limit} leaves no place for the newest checkpoint that ends an epoch. Allowed: "
                f"at least {places} (newest{', best' if self.keep_best else ''}, epoch), no limit, or no epoch role."
            )

    @property
    def max_kept(self) -> int | None:
        """The limit, or None where Trainer sees none."""
        return self.limit if self.limit is not None and self.limit >= 1 else None


@dataclass(frozen=True)
class SavePlan:
    """What one save does beside writing; steps ascend within each tuple.

    Attributes:
        delete_first: deleted before anything is written, because the budget needs the room.
        delete_after: deleted once the new checkpoint is verified and in place.
        shortfall_bytes: above 0, the budget cannot hold the new checkpoint: it must not be written, and it would need
            so many bytes more. `delete_first` is then only what brings the run below its budget without the new one.
        strip_first, strip_after: reduced to their weights, before and after the save.
    """

    delete_first: tuple[int, ...]
    delete_after: tuple[int, ...]
    shortfall_bytes: int = 0
    strip_first: tuple[int, ...] = ()
    strip_after: tuple[int, ...] = ()


def plan_save(
    entries: Iterable[Entry],
    new: Entry,
    best_step: int | None,
    policy: Policy,
    other_bytes: int,
    previous_best_step: int | None = None,
) -> SavePlan:
    """Plans one save so that the disk never holds more than the budget, nor less than one resumable checkpoint.

    At every moment of the save, `other_bytes` plus all checkpoints, the new one included, stay within the budget. Room
    is made in the order of the roles above, oldest first, and no more of it than the budget needs. The only resumable
    checkpoint (the only one at all, where none is resumable) is not given up before the new one is in place.

    Args:
        entries: this run's checkpoints, none of them newer than `new`. One of the same step is what `new` replaces: it
            stays until then, and is in no `delete_after`.
        new: the checkpoint to be written.
        best_step: step of the best checkpoint, `new.step` where that is the best so far, or None.
        policy: what is kept.
        other_bytes: all else that the run has on disk, with a reserve for what grows until the next save (logs) and
            for one rewritten manifest per stripped checkpoint.
        previous_best_step: the best checkpoint as the newest entry knows it; matters where `new` is the best.

    Returns:
        The plan; pinned checkpoints are in none of its tuples.

    Raises:
        CheckpointError: an entry is newer than `new`.

    Cost: microseconds for tens of checkpoints.
    """
    standing = sorted(entries, key=lambda entry: entry.step)
    if standing and standing[-1].step > new.step:
        raise CheckpointError(
            f"checkpoint-{standing[-1].step} is newer than checkpoint-{new.step}, which is to be saved. Allowed: older "
            "ones of this run only; a run resumed from an older checkpoint first renames the newer ones."
        )
    strip_first = _steps_to_strip(standing, {best_step, previous_best_step}, policy)
    standing = [_strip(entry) if entry.step in strip_first else entry for entry in standing]
    delete_first, shortfall = _plan_room(standing, new, best_step, policy, other_bytes, previous_best_step)
    strip_first = tuple(step for step in strip_first if step not in delete_first)
    if shortfall:
        return SavePlan(delete_first, (), shortfall, strip_first)

    after = [entry for entry in standing if entry.step not in {*delete_first, new.step}] + [new]
    delete_after, strip_after = _plan_after(after, best_step, policy)
    return SavePlan(delete_first, delete_after, 0, strip_first, strip_after)


def plan_cleanup(entries: Iterable[Entry], best_step: int | None, policy: Policy) -> SavePlan:
    """Plans what a save still had to do when it was killed after its checkpoint was in place.

    A resumed run does this once, before it trains, and only after the newest checkpoint was verified. The next save
    would do it too, but a run that was killed in its very last save has none.

    Args:
        entries: this run's checkpoints, the one that it resumes from being the newest.
        best_step: step of the best checkpoint, as the newest one knows it.
        policy: what is kept.

    Returns:
        A plan that has only `delete_after` and `strip_after`; empty where nothing was left undone.
    """
    standing = sorted(entries, key=lambda entry: entry.step)
    delete, strip = _plan_after(standing, best_step, policy) if standing else ((), ())
    return SavePlan((), delete, 0, (), strip)


def _plan_after(
    after: Sequence[Entry], best_step: int | None, policy: Policy
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the steps to delete and to strip once the last of `after`, which ascends, is in place."""
    kept = _steps_kept_after(after, best_step, policy)
    delete = tuple(entry.step for entry in after if entry.step not in kept and not entry.is_pinned)
    remaining = [entry for entry in after if entry.step not in delete]
    return delete, _steps_to_strip(remaining, {best_step}, policy)


def _plan_room(
    standing: Sequence[Entry],
    new: Entry,
    best_step: int | None,
    policy: Policy,
    other_bytes: int,
    previous_best_step: int | None,
) -> tuple[tuple[int, ...], int]:
    """Returns the steps to delete before writing, and the bytes that are missing even then."""
    if policy.budget_bytes is None:
        return (), 0
    room = policy.budget_bytes - other_bytes
    offered = _order_of_giving_up(standing, best_step, policy, previous_best_step)
    delete_first, shortfall = _make_room(standing, offered, room - new.num_bytes)
    if shortfall:  # nothing will be written: only hold the budget with what is there
        delete_first, _ = _make_room(standing, offered, room)
    return delete_first, shortfall


def _order_of_giving_up(
    standing: Sequence[Entry], best_step: int | None, policy: Policy, previous_best_step: int | None
) -> list[Entry]:
    """Returns what may be deleted for room, least valuable first, then oldest first; `standing` ascends."""
    resumable = [entry.step for entry in standing if entry.is_resumable]
    latest = (resumable or [entry.step for entry in standing])[-1] if standing else None
    backup = resumable[-2] if len(resumable) > 1 else None
    value: dict[int | None, int] = {}
    old_best = previous_best_step if policy.keep_best else None
    for rank, step in enumerate([backup, _newest_epoch(standing, policy), old_best, latest], start=1):
        value[step] = rank
    best = best_step if policy.keep_best else None
    free = [entry for entry in standing if not entry.is_pinned and entry.step != best]
    return sorted(free, key=lambda entry: (value.get(entry.step, 0), entry.step))


def _make_room(standing: Sequence[Entry], offered: Sequence[Entry], room_bytes: int) -> tuple[tuple[int, ...], int]:
    """Returns the fewest of `offered` to delete, in their order, until `standing` fits; nothing where it cannot fit."""
    kept = {entry.step: entry for entry in standing}
    excess = sum(entry.num_bytes for entry in standing) - room_bytes
    given_up: list[Entry] = []
    for entry in offered:
        if excess <= 0:
            break
        if not _is_last(entry, kept.values()):
            given_up.append(kept.pop(entry.step))
            excess -= entry.num_bytes
    if excess > 0:
        return (), excess
    for entry in reversed(given_up):  # a big one late in the order can make small ones before it unnecessary
        if excess + entry.num_bytes <= 0:
            kept[entry.step] = entry
            excess += entry.num_bytes
    return tuple(sorted(entry.step for entry in given_up if entry.step not in kept)), 0


def _is_last(entry: Entry, kept: Collection[Entry]) -> bool:
    """Whether nothing would be left to resume from, or nothing at all, without `entry`."""
    others = [other for other in kept if other.step != entry.step]
    return not others or (entry.is_resumable and not any(other.is_resumable for other in others))


def _steps_kept_after(after: Sequence[Entry], best_step: int | None, policy: Policy) -> set[int]:
    """Returns the steps that the roles and the limit keep; `after` ascends."""
    steps = [entry.step for entry in reversed(after)]
    if policy.max_kept is None:
        return set(steps)
    resumable = [entry.step for entry in reversed(after) if entry.is_resumable]
    kept = {steps[0], *resumable[:1]}
    if policy.keep_best and best_step in steps:
        kept.add(best_step)
    epoch = _newest_epoch(after, policy)
    for step in [*([] if epoch is None else [epoch]), *resumable[:2], *steps]:
        if len(kept) < policy.max_kept:
            kept.add(step)
    return kept


def _newest_epoch(entries: Sequence[Entry], policy: Policy) -> int | None:
    steps = [entry.step for entry in entries if entry.ends_epoch]
    return steps[-1] if steps and policy.keep_epoch else None


def _steps_to_strip(entries: Sequence[Entry], bests: Collection[int | None], policy: Policy) -> tuple[int, ...]:
    """Returns the steps that the policy wants without optimizer; never the newest that training can continue from."""
    newest = max((entry.step for entry in entries if entry.is_resumable), default=None)
    return tuple(
        entry.step
        for entry in entries
        if entry.is_resumable and entry.optimizer_bytes and not entry.is_pinned and entry.step != newest
        if policy.optimizer_in_newest_only or (policy.best_weights_only and policy.keep_best and entry.step in bests)
    )


def _strip(entry: Entry) -> Entry:
    return dataclasses.replace(
        entry, num_bytes=entry.num_bytes - entry.optimizer_bytes, optimizer_bytes=0, is_resumable=False
    )
