"""What stays: the newest, the best, what the limit and the budget have room for; and a budget that cannot hold it."""

import random
import re
from dataclasses import replace

import pytest

from hf_ext.checkpoints.retention import (
    Entry,
    Policy,
    Sizes,
    check_budget,
    needed_bytes,
    steps_beyond_limit,
    steps_for_room,
)
from hf_ext.errors import ArgumentError

SIZES = Sizes(weights=4_000_000, optimizer=8_000_000, other=1_000_000)
FULL = 13_000_000


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
    with pytest.raises(ArgumentError, match=r"=2: give at least 3 \(newest, best, .* an epoch\)"):
        Policy(2, True, keep_epoch=True)


@pytest.mark.parametrize(
    ("excess", "best", "is_new_best", "outcome"),
    [
        (0, 2, False, []),
        (1, 2, False, [1]),
        (20, 2, False, [1, 3]),
        (21, 2, False, None),
        (21, 2, True, [1, 3, 2]),  # the best until now goes last, and only for a better one
        (31, 2, True, None),
        (30, None, False, [1, 2, 3]),
    ],
)
def test_room_is_made_of_the_least_value_first_and_never_of_the_newest(excess, best, is_new_best, outcome):
    assert steps_for_room(entries(1, 2, 3, 4), excess, best, Policy(None, True), is_new_best) == outcome


def test_random_runs_never_break_the_budget_nor_lose_the_last_checkpoint_or_the_best():
    for seed in range(300):
        draw = random.Random(seed)
        policy = Policy(draw.choice([None, 1, 2, 3]), draw.random() < 0.5)
        policy = replace(policy, keep_epoch=policy.limit in (None, 3) and draw.random() < 0.5)
        budget = needed_bytes(SIZES, policy, 500) + draw.choice([0, 0, FULL, 3 * FULL])
        disk: dict[int, Entry] = {}
        best = None
        for step in range(1, 25):
            is_best = draw.random() < 0.3 or best is None
            excess = 500 + FULL + sum(entry.num_bytes for entry in disk.values()) - budget
            for gone in steps_for_room([*disk.values()], excess, best, policy, is_best):
                del disk[gone]
                assert any(entry.is_resumable for entry in disk.values())  # also if it is killed here
            disk[step] = Entry(step, draw.randint(FULL - 9, FULL), ends_epoch=step % 5 == 0)
            assert 500 + sum(entry.num_bytes for entry in disk.values()) <= budget, (seed, step)
            best = step if is_best else best
            for gone in steps_beyond_limit([*disk.values()], best, policy):
                del disk[gone]
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
    check_budget(SIZES, fits, 700_000)
    with pytest.raises(ArgumentError) as refusal:
        check_budget(SIZES, replace(policy, budget_bytes=needed - 1), 700_000)
    text = str(refusal.value)
    parts = [float(number) for number in re.findall(r"([\d.]+) GB$", text, re.MULTILINE)]
    assert parts == [0.0007, 0.013, 0.013, 0.013, 0.013, 0.0527, 0.0527]
    assert "Smallest budget that works: --save_total_size_gb 0.0527." in text
