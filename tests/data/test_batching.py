"""Epochs dealt to 1, 2 and 3 processes: every row once, equally many batches, the steps of one process."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as StockSampler

from hf_ext.data.batching import EvenBatchSampler, LengthGroupedSampler, TokenBudgetBatchSampler
from hf_ext.data.columns import factorize


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
    starts = range(0, max(map(len, batches)), passes)
    return [sorted(row for own in batches for batch in own[i : i + passes] for row in batch) for i in starts]


def test_rows_that_are_left_over_are_shared_out_and_accelerate_repeats_some():
    assert list(make_even(11, 2, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10]]
    assert list(make_even(10, 2, 3)) == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]
    sampler, few, none = make_even(5, 2, 2), make_even(1, 2, 3), make_even(0, 2, 3)
    assert (list(sampler), sampler.num_repeated) == ([[0, 1], [2, 3], [4], [4]], 1)
    assert (list(few), few.num_repeated, list(none), none.num_repeated) == ([[0], [0], [0]], 2, [], 0)
    stock = deal(BatchSampler(SequentialSampler(range(5)), 2, drop_last=False), 2)
    assert stock == [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]  # when this fails, Accelerate repeats nothing: drop ours


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_comes_once_in_equally_many_batches(world_size):
    for rows_per_batch, num_rows in ((size, num) for size in (1, 3) for num in range(1, 40)):
        sampler = make_even(num_rows, rows_per_batch, world_size)
        dealt = deal(sampler, world_size)
        assert len({len(own) for own in dealt}) == 1
        assert sorted(row for own in trained_on(sampler, dealt) for batch in own for row in batch) == [*range(num_rows)]
        assert {1 <= len(batch) <= rows_per_batch for own in dealt for batch in own} == {True}


SHAPES = [(12, 1, 1), (4, 1, 3), (6, 2, 1), (2, 2, 3), (4, 3, 1), (1, 3, 4)]  # rows, processes, passes: 12 rows a step


@pytest.mark.parametrize("num_rows", [1, 11, 12, 13, 38, 48])
def test_steps_hold_the_same_rows_however_they_are_divided_also_those_left_after_two(num_rows):
    steps = []
    for rows_per_batch, world_size, passes in SHAPES:
        sampler = make_even(num_rows, rows_per_batch, world_size)
        steps.append(rows_of_steps(trained_on(sampler, deal(sampler, world_size)), passes))
        if num_rows > 24:
            left = trained_on(sampler, deal(sampler, world_size, num_skipped=2 * passes))
            assert rows_of_steps(left, passes) == steps[0][2:]
    assert all(found == steps[0] for found in steps)
    assert len(steps[0]) == -(-num_rows // 12)
    stock = deal(BatchSampler(SequentialSampler(range(num_rows)), 2, drop_last=False), 2)
    assert (rows_of_steps(stock, 3) == steps[0]) == (num_rows % 4 == 0)  # Accelerate's repeat


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
        assert rows_of_steps(deal(sampler, world_size, passes), passes) == found[-1][1:]
    assert all(steps == found[0] for steps in found)
    assert sorted(row for step in found[0] for row in step) == list(range(num_rows))
    uneven = make_budget(num_rows, 2, 1, packed)  # not told how many passes make a step
    assert num_rows == 12 or rows_of_steps(deal(uneven, 2), 3) != found[0]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_fewer_rows_than_batches_of_a_step_come_once_in_fewer_passes(packed):
    batches = list(make_budget(5, 2, 6, packed))
    assert sorted(row for batch in batches for row in batch) == list(range(5))
    assert len(batches) % 2 == 0


# --- similar lengths together -----------------------------------------------------------------------------------------

LENGTHS = [(37 * i) % 101 + 1 for i in range(200)]


def order(epoch: int, seed: int = 3) -> list[int]:
    sampler = LengthGroupedSampler(LENGTHS, 8, seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def padding(rows: list[int]) -> int:
    batches = [[LENGTHS[row] for row in rows[i : i + 8]] for i in range(0, len(rows), 8)]
    return sum(max(batch) * len(batch) - sum(batch) for batch in batches)


def test_grouped_by_length_every_epoch_has_every_row_once_with_little_padding():
    for epoch in range(3):
        assert sorted(order(epoch)) == list(range(200))
        assert padding(order(epoch)) < 0.3 * padding(list(range(200)))


def test_the_order_by_length_follows_from_seed_and_epoch_and_that_of_transformers_from_the_process_state():
    found = []
    for state in (0, 1):
        torch.manual_seed(state)
        found.append((order(1), list(StockSampler(8, lengths=LENGTHS))))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]  # when this fails, the stock sampler resumes exactly: drop ours
    others = [order(2), order(1, seed=4), order(0, seed=4)]  # the last one as seed + epoch would have it
    assert found[0][0] not in others


def test_length_grouping_reaches_the_sampler_below():
    sampler = EvenBatchSampler(LengthGroupedSampler(LENGTHS, 12, 0), 3, 2)
    first = list(sampler)
    sampler.sampler.set_epoch(1)
    assert list(sampler) != first


def test_equal_values_have_equal_numbers_in_the_order_in_which_they_first_occur():
    numbers, distinct = factorize(["b", "a", "b", None])
    assert (numbers.tolist(), distinct) == ([0, 1, 0, 2], ["b", "a", None])
    assert factorize([])[0].shape == (0,)
