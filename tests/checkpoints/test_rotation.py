"""Which checkpoints one save gives up: roles, Trainer's limit, the budget, pins."""

import dataclasses
import random

import pytest
from transformers.trainer_utils import rotate_checkpoints

from hf_ext.checkpoints.retention import Entry, Policy, SavePlan, plan_cleanup, plan_save
from hf_ext.errors import ArgumentError, CheckpointError


def entries(*steps: int, num_bytes: int = 10, **settings) -> list[Entry]:
    return [Entry(step, num_bytes, **settings) for step in steps]


def test_without_limit_and_budget_nothing_is_ever_deleted():
    assert plan_save(entries(1, 2, 3), Entry(4, 10), 2, Policy(None, True), 0) == SavePlan((), ())
    assert plan_save(entries(1, 2, 3), Entry(4, 10), 2, Policy(0, True), 0) == SavePlan((), ())


@pytest.mark.parametrize(
    ("limit", "best_step", "deleted"),
    [
        (1, None, (10, 20, 30)),
        (1, 20, (10, 30)),  # the newest and the best: two, as Trainer
        (1, 40, (10, 20, 30)),
        (2, None, (10, 20)),  # the newest and its backup
        (2, 10, (20, 30)),
        (3, 10, (20,)),
        (4, 10, ()),
    ],
)
def test_after_a_save_the_limit_keeps_newest_best_and_backup(limit, best_step, deleted):
    plan = plan_save(entries(10, 20, 30), Entry(40, 10), best_step, Policy(limit, keep_best=True), 0)
    assert plan == SavePlan((), deleted)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("with_best", [False, True])
def test_the_limit_keeps_what_trainer_keeps(tmp_path, limit, with_best):
    """50 saves against transformers' own rotate_checkpoints on real folders."""
    rng, best, ours = random.Random(limit), None, []
    for step in range(1, 51):
        best = step if with_best and rng.random() < 0.2 else best
        (tmp_path / f"checkpoint-{step}").mkdir()
        rotate_checkpoints(str(tmp_path), limit, str(tmp_path / f"checkpoint-{best}") if best else None)
        plan = plan_save(ours, Entry(step, 10), best, Policy(limit, with_best), 0)
        ours = [entry for entry in [*ours, Entry(step, 10)] if entry.step not in plan.delete_after]
        assert {f"checkpoint-{entry.step}" for entry in ours} == {path.name for path in tmp_path.iterdir()}


def test_the_newest_end_of_an_epoch_has_a_place_before_the_backup():
    have = [Entry(10, 10, ends_epoch=True), Entry(20, 10, ends_epoch=True), Entry(30, 10), Entry(40, 10)]
    assert plan_save(have, Entry(50, 10), None, Policy(2, False, keep_epoch=True), 0).delete_after == (10, 30, 40)
    assert plan_save(have, Entry(50, 10), None, Policy(3, False, keep_epoch=True), 0).delete_after == (10, 30)


def test_a_limit_without_place_for_the_epoch_is_refused():
    with pytest.raises(
        ArgumentError, match=r"save_total_limit=2 leaves no place .* at least 3 \(newest, best, epoch\)"
    ):
        Policy(2, keep_best=True, keep_epoch=True)
    with pytest.raises(ArgumentError, match="at least 2"):
        Policy(1, keep_best=False, keep_epoch=True)


# Six checkpoints of 10 bytes, one per role, and 5 bytes of other files.
EVERY_ROLE = [Entry(10, 10), Entry(20, 10, ends_epoch=True), *entries(30, 40, 50, 60)]  # 30 best, 50 backup, 60 latest


@pytest.mark.parametrize(
    ("budget", "deleted"),
    [
        (75, ()),
        (74, (10,)),  # plain, oldest first
        (55, (10, 40)),
        (54, (10, 40, 50)),  # then the backup
        (44, (10, 20, 40, 50)),  # then the epoch
        (34, (10, 20, 40, 50, 60)),  # then the latest: the best can be resumed from
    ],
)
def test_room_is_made_in_the_order_of_the_roles(budget, deleted):
    policy = Policy(None, keep_best=True, keep_epoch=True, budget_bytes=budget)
    assert plan_save(EVERY_ROLE, Entry(70, 10), 30, policy, 5) == SavePlan(deleted, ())


def test_a_save_that_cannot_fit_deletes_nothing_and_says_what_is_missing():
    policy = Policy(None, keep_best=True, keep_epoch=True, budget_bytes=20)
    assert plan_save(EVERY_ROLE[:1], Entry(70, 10), None, policy, 5) == SavePlan((), (), shortfall_bytes=5)


def test_a_save_that_cannot_fit_still_brings_the_run_below_its_budget():
    policy = Policy(1, keep_best=False, budget_bytes=40)
    # Other files grew to 15: three checkpoints are too many even without the new one, which needs 100.
    assert plan_save(entries(10, 20, 30), Entry(40, 100), None, policy, 15) == SavePlan((10,), (), 85)


def test_the_only_resumable_checkpoint_is_not_given_up_first():
    have = [Entry(10, 4, is_resumable=False), Entry(20, 10)]
    policy = Policy(1, keep_best=False, budget_bytes=20)
    assert plan_save(have, Entry(30, 10), None, policy, 0) == SavePlan((10,), (20,))
    assert plan_save(have, Entry(30, 11), None, policy, 0) == SavePlan((), (), shortfall_bytes=1)


def test_the_last_weights_only_checkpoint_is_not_given_up_first():
    have = entries(10, 20, is_resumable=False)
    policy = Policy(1, keep_best=False, budget_bytes=19)
    assert plan_save(have, Entry(30, 10, is_resumable=False), None, policy, 0) == SavePlan((10,), (), 1)


def test_a_weights_only_save_leaves_the_newest_resumable_checkpoint():
    plan = plan_save(entries(10, 20), Entry(30, 4, is_resumable=False), None, Policy(1, keep_best=False), 0)
    assert plan.delete_after == (10,)


def test_one_big_checkpoint_given_up_spares_the_small_ones_before_it():
    have = [Entry(10, 3), Entry(20, 2), Entry(30, 40), Entry(40, 10)]  # 30 is the backup
    plan = plan_save(have, Entry(50, 10), None, Policy(None, False, budget_bytes=30), 0)
    assert plan.delete_first == (30,)


def test_the_old_best_outlives_backup_and_epoch_until_the_new_best_is_written():
    policy = Policy(3, keep_best=True, keep_epoch=True, budget_bytes=30)
    have = [Entry(10, 10), Entry(20, 10, ends_epoch=True), Entry(30, 10)]
    assert plan_save(have, Entry(40, 10), 40, policy, 0, previous_best_step=10).delete_first == (20,)
    assert plan_save(have, Entry(40, 10), 40, policy, 0).delete_first == (10,)  # nobody said that 10 was the best


def test_the_old_best_goes_before_the_latest():
    policy = Policy(1, keep_best=True, budget_bytes=20)
    assert plan_save(entries(10, 20), Entry(30, 10), 30, policy, 0, previous_best_step=10) == SavePlan((10,), (20,))


def test_the_backup_is_one_that_can_be_resumed_from():
    have = [Entry(10, 10), Entry(20, 4, is_resumable=False)]
    assert plan_save(have, Entry(30, 10), None, Policy(2, keep_best=False), 0) == SavePlan((), (20,))


def test_pinned_checkpoints_are_in_no_plan():
    have = [Entry(10, 10, is_pinned=True), Entry(20, 10), Entry(30, 10, is_pinned=True)]
    tight = Policy(1, keep_best=False, budget_bytes=30, optimizer_in_newest_only=True)
    assert plan_save(have, Entry(40, 10), None, tight, 0) == SavePlan((20,), ())
    assert plan_save(have, Entry(40, 10), None, Policy(1, keep_best=False), 0) == SavePlan((), (20,))
    # The latest may go: a pinned one can be resumed from.
    assert plan_save([have[0], Entry(20, 10)], Entry(40, 10), None, Policy(1, False, budget_bytes=20), 0) == SavePlan(
        (20,), ()
    )


def test_a_checkpoint_saved_again_stays_until_it_is_replaced_and_is_not_deleted_after():
    policy = Policy(1, keep_best=False, budget_bytes=20)
    assert plan_save(entries(20), Entry(20, 10), None, policy, 0) == SavePlan((), ())
    assert plan_save(entries(10, 20), Entry(20, 10), 20, policy, 0) == SavePlan((10,), ())


def test_an_entry_newer_than_the_save_is_an_error():
    with pytest.raises(CheckpointError, match=r"checkpoint-50 is newer than checkpoint-40"):
        plan_save(entries(30, 50), Entry(40, 10), None, Policy(2, False), 0)


def test_a_weights_only_best_is_stripped_once_a_newer_one_is_written():
    policy = Policy(1, keep_best=True, best_weights_only=True)
    have = [Entry(10, 10, optimizer_bytes=6)]
    assert plan_save(have, Entry(20, 10, optimizer_bytes=6), 10, policy, 0) == SavePlan((), (), strip_after=(10,))
    # Killed before it was stripped: done before the next save, and 4 + 10 + 10 bytes are enough.
    have = [*have, Entry(20, 10, optimizer_bytes=6)]
    tight = dataclasses.replace(policy, budget_bytes=24)
    assert plan_save(have, Entry(30, 10), 10, tight, 0) == SavePlan((), (20,), strip_first=(10,))


def test_the_old_best_is_stripped_before_a_save_but_is_a_whole_backup_after_it():
    policy = Policy(2, keep_best=True, best_weights_only=True)
    older, newer = Entry(10, 10, optimizer_bytes=6), Entry(20, 10, optimizer_bytes=6)
    new = Entry(30, 10, optimizer_bytes=6)
    plan = plan_save([older, newer], new, 30, policy, 0, previous_best_step=10)
    assert plan == SavePlan((), (10,), strip_first=(10,))
    assert plan_save([newer], new, 30, policy, 0, previous_best_step=20) == SavePlan((), ())


def test_what_is_deleted_first_is_not_stripped_before():
    policy = Policy(2, keep_best=False, optimizer_in_newest_only=True, budget_bytes=20)
    have = [Entry(10, 10, optimizer_bytes=6), Entry(20, 10, optimizer_bytes=6)]
    plan = plan_save(have, Entry(30, 10, optimizer_bytes=6), None, policy, 0)
    assert plan == SavePlan((10,), (), strip_after=(20,))


def test_only_the_newest_keeps_its_optimizer():
    policy = Policy(3, keep_best=False, optimizer_in_newest_only=True)
    have = [Entry(10, 4, is_resumable=False), Entry(20, 10, optimizer_bytes=6)]
    assert plan_save(have, Entry(30, 10, optimizer_bytes=6), None, policy, 0) == SavePlan((), (), strip_after=(20,))


def test_a_checkpoint_without_optimizer_state_is_not_stripped():
    policy = Policy(None, keep_best=True, best_weights_only=True, optimizer_in_newest_only=True)
    assert plan_save(entries(10, 20), Entry(30, 10), 10, policy, 0) == SavePlan((), ())


def test_a_save_killed_after_its_rename_is_finished_on_resume():
    policy = Policy(1, keep_best=True, best_weights_only=True)
    have = [Entry(10, 10, optimizer_bytes=6), Entry(20, 10, optimizer_bytes=6), Entry(30, 10, optimizer_bytes=6)]
    assert plan_cleanup(have, 10, policy) == SavePlan((), (20,), strip_after=(10,))
    assert plan_cleanup(have[2:], 30, policy) == SavePlan((), ())
    assert plan_cleanup([], None, policy) == SavePlan((), ())
