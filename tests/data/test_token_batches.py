"""Batches by tokens: every row once, the budget kept, as many batches in every epoch, and not the same ones."""

import numpy as np
import pytest

from hf_ext.data.batching import (
    TokenBudgetBatchSampler,
    batches_by_tokens,
    count_tokens,
    cut_padded,
    pack_best_fit,
    split_batches,
)
from hf_ext.errors import ArgumentError, DataError

MODES = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def protein_lengths(num: int, seed: int = 0) -> np.ndarray:
    """Tokens of proteins of 30 to 1024 residues, log-normal around 280, with two special tokens."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(280), 0.6, 4 * num))
    return drawn[(drawn >= 30) & (drawn <= 1024)][:num].astype(int) + 2


def sampler(lengths, max_tokens=4096, seed=0, **given) -> TokenBudgetBatchSampler:
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


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_padded_batches_are_cut_where_the_longest_row_times_the_rows_would_exceed_the_budget():
    lengths = np.array([[2], [2], [3], [5], [5], [6]])
    # 2,2,3 pad to 9; with the 5 they would pad to 20. 5,5 pad to 10; with the 6 to 18.
    assert cut_padded(lengths, np.arange(6), 10) == [[0, 1, 2], [3, 4], [5]]
    assert cut_padded(lengths, np.arange(6), 10, max_batch_size=2) == [[0, 1], [2, 3], [4], [5]]


def test_without_a_seed_batches_begin_with_the_longest_row():
    # 6 alone; 5,5 pad to 10; 3,2 and then 2 to 9
    assert batches_by_tokens([2, 5, 3, 6, 5, 2], 10) == [[3], [1, 4], [2, 0, 5]]
    assert batches_by_tokens([20, 1], 10) == [[0], [1]]  # above the budget
    assert batches_by_tokens([], 10) == []


def test_two_inputs_are_padded_each_on_its_own():
    lengths = np.array([[1, 4], [4, 1], [1, 1]])
    # Rows 0 and 1 hold 5 tokens each, but both inputs pad to 4: 2 * (4 + 4) = 16.
    assert cut_padded(lengths, np.arange(3), 15) == [[0], [1, 2]]
    assert cut_padded(lengths, np.arange(3), 16) == [[0, 1], [2]]


def test_packing_puts_a_row_into_the_fullest_batch_that_holds_it():
    totals = np.array([6, 5, 4, 3, 5, 2])
    # 6 | 5 | 4 joins 6 (4 left, exactly) | 3 joins 5 (2 left) | 5 opens | 2 joins the batch with 2 left
    assert pack_best_fit(totals, np.arange(6), 10) == [[0, 2], [1, 3, 5], [4]]
    assert pack_best_fit(totals, np.arange(6), 10, max_batch_size=2) == [[0, 2], [1, 3], [4, 5]]


def test_the_largest_batches_are_halved_until_the_number_divides():
    assert split_batches([[0, 1, 2, 3, 4], [5], [6, 7]], 4) == [[0, 1], [5], [6, 7], [2, 3, 4]]
    assert split_batches([[0], [1], [2]], 4) == [[0], [1], [2], [0]]  # nothing left to halve: the first is repeated
    assert split_batches([[0, 1]], 1) == [[0, 1]]


# --- properties ------------------------------------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(("num", "max_tokens", "world_size"), [(3000, 4096, 1), (500, 1100, 4), (37, 2048, 2)])
def test_each_epoch_has_every_row_once_within_the_budget_in_equally_many_batches(packed, num, max_tokens, world_size):
    lengths = protein_lengths(num)
    batches = sampler(lengths, max_tokens, packed=packed, world_size=world_size)
    assert len(batches) % world_size == 0
    for epoch in range(12):
        batches.set_epoch(epoch)
        plan = list(batches)
        assert len(plan) == len(batches)
        assert broken_rules(plan, lengths, max_tokens, packed) == []


def test_the_check_of_the_rules_sees_each_of_them_broken():
    assert broken_rules([[0, 1], [1, 2]], [3, 3, 3], 6, packed=False) == ["every row once"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 8, packed=False) == ["budget"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 4, packed=True) == ["budget"]
    assert broken_rules([[0, 1, 2]], [1, 1, 3], 9, packed=False, max_batch_size=2) == ["rows per batch"]


@MODES
def test_rows_per_batch_can_be_capped_and_two_inputs_stay_within_the_budget_together(packed):
    lengths = np.stack([protein_lengths(400), protein_lengths(400, seed=1)], axis=1)
    batches = sampler(lengths, 8192, packed=packed, max_batch_size=5)
    assert broken_rules(list(batches), lengths, 8192, packed, max_batch_size=5) == []
    assert max(map(len, batches)) == 5


@MODES
def test_a_plan_follows_from_seed_and_epoch_alone(packed):
    lengths = protein_lengths(300)
    one, same, other = (sampler(lengths, packed=packed, seed=seed) for seed in (1, 1, 2))
    assert list(one) == list(same)
    assert list(one) == list(one)  # iterating does not advance it
    assert list(one) != list(other)
    list(same)
    for batches in (one, same):
        batches.set_epoch(5)
    assert list(one) == list(same)


@MODES
@pytest.mark.parametrize("num", [60, 2000])
def test_rows_meet_other_rows_in_the_next_epoch_and_batches_are_in_no_order(packed, num):
    lengths = protein_lengths(num)
    batches = sampler(lengths, packed=packed)
    plans = [batches.plan_epoch(epoch) for epoch in range(2)]
    first, second = ({(a, b) for batch in plan for a in batch for b in batch if a < b} for plan in plans)
    assert len(first & second) < 0.7 * len(first)  # of 1.0 where batches are the same
    same = set.intersection(*({frozenset(batch) for batch in plan} for plan in plans))
    assert len(same) < 0.3 * len(batches)
    means = [lengths[batch].mean() for batch in plans[0]]
    assert num < 100 or abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


@MODES
def test_nearly_all_computed_tokens_are_real(packed):
    lengths = protein_lengths(20_000)
    assert sampler(lengths, 16_384, packed=packed).efficiency() >= 0.97
    random = np.random.default_rng(0).permutation(20_000).reshape(-1, 40)
    assert lengths.sum() / sum(40 * lengths[batch].max() for batch in random) < 0.5  # batches of 40 random rows


def test_efficiency_is_real_tokens_over_computed_or_budgeted_ones():
    assert sampler([3, 4], 8).efficiency() == 7 / 8  # one batch, 2 * 4
    assert sampler([3, 4], 10, packed=True).efficiency() == 7 / 10


def test_a_row_that_is_repeated_comes_last_so_that_the_loss_can_leave_it_out():
    for epoch in range(6):
        for num_rows, world_size, repeated in ((3, 2, 1), (3, 4, 1), (2, 4, 2), (4, 2, 0)):
            sampler = TokenBudgetBatchSampler([9] * num_rows, 10, seed=0, world_size=world_size)
            plan = sampler.plan_epoch(epoch)
            assert (sampler.num_repeated, len(plan) % world_size) == (repeated, 0)
            assert sorted(row for batch in plan[: len(plan) - repeated] for row in batch) == list(range(num_rows))


# --- errors ----------------------------------------------------------------------------------------------------------


def test_a_row_above_the_budget_is_refused_by_name_and_a_row_at_the_budget_is_not():
    assert len(sampler([10, 20], 20)) == 2
    with pytest.raises(DataError, match=r"Row 1 has 21 tokens.*max_tokens_per_batch is 20 \(2 rows.*at least 30"):
        sampler([10, 21, 30], 20)


def test_no_rows_and_numbers_below_one_are_refused():
    with pytest.raises(DataError, match="no rows"):
        sampler([])
    for name in ("max_tokens", "world_size", "max_batch_size"):
        with pytest.raises(ArgumentError, match=f"{name}=0: must be at least 1"):
            sampler([3, 4], **{name: 0})


# --- counting tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("too_long", "limit"), [("error", None), ("truncate", 6), ("window", 6)])
def test_counted_tokens_are_those_the_collator_makes_or_more(make_affinity, too_long, limit):
    _, collator = make_affinity()
    collator.too_long, collator.window_overlap = too_long, 2
    for tokenizer in collator.tokenizers.values():
        tokenizer.max_residues = limit
    rows = [
        {"heavy": "EVQLVESG", "light": "DIQ", "antigen": "MKTAYIAKDDGGM", "label": 1.0},
        {"heavy": "EVQ", "light": "DIQMTQ", "antigen": "M", "label": 2.0},
    ]
    counted = count_tokens(rows, collator)
    made = [[collator([row])["sequences"][name]["attention_mask"].numel() for name in collator.columns] for row in rows]
    assert counted.shape == (2, 3)
    assert (counted >= made).all()
    if too_long != "window":
        assert counted.tolist() == made
    else:  # 8 residues in windows of 6 that share 2: two windows of 6 + 2 tokens
        assert counted[0, 0] == 16
        assert (counted == made).sum() >= 4


def test_cached_inputs_are_not_counted(make_affinity):
    assert count_tokens([{"antigen": "MKT"}, {"antigen": "MKTAY"}], make_affinity()[1]).tolist() == [[5], [7]]


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
