"""A run that saves, is killed and resumes, on a disk that is only numbers; every operation is checked."""

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field

from hf_ext.checkpoints.retention import Entry, Policy, SavePlan, plan_cleanup, plan_save


@dataclass
class Disk:
    """What the run has written. `best_at[step]` is the best step that checkpoint-<step> knows of."""

    policy: Policy
    other_bytes: int
    entries: dict[int, Entry] = field(default_factory=dict)
    best_at: dict[int, int | None] = field(default_factory=dict)
    staging_bytes: int = 0
    peak_bytes: int = 0
    was_resumable: bool = False
    lost_bests: set[int] = field(default_factory=set)  # superseded, given up for room, and then the run was killed

    def check(self) -> None:
        """What must hold after every single operation."""
        total = self.other_bytes + self.staging_bytes + sum(entry.num_bytes for entry in self.entries.values())
        self.peak_bytes = max(self.peak_bytes, total)
        if self.policy.budget_bytes is not None:
            assert total <= self.policy.budget_bytes, "above the budget"
        resumable = any(entry.is_resumable for entry in self.entries.values())
        assert resumable or not self.was_resumable, "nothing left to resume from"
        self.was_resumable = resumable

    def newest(self) -> int | None:
        return max((entry.step for entry in self.entries.values() if entry.is_resumable), default=None)

    def restart(self) -> int | None:
        """Sweep staging, rename what is newer than the checkpoint resumed from, finish the last save."""
        self.staging_bytes = 0
        newest = self.newest()
        for step in [step for step in self.entries if newest is None or step > newest]:
            self.other_bytes += self.entries.pop(step).num_bytes
        self.entries = {step: dataclasses.replace(entry, is_pinned=False) for step, entry in self.entries.items()}
        self.check()
        plan = plan_cleanup(self.entries.values(), self.best_at.get(newest), self.policy)
        for _ in _reduce(self, (), plan.delete_after):
            pass
        for _ in _reduce(self, plan.strip_after, ()):
            pass
        return newest

    def delete(self, step: int) -> None:
        assert not self.entries.pop(step).is_pinned, "a pinned checkpoint was deleted"

    def strip(self, step: int) -> None:
        entry = self.entries[step]
        assert not entry.is_pinned, "a pinned checkpoint was stripped"
        self.entries[step] = dataclasses.replace(
            entry, num_bytes=entry.num_bytes - entry.optimizer_bytes, optimizer_bytes=0, is_resumable=False
        )


def save(disk: Disk, new: Entry, best_step: int | None, counts: Counter, written_share: float = 1.0, plan=plan_save):
    """Does one save, yields after every operation on the disk, returns whether a checkpoint was written."""
    newest = disk.newest()
    previous = None if newest is None else disk.best_at[newest]
    made = plan(disk.entries.values(), new, best_step, disk.policy, disk.other_bytes, previous)
    check_plan(disk, new, best_step, made)
    counts.update(saves=1, deleted_first=len(made.delete_first), stripped=len(made.strip_first + made.strip_after))
    disk.lost_bests.update({previous} & set(made.delete_first))
    yield from _reduce(disk, made.strip_first, made.delete_first)
    if made.shortfall_bytes:
        counts["skipped"] += 1
        return False
    for part in range(1, 4):
        disk.staging_bytes = int(new.num_bytes * written_share) * part // 3
        yield disk.check()
    disk.entries[new.step] = dataclasses.replace(new, num_bytes=disk.staging_bytes)
    disk.best_at[new.step], disk.staging_bytes = best_step, 0
    yield disk.check()
    yield from _reduce(disk, (), made.delete_after)
    yield from _reduce(disk, made.strip_after, ())
    check_saved(disk, new, best_step)
    return True


def _reduce(disk: Disk, strip: tuple[int, ...], delete: tuple[int, ...]):
    for step in strip:
        disk.strip(step)
        yield disk.check()
    for step in delete:
        disk.delete(step)
        yield disk.check()


def check_plan(disk: Disk, new: Entry, best_step: int | None, made: SavePlan) -> None:
    """The best is never given up, and no deletion before the save is one too many."""
    given_up = {*made.delete_first, *made.delete_after}
    assert not disk.policy.keep_best or best_step not in given_up, "the best was given up"
    if made.shortfall_bytes or not made.delete_first:
        return
    assert disk.policy.budget_bytes is not None, "room was made without a budget"
    kept = [step for step in disk.entries if step not in made.delete_first]
    total = disk.other_bytes + new.num_bytes + sum(_size(disk.entries[step], made) for step in kept)
    for step in made.delete_first:
        assert total + _size(disk.entries[step], made) > disk.policy.budget_bytes, "more deleted than needed"


def _size(entry: Entry, made: SavePlan) -> int:
    return entry.num_bytes - (entry.optimizer_bytes if entry.step in made.strip_first else 0)


def check_saved(disk: Disk, new: Entry, best_step: int | None) -> None:
    """After a whole save the limit holds, and what a resumed run would take for the best is there."""
    assert disk.newest() == new.step
    if disk.policy.keep_best and best_step is not None:
        assert best_step in {*disk.entries, *disk.lost_bests}, "the best is missing"
    if disk.policy.max_kept is not None:
        places = max(disk.policy.max_kept, len({new.step, best_step} - {None}) if disk.policy.keep_best else 1)
        unpinned = [entry for entry in disk.entries.values() if not entry.is_pinned]
        assert len(unpinned) <= places, "more than the limit"


def simulate(seed: int, counts: Counter, plan=plan_save, num_saves: int = 12) -> None:
    """One random run: sizes, limit, roles, budget, pins, moves of the best, kills between any two operations."""
    rng = random.Random(seed)
    size = rng.randint(10, 100)
    disk = Disk(random_policy(rng), other_bytes=rng.randint(0, 2 * size))
    if rng.random() < 0.75:
        budget = disk.other_bytes + size * rng.randint(1, 6)
        disk.policy = dataclasses.replace(disk.policy, budget_bytes=budget)
    pin_share, kill_share = rng.choice([0, 0, 0.2]), rng.choice([0, 0.05, 0.2])
    step, best_step = 0, None
    for _ in range(num_saves):
        step += rng.randint(1, 5)
        optimizer = rng.randint(0, size // 2)
        new = Entry(step, optimizer + rng.randint(1, size), rng.random() < 0.3, optimizer_bytes=optimizer)
        now_best = step if rng.random() < 0.3 else best_step
        for old in disk.entries.values():
            disk.entries[old.step] = dataclasses.replace(old, is_pinned=rng.random() < pin_share)
        operations = save(disk, new, now_best, counts, rng.choice([1.0, 0.9]), plan)
        killed, written = run_until(operations, lambda: rng.random() < kill_share)
        if killed:
            counts["kills"] += 1
            step = disk.restart() or 0
            best_step = disk.best_at.get(step)
        elif written:
            best_step = now_best


def random_policy(rng: random.Random) -> Policy:
    limit, keep_best = rng.choice([None, 1, 2, 3]), rng.random() < 0.5
    return Policy(
        limit,
        keep_best,
        keep_epoch=rng.random() < 0.5 and (limit is None or limit >= 2 + keep_best),
        best_weights_only=rng.random() < 0.4,
        optimizer_in_newest_only=rng.random() < 0.2,
    )


def run_until(operations, should_die) -> tuple[bool, bool]:
    """Run operations to their end or to the kill; return (was killed, was written)."""
    while True:
        try:
            next(operations)
        except StopIteration as end:
            return False, end.value
        if should_die():
            return True, False
