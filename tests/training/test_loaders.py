"""Loaders without a trainer: whose rows, in which batches, and where a stream stands."""

from types import SimpleNamespace

import pytest
from datasets import IterableDataset
from loader_requests import make_args, make_planned, make_request
from torch.utils.data import SequentialSampler
from transformers import TrainerState

from hf_ext.data.even_batches import RepeatedRows
from hf_ext.errors import ArgumentError
from hf_ext.training.loaders import Loaders, in_order, take_rows

ROWS = [{"x": i} for i in range(5)]


def make_loaders(folder, *, plan=(), **given) -> Loaders:
    args = make_args(folder, **given)
    return Loaders(args, make_planned(args, **dict(plan)))


def numbers(loader) -> list[list[int]]:
    return [[row["x"] for row in batch] for batch in loader]


def count() -> bool:
    return True


def never() -> bool:
    raise AssertionError("asked on one process")


def test_one_process_without_a_plan_gets_the_stock_loader(tmp_path):
    assert numbers(make_loaders(tmp_path).train(make_request(ROWS), never)) == [[0, 1], [2, 3], [4]]
    assert numbers(make_loaders(tmp_path).evaluation(make_request(ROWS))) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("given", "counts", "batches"),
    [
        ({}, True, [[0, 1], [2, 3], [4], [4]]),  # of all processes in turn: the last one repeats a row
        ({}, False, [[0, 1], [2, 3], [4]]),
        ({"dataloader_drop_last": True}, True, [[0, 1], [2, 3], [4]]),
        ({"accelerator_config": {"split_batches": True}}, True, [[0, 1], [2, 3], [4]]),
    ],
)
def test_rows_are_dealt_evenly_only_where_the_loss_counts_items_and_nobody_asked_otherwise(
    tmp_path, given, counts, batches
):
    loaders = make_loaders(tmp_path, world_size=2, **given)
    assert numbers(loaders.train(make_request(ROWS), lambda: counts)) == batches


@pytest.mark.parametrize(("rank", "is_marked"), [(0, False), (1, True)])
def test_a_last_batch_of_another_process_is_marked(tmp_path, rank, is_marked):
    loaders = make_loaders(tmp_path, rank=rank, world_size=2)
    loaders.train(make_request(ROWS), count)
    state = SimpleNamespace(end_of_dataloader=False)
    batches = loaders.mark_repeated(iter([{"x": 1}, {"x": 4}]), state)
    assert not isinstance(next(batches), RepeatedRows)
    state.end_of_dataloader = True
    assert isinstance(next(batches), RepeatedRows) == is_marked


def test_another_training_set_is_not_marked_by_the_one_before(tmp_path):
    loaders = make_loaders(tmp_path, rank=1, world_size=2)
    loaders.train(make_request(ROWS), count)
    loaders.train(make_request(ROWS[:4]), count)
    (batch,) = loaders.mark_repeated(iter([{"x": 1}]), SimpleNamespace(end_of_dataloader=True))
    assert not isinstance(batch, RepeatedRows)


def test_batches_by_tokens_keep_the_budget_and_say_how_full_they_are(tmp_path):
    rows = [{"input_ids": [1] * length} for length in (1, 2, 3, 4, 4)]
    args = make_args(tmp_path)
    planned = make_planned(args, token_budget={"max_tokens": 8})
    loader = Loaders(args, planned).train(make_request(rows), never)
    widths = [[len(row["input_ids"]) for row in batch] for batch in loader]
    assert sorted(width for batch in widths for width in batch) == [1, 2, 3, 4, 4]
    assert max(len(batch) * max(batch) for batch in widths) <= 8
    evidence = planned.plan["token_budget"].evidence
    assert evidence["batches_per_epoch"] == len(widths)
    assert 0.5 < evidence["real_tokens"] <= 1


def test_text_is_grouped_by_its_own_length_and_the_stock_sampler_is_not_asked(tmp_path):
    rows = [{"sequence": "A" * length} for length in (1, 40, 2, 39)]
    collator = SimpleNamespace(columns={"protein": ["sequence"]})
    loaders = make_loaders(tmp_path, train_sampling_strategy="group_by_length", world_size=2)
    order = list(loaders.sampler(rows, collator, never))
    assert {order.index(1), order.index(3)} in ({0, 1}, {2, 3})
    assert make_loaders(tmp_path).sampler(rows, collator, lambda: "stock") == "stock"


@pytest.mark.parametrize("config", [{"split_batches": True}, {"dispatch_batches": True}])
def test_a_stream_is_refused_where_accelerate_would_hand_it_out(tmp_path, config):
    loaders = make_loaders(tmp_path, accelerator_config=config)
    with pytest.raises(ArgumentError, match="Every process reads a training stream itself"):
        loaders.train(make_request(IterableDataset.from_generator(lambda: iter(ROWS))), never)


def test_a_stream_is_read_pass_after_pass_and_stands_where_the_last_step_that_ended_left_it(tmp_path):
    loaders = make_loaders(tmp_path)
    assert loaders.state() is None
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    batches = iter(loaders.train(make_request(stream), never))
    loaders.begin_epoch(0, None)
    assert [[row["x"] for row in next(batches)] for _ in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    loaders.on_train_begin(None, TrainerState(global_step=3), None)
    position = loaders.state()
    assert (position["pass"], position["rows"]) == (1, 1)
    assert position == loaders.position(3)
    assert loaders.position(2)["rows"] == 4


def test_a_stream_that_is_continued_is_not_read_again(tmp_path):
    first = make_loaders(tmp_path)
    stream = IterableDataset.from_generator(lambda: iter(ROWS))
    batches = iter(first.train(make_request(stream), never))
    first.begin_epoch(0, None)
    [next(batches) for _ in range(3)]
    second = make_loaders(tmp_path)
    batches = second.train(make_request(stream), never)
    second.load(first.position(2))
    assert second.position(2) == first.position(2)  # until the epoch begins
    second.begin_epoch(2, 2)
    again = iter(batches)
    assert [[row["x"] for row in next(again)] for _ in range(4)][2:] == [[4, 0], [1, 2]]


def test_evaluation_is_in_order_on_one_process_and_left_to_accelerate_on_several():
    assert isinstance(in_order(ROWS, 1), SequentialSampler)
    assert in_order(ROWS, 2) is None
    assert in_order(iter(ROWS), 1) is None


def test_rows_are_taken_by_number_and_in_that_order():
    assert [row["x"] for row in take_rows(ROWS, [3, 1])] == [3, 1]
