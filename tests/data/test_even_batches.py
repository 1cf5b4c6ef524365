"""Epochs dealt to 1, 2 and 3 processes: every row once, equally many batches, the steps of one process."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, SequentialSampler

from hf_ext.data.batching import EvenBatchSampler, LengthGroupedSampler
from hf_ext.data.token_budget import TokenBudgetBatchSampler

WORLDS = [1, 2, 3]


def deal(sampler, world_size: int, num_skipped: int = 0) -> list[list[list[int]]]:
    """The batches of each process, as Accelerate deals them and Trainer skips them."""
    shards = [BatchSamplerShard(sampler, world_size, rank) for rank in range(world_size)]
    assert {len(shard) for shard in shards} == {-(-len(sampler) // world_size)}
    return [list(SkipBatchSampler(shard, num_skipped)) for shard in shards]


def make_even(num_rows: int, rows_per_batch: int, world_size: int) -> EvenBatchSampler:
    return EvenBatchSampler(SequentialSampler(range(num_rows)), rows_per_batch, world_size)


def trained_on(sampler: EvenBatchSampler, batches: list[list[list[int]]]) -> list[list[list[int]]]:
    """Without the repeated batches, which the loss leaves out."""
    first = sampler.world_size - sampler.num_repeated
    return [own[:-1] if rank >= first else own for rank, own in enumerate(batches)]


def rows_of_steps(batches: list[list[list[int]]], passes: int) -> list[list[int]]:
    """Row numbers of each optimizer step, over all processes."""
    length = max(map(len, batches))
    return [
        sorted(row for own in batches for batch in own[start : start + passes] for row in batch)
        for start in range(0, length, passes)
    ]


def test_rows_that_are_left_over_are_shared_out():
    assert list(make_even(11, 2, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert list(make_even(10, 2, 3)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    assert list(make_even(8, 2, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_processes_for_which_no_row_is_left_get_one_of_anothers_and_accelerates_repeat_more():
    sampler = make_even(5, 2, 2)
    assert (list(sampler), sampler.num_repeated) == ([[0, 1], [2, 3], [4], [4]], 1)
    few = make_even(1, 2, 3)
    assert (list(few), few.num_repeated) == ([[0], [0], [0]], 2)
    assert (list(make_even(0, 2, 3)), make_even(0, 2, 3).num_repeated) == ([], 0)
    stock = deal(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False), 2)
    assert stock == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]  # when this fails, Accelerate repeats nothing: drop ours


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("rows_per_batch", [1, 3])
def test_every_row_comes_once_in_equally_many_batches(world_size, rows_per_batch):
    for num_rows in range(1, 40):
        sampler = make_even(num_rows, rows_per_batch, world_size)
        dealt = deal(sampler, world_size)
        assert len({len(own) for own in dealt}) == 1
        kept = trained_on(sampler, dealt)
        assert sorted(row for own in kept for batch in own for row in batch) == list(range(num_rows))
        assert max(len(batch) for own in dealt for batch in own) <= rows_per_batch
        assert min(len(batch) for own in dealt for batch in own) >= 1


SHAPES = [(12, 1, 1), (4, 1, 3), (6, 2, 1), (2, 2, 3), (4, 3, 1), (1, 3, 4)]  # rows, processes, passes: 12 rows a step


@pytest.mark.parametrize("num_rows", [1, 2, 11, 12, 13, 25, 38, 48])
def test_steps_hold_the_same_rows_however_they_are_divided(num_rows):
    steps = []
    for rows_per_batch, world_size, passes in SHAPES:
        sampler = make_even(num_rows, rows_per_batch, world_size)
        steps.append(rows_of_steps(trained_on(sampler, deal(sampler, world_size)), passes))
    assert all(found == steps[0] for found in steps)
    assert len(steps[0]) == -(-num_rows // 12)
    stock = deal(BatchSampler(SequentialSampler(range(num_rows)), 2, drop_last=False), 2)
    assert (rows_of_steps(stock, 3) == steps[0]) == (num_rows % 4 == 0)  # Accelerate's repeat


@pytest.mark.parametrize("before", SHAPES)
@pytest.mark.parametrize("now", SHAPES)
def test_a_run_that_goes_on_with_another_shape_has_the_rows_that_were_left(before, now):
    num_steps, steps = 2, []
    for rows_per_batch, world_size, passes in (before, now):
        sampler = make_even(38, rows_per_batch, world_size)
        skipped = num_steps * passes if (rows_per_batch, world_size, passes) == now else 0
        dealt = trained_on(sampler, deal(sampler, world_size, skipped))
        steps.append(rows_of_steps(dealt, passes))
    left = steps[1] if before != now else steps[0]
    assert left == [list(range(24, 36)), [36, 37]]


def test_length_grouping_reaches_the_sampler_below():
    lengths = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = EvenBatchSampler(LengthGroupedSampler(lengths, 12, 0), 3, 2)
    first = list(sampler)
    sampler.sampler.set_epoch(1)
    assert list(sampler) != first


# --- token budgets ---------------------------------------------------------------------------------------------------


def make_budget(num_rows: int, world_size: int, passes: int, packed: bool) -> TokenBudgetBatchSampler:
    lengths = torch.randint(3, 31, (num_rows,), generator=torch.Generator().manual_seed(0)).numpy()
    return TokenBudgetBatchSampler(lengths, 64, seed=0, packed=packed, world_size=world_size, passes_per_step=passes)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("num_rows", [12, 130])
def test_token_budgets_fill_the_same_steps_however_they_are_divided(packed, num_rows):
    found = []
    for world_size, passes in ((1, 6), (2, 3), (3, 2), (6, 1)):
        sampler = make_budget(num_rows, world_size, passes, packed)
        dealt = deal(sampler, world_size)
        assert {len(own) % passes for own in dealt} == {0}
        found.append(rows_of_steps(dealt, passes))
        left = rows_of_steps(deal(sampler, world_size, passes), passes)
        assert left == found[-1][1:]
    assert all(steps == found[0] for steps in found)
    assert sorted(row for step in found[0] for row in step) == list(range(num_rows))
    uneven = make_budget(num_rows, 2, 1, packed)  # not told how many passes make a step
    assert num_rows == 12 or rows_of_steps(deal(uneven, 2), 3) != found[0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_fewer_rows_than_batches_of_a_step_come_once_in_fewer_passes(packed):
    sampler = make_budget(5, 2, 6, packed)
    batches = list(sampler)
    assert sorted(row for batch in batches for row in batch) == list(range(5))
    assert len(batches) % 2 == 0
