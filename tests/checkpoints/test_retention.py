"""What stays: the newest, the best, what the limit and the budget have room for; and a budget that cannot hold it."""

import random
import re
from dataclasses import replace

import pytest

from hf_ext.checkpoints.retention import (
    GB,
    Entry,
    Policy,
    Sizes,
    fit_budget,
    needed_bytes,
    steps_beyond_limit,
    steps_for_room,
    steps_to_strip,
)
from hf_ext.errors import ArgumentError

SIZES = Sizes(weights=4_000_000, optimizer=8_000_000, other=1_000_000)
FULL, LIGHT = 13_000_000, 5_000_000


def entries(*steps: int, **given) -> list[Entry]:
    return [Entry(step, 10, **given) for step in steps]


@pytest.mark.parametrize(
    ("policy", "best", "deleted"),
    [
        (Policy(None, True), 1, []),
        (Policy(0, True), 1, []),
        (Policy(1, False), None, [1, 2, 3]),
        (Policy(1, False), 2, [1, 2, 3]),  # without a metric nothing is the best
        (Policy(1, True), 4, [1, 2, 3]),
        (Policy(1, True), 2, [1, 3]),
        (Policy(2, True), 2, [1, 3]),
        (Policy(3, True), 1, [2]),
        (Policy(2, True), 9, [1, 2]),  # the best step was not saved
    ],
)
def test_a_limit_keeps_the_newest_and_the_best_and_then_the_newer_ones(policy, best, deleted):
    assert steps_beyond_limit(entries(1, 2, 3, 4), best, policy) == deleted


def test_the_newest_that_ends_an_epoch_is_kept_and_needs_a_place_in_the_limit():
    standing = [*entries(1, 2, ends_epoch=True), *entries(3, 4, 5)]
    assert steps_beyond_limit(standing, 3, Policy(3, True, keep_epoch=True)) == [1, 4]
    with pytest.raises(ArgumentError, match=r"save_total_limit=2 leaves no place .* at least 3 \(newest, best, epoch"):
        Policy(2, True, keep_epoch=True)


def test_what_is_uploaded_or_copied_stays_and_keeps_its_optimizer():
    standing = [*entries(1, is_pinned=True), *entries(2, 3)]
    assert steps_beyond_limit(standing, None, Policy(1, False)) == [2]
    assert steps_to_strip(standing, Policy(None, False, strips=True)) == [2]
    assert steps_for_room(standing, 20, None, Policy(None, False)) == ([2], 0)


def test_only_the_newest_to_continue_from_keeps_its_optimizer_where_little_is_stored():
    standing = [*entries(1, is_resumable=False), *entries(2, 3)]
    assert steps_to_strip(standing, Policy(None, True, strips=True)) == [2]
    assert steps_to_strip(standing, Policy(None, True)) == []


@pytest.mark.parametrize(
    ("room", "best", "is_new_best", "outcome"),
    [
        (40, 2, False, ([], 0)),
        (39, 2, False, ([1], 0)),
        (20, 2, False, ([1, 3], 0)),
        (19, 2, False, ([1, 3], 1)),
        (19, 2, True, ([1, 3, 2], 0)),  # the best until now goes last, and only for a better one
        (9, 2, True, ([1, 3, 2], 1)),
        (10, None, False, ([1, 2, 3], 0)),
    ],
)
def test_room_is_made_of_the_least_value_first_and_never_of_the_newest(room, best, is_new_best, outcome):
    assert steps_for_room(entries(1, 2, 3, 4), room, best, Policy(None, True), is_new_best) == outcome


def test_random_runs_never_break_the_budget_nor_lose_the_last_checkpoint_or_the_best():
    for seed in range(300):
        draw = random.Random(seed)
        policy = Policy(draw.choice([None, 1, 2, 3]), draw.random() < 0.5, strips=draw.random() < 0.3)
        policy = replace(policy, keep_epoch=policy.limit in (None, 3) and draw.random() < 0.5)
        budget = needed_bytes(SIZES, policy, 500) + draw.choice([0, 0, FULL, 3 * FULL])
        disk: dict[int, Entry] = {}
        best = None
        for step in range(1, 25):
            is_best = draw.random() < 0.3 or best is None
            room = budget - 500 - FULL
            given_up, shortfall = steps_for_room([*disk.values()], room, best, policy, is_best)
            assert shortfall == 0, (seed, step)
            for gone in given_up:
                del disk[gone]
                assert any(entry.is_resumable for entry in disk.values())  # also if it is killed here
            disk[step] = Entry(step, draw.randint(FULL - 9, FULL), ends_epoch=step % 5 == 0)
            assert 500 + sum(entry.num_bytes for entry in disk.values()) <= budget, (seed, step)
            best = step if is_best else best
            for gone in steps_beyond_limit([*disk.values()], best, policy):
                del disk[gone]
            for light in steps_to_strip([*disk.values()], policy):
                disk[light] = replace(disk[light], num_bytes=LIGHT, is_resumable=False)
            assert disk[step].is_resumable
            assert best in disk or not policy.keep_best
            assert policy.limit is None or len(disk) <= max(policy.limit, 1 + (policy.keep_best and best != step))
            assert not policy.keep_epoch or step // 5 * 5 in {0, *disk}


# --- a budget that cannot hold it -----------------------------------------------------------------------------------


def test_a_budget_one_byte_too_small_is_refused_with_the_arithmetic_and_the_one_that_works():
    policy = Policy(3, True, keep_epoch=True)
    needed = 700_000 + 4 * FULL
    assert needed_bytes(SIZES, policy, 700_000) == needed
    fits = replace(policy, budget_bytes=needed)
    assert fit_budget(SIZES, fits, 700_000, may_strip=True) == fits
    with pytest.raises(ArgumentError) as refusal:
        fit_budget(SIZES, replace(policy, budget_bytes=needed - 1), 700_000, may_strip=False)
    text = str(refusal.value)
    parts = [float(number) for number in re.findall(r"([\d.]+) GB$", text, re.MULTILINE)]
    assert parts == [0.0007, 0.013, 0.013, 0.013, 0.013, 0.0527, 0.0527]
    assert "Smallest budget that works: --save_total_size_gb 0.0527." in text
    assert "--disk_policy degrade would need 0.0367 GB: only the newest checkpoint keeps its optimizer state." in text


def test_a_smaller_budget_is_met_by_optimizer_states_in_the_newest_alone_or_refused():
    policy = Policy(None, True, budget_bytes=2 * FULL + LIGHT)
    assert fit_budget(SIZES, policy, 0, may_strip=True) == replace(policy, strips=True)
    short = replace(policy, budget_bytes=policy.budget_bytes - 1)
    with pytest.raises(ArgumentError, match=r"best checkpoint, weights only(?s:.*) 0\.031\. --disk_policy degrade is "):
        fit_budget(SIZES, short, 0, may_strip=True)
    plain = Policy(None, False, budget_bytes=GB // 100)
    with pytest.raises(ArgumentError, match=r"--save_total_size_gb 0\.026\. --disk_policy degrade would not make them"):
        fit_budget(SIZES, plain, 0, may_strip=False)
