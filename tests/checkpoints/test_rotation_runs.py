"""Whole runs on a disk of numbers: random ones, and one killed after every operation under 36 policies."""

import dataclasses
import itertools
from collections import Counter

import pytest
from rotation_run import Disk, run_until, save, simulate

from hf_ext.checkpoints.budget import Sizes, needed_bytes
from hf_ext.checkpoints.retention import Entry, Policy, plan_save

SIZES = Sizes(weights=30, optimizer=60, other=10)
NAMES = ("keep_best", "keep_epoch", "best_weights_only", "optimizer_in_newest_only")
COMBINATIONS = [
    Policy(limit, keep_best, keep_epoch, None, light, newest_only)
    for limit, keep_best, keep_epoch, light, newest_only in itertools.product(
        [1, 2, 3, None], [False, True], [False, True], [False, True], [False, True]
    )
    if not (keep_epoch and limit is not None and limit < 2 + keep_best)
]


def name_policy(policy: Policy) -> str:
    return " ".join([f"limit={policy.limit}", *(name for name in NAMES if getattr(policy, name))])


def run_to_the_end(policy: Policy, other_bytes: int, counts: Counter, kill_at: int | None = None) -> Disk:
    """16 saves of one size; the best moves at every fifth, an epoch ends at every third; one kill, then it resumes."""
    disk, step = Disk(policy, other_bytes), 1
    counts["operations"] = 0

    def should_die() -> bool:
        counts["operations"] += 1
        return counts["operations"] == kill_at

    while step <= 16:
        new = Entry(step, 100, ends_epoch=step % 3 == 0, optimizer_bytes=60)
        best_step = (step - 1) // 5 * 5 + 1
        killed, written = run_until(save(disk, new, best_step, counts), should_die)
        assert killed or written, "a save was skipped"
        step = (disk.restart() or 0) + 1 if killed else step + 1
    return disk


@pytest.mark.sampled(12)
@pytest.mark.parametrize("policy", COMBINATIONS, ids=name_policy)
def test_the_needed_budget_is_the_peak_and_survives_a_kill_after_every_operation(policy):
    needed = needed_bytes(SIZES, policy, other_bytes=7)
    policy = dataclasses.replace(policy, budget_bytes=needed)
    counts: Counter = Counter()
    finished = run_to_the_end(policy, 7, counts)
    assert finished.peak_bytes == needed
    num_operations = counts["operations"]
    assert num_operations > 16 * 4  # three writes and the rename per save
    for kill_at in range(1, num_operations + 1):
        after_kill = run_to_the_end(policy, 7, counts, kill_at)
        assert after_kill.newest() == 16
        assert after_kill.peak_bytes <= needed
        assert after_kill.entries == finished.entries


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", COMBINATIONS, ids=name_policy)
def test_one_byte_less_than_needed_gives_up_something_asked_for(policy):
    less = dataclasses.replace(policy, budget_bytes=needed_bytes(SIZES, policy, 7) - 1)
    lost = 0

    def watch(have, new, best_step, policy, other_bytes, previous_best_step):
        nonlocal lost
        have = list(have)
        plan = plan_save(have, new, best_step, policy, other_bytes, previous_best_step)
        epochs = [entry.step for entry in have if entry.ends_epoch and policy.keep_epoch]
        wanted = {
            *epochs[-1:],
            previous_best_step if policy.keep_best else None,
            max((e.step for e in have), default=0),
        }
        lost += bool(plan.shortfall_bytes or wanted & set(plan.delete_first))
        return plan

    disk = Disk(less, 7)
    for step in range(1, 17):
        new = Entry(step, 100, ends_epoch=step % 3 == 0, optimizer_bytes=60)
        run_until(save(disk, new, (step - 1) // 5 * 5 + 1, Counter(), plan=watch), lambda: False)
    assert lost


NUM_RUNS = 3000


def test_random_runs_never_break_the_budget_nor_lose_the_last_checkpoint(capsys):
    counts: Counter = Counter()
    for seed in range(NUM_RUNS):
        simulate(seed, counts)
    with capsys.disabled():
        print(f"\nrotation: {NUM_RUNS} random runs, {dict(sorted(counts.items()))}, 0 violations")
    assert all(counts[name] > 500 for name in ("kills", "deleted_first", "stripped", "skipped"))  # it was put to work


def forgets_the_new_one(have, new, best, policy, other, previous):
    return plan_save(have, dataclasses.replace(new, num_bytes=0), best, policy, other, previous)


def forgets_other_files(have, new, best, policy, other, previous):
    return plan_save(have, new, best, policy, 0, previous)


def ignores_pins(have, new, best, policy, other, previous):
    return plan_save([dataclasses.replace(e, is_pinned=False) for e in have], new, best, policy, other, previous)


def ignores_the_best(have, new, best, policy, other, previous):
    return plan_save(have, new, None, policy, other, None)


def ignores_the_limit(have, new, best, policy, other, previous):
    return dataclasses.replace(plan_save(have, new, best, policy, other, previous), delete_after=())


def rotates_before_writing(have, new, best, policy, other, previous):
    plan = plan_save(have, new, best, policy, other, previous)
    return dataclasses.replace(plan, delete_first=plan.delete_first + plan.delete_after, delete_after=())


def makes_too_much_room(have, new, best, policy, other, previous):
    return plan_save(have, dataclasses.replace(new, num_bytes=new.num_bytes + 5), best, policy, other, previous)


def strips_the_latest(have, new, best, policy, other, previous):
    have = list(have)
    plan = plan_save(have, new, best, policy, other, previous)
    latest = [e.step for e in have if e.is_resumable and not e.is_pinned and e.step not in plan.delete_first][-1:]
    return dataclasses.replace(plan, strip_first=tuple({*plan.strip_first, *latest}))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("broken", "violation"),
    [
        (forgets_the_new_one, "above the budget"),
        (forgets_other_files, "above the budget"),
        (ignores_pins, "a pinned checkpoint was"),
        (ignores_the_best, "the best was given up"),
        (ignores_the_limit, "more than the limit"),
        (rotates_before_writing, "nothing left to resume from|room was made without a budget|more deleted than needed"),
        (makes_too_much_room, "more deleted than needed"),
        (strips_the_latest, "nothing left to resume from"),
    ],
)
def test_random_runs_find_a_broken_planner(broken, violation):
    found = set()
    for seed in range(300):
        try:
            simulate(seed, Counter(), broken)
        except AssertionError as error:
            found.add(str(error).splitlines()[0])
    assert any(part in text for text in found for part in violation.split("|")), found
