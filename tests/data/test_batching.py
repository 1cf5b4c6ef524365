"""Epochs in batches: every row once, budgets kept, as many batches on each process, the same steps on any number."""

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from torch.utils.data import BatchSampler, SequentialSampler
from transformers.trainer_pt_utils import LengthGroupedSampler as StockSampler

from hf_ext.data import EvenBatchSampler, LengthGroupedSampler, TokenBudgetBatchSampler, count_tokens
from hf_ext.errors import DataError

MODES = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def protein_lengths(num: int, seed: int = 0) -> np.ndarray:
    """Tokens of proteins of 30 to 1024 residues, log-normal around 280, with two special tokens."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(280), 0.6, 4 * num))
    return drawn[(drawn >= 30) & (drawn <= 1024)][:num].astype(int) + 2


def budget(lengths, max_tokens=4096, seed=0, **given) -> TokenBudgetBatchSampler:
    return TokenBudgetBatchSampler(lengths, max_tokens, seed=seed, **given)


def broken_rules(batches, lengths, max_tokens, packed, max_batch_size=None) -> list[str]:
    """Which promises of a plan do not hold."""
    lengths = np.asarray(lengths).reshape(len(lengths), -1)
    wrong = []
    if sorted(row for batch in batches for row in batch) != list(range(len(lengths))):
        wrong.append("every row once")
    sizes = [lengths[b].sum() if packed else len(b) * lengths[b].max(0).sum() for b in batches]
    if max(sizes) > max_tokens:
        wrong.append("budget")
    if max_batch_size and max(map(len, batches)) > max_batch_size:
        wrong.append("rows per batch")
    return wrong


@MODES
@pytest.mark.parametrize(("num", "max_tokens", "world_size"), [(3000, 4096, 1), (500, 1100, 4)])
def test_each_epoch_has_every_row_once_within_the_budget_in_equally_many_batches(packed, num, max_tokens, world_size):
    lengths = protein_lengths(num)
    batches = budget(lengths, max_tokens, packed=packed, world_size=world_size)
    assert len(batches) % world_size == 0
    for epoch in range(12):
        batches.set_epoch(epoch)
        plan = list(batches)
        assert len(plan) == len(batches)
        assert broken_rules(plan, lengths, max_tokens, packed) == []
    lengths = np.stack([protein_lengths(400), protein_lengths(400, seed=1)], axis=1)
    batches = budget(lengths, 8192, packed=packed, max_batch_size=5)
    assert broken_rules(list(batches), lengths, 8192, packed, max_batch_size=5) == []
    assert max(map(len, batches)) == 5


def test_the_check_of_the_rules_sees_each_of_them_broken():
    assert broken_rules([[0, 1], [1, 2]], [3, 3, 3], 6, packed=False) == ["every row once"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 8, packed=False) == ["budget"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 4, packed=True) == ["budget"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 9, packed=False, max_batch_size=2) == ["rows per batch"]


@MODES
def test_a_plan_follows_from_seed_and_epoch_alone(packed):
    lengths = protein_lengths(300)
    one, same, other = (budget(lengths, packed=packed, seed=seed) for seed in (1, 1, 2))
    assert list(one) == list(one) == list(same) != list(other)  # iterating does not advance it
    for batches in (one, same):
        batches.set_epoch(5)
    assert list(one) == list(same)


@MODES
def test_rows_meet_other_rows_in_the_next_epoch_and_batches_are_in_no_order(packed):
    for num in (60, 2000):
        lengths = protein_lengths(num)
        plans = [budget(lengths, packed=packed).plan_epoch(epoch) for epoch in range(2)]
        first, second = ({(a, b) for batch in plan for a in batch for b in batch if a < b} for plan in plans)
        assert len(first & second) < 0.7 * len(first)  # of 1.0 where batches are the same
        same = set.intersection(*({frozenset(batch) for batch in plan} for plan in plans))
        assert len(same) < 0.3 * len(plans[0])
    means = [lengths[batch].mean() for batch in plans[0]]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


@MODES
def test_nearly_all_computed_tokens_are_real(packed):
    lengths = protein_lengths(20_000)
    batches = list(budget(lengths, 16_384, packed=packed))
    computed = len(batches) * 16_384 if packed else sum(len(batch) * lengths[batch].max() for batch in batches)
    assert lengths.sum() / computed >= 0.97
    random = np.random.default_rng(0).permutation(20_000).reshape(-1, 40)
    assert lengths.sum() / sum(40 * lengths[batch].max() for batch in random) < 0.5  # batches of 40 random rows


def test_a_row_above_the_budget_and_no_rows_are_refused():
    assert len(budget([10, 20], 20)) == 2
    with pytest.raises(DataError, match=r"Row 1 has 21 tokens.*max_tokens_per_batch is 20 \(2 rows.*at least 30"):
        budget([10, 21, 30], 20)
    with pytest.raises(DataError, match="no rows"):
        budget([])


@pytest.mark.parametrize(("too_long", "limit"), [("error", None), ("truncate", 6), ("window", 6)])
def test_counted_tokens_are_those_the_collator_makes(make_affinity, too_long, limit):
    _, collator = make_affinity()
    collator.too_long = too_long
    for tokenizer in collator.tokenizers.values():
        tokenizer.max_residues = limit
    rows = [
        {"heavy": "EVQLVESG", "light": "DIQ", "antigen": "MKTAYIAKDDGGM", "label": 1.0},
        {"heavy": "EVQ", "light": "DIQMTQ", "antigen": "M", "label": 2.0},
    ]
    counted = count_tokens(rows, collator)
    made = [[collator([row])["sequences"][name]["attention_mask"].numel() for name in collator.columns] for row in rows]
    assert counted.shape == (2, 3)
    assert counted.tolist() == made
    cached = [{"antigen": row["antigen"][:5]} for row in rows]  # other inputs are cached, and not counted
    assert count_tokens(cached, collator).tolist() == [[7], [3]]


def test_without_text_the_length_column_counts_and_then_input_ids():
    def collate(rows):
        return rows

    both = [{"input_ids": [0, 5, 2], "length": 7}, {"input_ids": [0, 2], "length": 4}]
    assert count_tokens(both, collate).tolist() == [[7], [4]]
    assert count_tokens(both, collate, "tokens").tolist() == [[3], [2]]
    collate.pad_to_multiple_of = 8
    assert count_tokens(both, collate, "tokens").tolist() == [[8], [8]]
    with pytest.raises(DataError, match=r"columns are \['text'\]: add 'length'"):
        count_tokens([{"text": "M"}], collate)


def deal(sampler, world_size: int, num_skipped: int = 0) -> list[list[list[int]]]:
    """The batches of each process, as Accelerate deals them and Trainer skips them; without repeated ones."""
    shards = [BatchSamplerShard(sampler, world_size, rank) for rank in range(world_size)]
    assert {len(shard) for shard in shards} == {-(-len(sampler) // world_size)}
    dealt = [list(SkipBatchSampler(shard, num_skipped)) for shard in shards]
    assert len({len(own) for own in dealt}) == 1
    first = world_size - getattr(sampler, "num_repeated", 0)
    return [own[:-1] if rank >= first else own for rank, own in enumerate(dealt)]


def make_even(num_rows: int, rows_per_batch: int, world_size: int) -> EvenBatchSampler:
    return EvenBatchSampler(SequentialSampler(range(num_rows)), rows_per_batch, world_size)


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


SHAPES = [(12, 1, 1), (4, 1, 3), (6, 2, 1), (2, 2, 3), (4, 3, 1), (1, 3, 4)]  # rows, processes, passes: 12 rows a step


@pytest.mark.parametrize("num_rows", [1, 11, 12, 13, 38, 48])
def test_steps_hold_the_same_rows_however_they_are_divided_also_those_left_after_two(num_rows):
    steps = []
    for rows_per_batch, world_size, passes in SHAPES:
        dealt = deal(make_even(num_rows, rows_per_batch, world_size), world_size)
        assert {1 <= len(batch) <= rows_per_batch for own in dealt for batch in own} == {True}
        steps.append(rows_of_steps(dealt, passes))
        if num_rows > 24:
            left = deal(make_even(num_rows, rows_per_batch, world_size), world_size, num_skipped=2 * passes)
            assert rows_of_steps(left, passes) == steps[0][2:]
    assert all(found == steps[0] for found in steps)
    assert sorted(row for step in steps[0] for row in step) == [*range(num_rows)]
    assert len(steps[0]) == -(-num_rows // 12)
    stock = deal(BatchSampler(SequentialSampler(range(num_rows)), 2, drop_last=False), 2)
    assert (rows_of_steps(stock, 3) == steps[0]) == (num_rows % 4 == 0)  # Accelerate's repeat


@MODES
@pytest.mark.parametrize("num_rows", [12, 130])
def test_token_budgets_fill_the_same_steps_however_they_are_divided(packed, num_rows):
    lengths, found = torch.randint(3, 31, (num_rows,), generator=torch.Generator().manual_seed(0)).numpy(), []
    for world_size, passes in ((1, 6), (2, 3), (3, 2), (6, 1)):
        sampler = budget(lengths, 64, packed=packed, world_size=world_size, passes_per_step=passes)
        dealt = deal(sampler, world_size)
        assert {len(own) % passes for own in dealt} == {0}
        found.append(rows_of_steps(dealt, passes))
        assert rows_of_steps(deal(sampler, world_size, passes), passes) == found[-1][1:]
    assert all(steps == found[0] for steps in found)
    assert sorted(row for step in found[0] for row in step) == list(range(num_rows))
    uneven = budget(lengths, 64, packed=packed, world_size=2)  # not told how many passes make a step
    assert num_rows == 12 or rows_of_steps(deal(uneven, 2), 3) != found[0]
    few = list(budget(lengths[:5], 64, packed=packed, world_size=2, passes_per_step=6))  # fewer rows than a step's
    assert sorted(row for batch in few for row in batch) == list(range(5))
    assert len(few) % 2 == 0


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
    dealt = EvenBatchSampler(LengthGroupedSampler(LENGTHS, 12, 0), 3, 2)
    first = list(dealt)
    dealt.sampler.set_epoch(1)  # which reaches the sampler below
    assert list(dealt) != first


def test_the_order_by_length_follows_from_seed_and_epoch_and_that_of_transformers_from_the_process_state():
    found = []
    for state in (0, 1):
        torch.manual_seed(state)
        found.append((order(1), list(StockSampler(8, lengths=LENGTHS))))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]  # when this fails, the stock sampler resumes exactly: drop ours
    others = [order(2), order(1, seed=4), order(0, seed=4)]  # the last one as seed + epoch would have it
    assert found[0][0] not in others
