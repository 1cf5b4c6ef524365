"""Loaders of one process and of one of several: whose rows, in which batches."""

from types import SimpleNamespace

import pytest

from hf_ext.data.batching import RepeatedRows
from hf_ext.errors import ArgumentError
from hf_ext.training.loaders import Loaders, take_rows
from hf_ext.training_args import FastTrainingArguments

ROWS = [{"x": i} for i in range(5)]


def make_loaders(folder, rank=0, world_size=1, counts=True, **given) -> Loaders:
    """Those of a trainer that is process `rank` of `world_size`, whose loss counts items or not."""
    settings = {"use_cpu": True, "report_to": "none", "per_device_train_batch_size": 2, **given}
    args = FastTrainingArguments(str(folder), **settings)
    places = {"process_index": rank, "world_size": world_size, "train_batch_size": args.train_batch_size}
    state = SimpleNamespace(end_of_dataloader=False)
    return Loaders(
        SimpleNamespace(
            args=SimpleNamespace(**vars(args), **places),
            data_collator=list,
            accelerator=SimpleNamespace(prepare=lambda loader: loader, gradient_state=state),
            loss_counts_items=lambda: counts,
            _ext_planned=SimpleNamespace(applied=lambda name: False),
            _get_collator_with_removed_columns=lambda collator, description: collator,
        )
    )


def deal(loaders: Loaders, rows=ROWS):
    """The batches of an epoch of all processes in turn, "stock" where they are Trainer's."""
    loader = loaders.train(rows, 2, lambda rows: range(len(rows)), lambda rows, **given: ["stock"])
    return [batch if batch == "stock" else [row["x"] for row in batch] for batch in loader]


@pytest.mark.parametrize(
    ("given", "batches"),
    [
        ({}, [[0, 1], [2, 3], [4], [4]]),  # the last one repeats a row
        ({"world_size": 1}, ["stock"]),
        ({"counts": False}, ["stock"]),
        ({"dataloader_drop_last": True}, ["stock"]),
        ({"accelerator_config": {"split_batches": True}}, ["stock"]),
    ],
)
def test_rows_are_dealt_evenly_only_where_the_loss_counts_items_and_nobody_asked_otherwise(tmp_path, given, batches):
    assert deal(make_loaders(tmp_path, **{"world_size": 2, **given})) == batches


@pytest.mark.parametrize(("rank", "num_rows", "is_marked"), [(0, 5, False), (1, 5, True), (1, 4, False)])
def test_an_epochs_last_batch_of_rows_of_another_process_is_marked(tmp_path, rank, num_rows, is_marked):
    loaders = make_loaders(tmp_path, rank=rank, world_size=2)
    deal(loaders)
    deal(loaders, ROWS[:num_rows])
    for is_last in (False, True):
        loaders._trainer.accelerator.gradient_state.end_of_dataloader = is_last
        batches = [{"x": 1}, {"x": 4}]
        loaders.mark_repeated(batches)
        assert [isinstance(batch, RepeatedRows) for batch in batches] == [False, is_last and is_marked]
    loaders.mark_repeated([])


def test_rows_that_the_main_process_would_hand_out_are_refused_on_several(tmp_path):
    given = {"accelerator_config": {"dispatch_batches": True}}
    assert deal(make_loaders(tmp_path, **given)) == ["stock"]
    with pytest.raises(ArgumentError, match="leave Accelerate's dispatch_batches"):
        deal(make_loaders(tmp_path, world_size=2, **given))


def test_rows_are_taken_by_number_and_in_that_order():
    assert [row["x"] for row in take_rows(ROWS, [3, 1])] == [3, 1]
