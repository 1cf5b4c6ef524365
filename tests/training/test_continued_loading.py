"""Row order, begun loaders and data workers without a trainer: what a checkpoint keeps of them and gives back."""

import json

import pytest
import torch
from loader_requests import make_args, make_planned
from torch.utils.data import DataLoader, RandomSampler

from hf_ext.data.repeatable_loaders import RepeatableLoader, make_repeatable
from hf_ext.errors import DataWorkerDied
from hf_ext.training.data_workers import DataWorkers
from hf_ext.training.places import Places
from hf_ext.training.repeatable_loading import RepeatableLoading, begun_before
from hf_ext.training.row_order import RowOrder

KEEPING = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def make_shuffled() -> DataLoader:
    """Eight rows, in an order drawn from a generator of the sampler's own."""
    return make_repeatable(DataLoader(range(8), sampler=RandomSampler(range(8), generator=torch.Generator())))


def read(loader) -> list[int]:
    return [int(row) for row in loader]


def begin(order: RowOrder, loader: DataLoader) -> list[int]:
    order.begin_epoch(loader, 0)
    return read(loader)


def test_an_epoch_that_is_continued_has_the_order_it_began_with():
    torch.manual_seed(1)
    first, loader = RowOrder(), make_shuffled()
    loader.sampler.generator.manual_seed(5)
    whole = begin(first, loader)
    state = first.state()
    assert whole != sorted(whole)
    again = RowOrder()
    again.load(state)
    other = make_shuffled()
    other.sampler.generator.manual_seed(6)
    again.begin_epoch(other, 0)
    again.restore(is_within_epoch=True)
    assert read(other) == whole


def test_an_epoch_that_begins_goes_on_drawing_where_the_one_before_ended():
    first, loader = RowOrder(), make_shuffled()
    begin(first, loader)
    state, second_epoch = first.state(), read(loader)
    again, other = RowOrder(), make_shuffled()
    again.load(state)
    again.begin_epoch(other, 1)
    again.restore(is_within_epoch=False)
    assert read(other) == second_epoch


def test_other_generators_than_the_checkpoints_are_said(caplog):
    order, loader = RowOrder(), make_shuffled()
    begin(order, loader)
    again = RowOrder()
    again.load(order.state())
    again.begin_epoch(make_repeatable(DataLoader(range(8))), 0)
    again.restore(is_within_epoch=True)
    assert "other generators than in the checkpoint" in caplog.text


def make_loading(folder, **given) -> RepeatableLoading:
    args = make_args(folder, **given)
    return RepeatableLoading(args, make_planned(args))


def make_kept() -> DataLoader:
    return DataLoader(range(4), num_workers=0)


def test_loaders_of_passing_workers_draw_at_each_iteration_and_are_not_listed(tmp_path):
    loading = make_loading(tmp_path)
    loader = loading.take_train(make_kept())
    assert isinstance(loader, RepeatableLoader)
    assert not loader.draws_once
    read(loader)
    assert loading.state() == []


def test_loaders_of_persistent_workers_draw_once_and_are_listed_when_they_have(tmp_path):
    loading, rows = make_loading(tmp_path, **KEEPING), [1]
    loading.look_at("eval", rows, {})
    train, evaluation = loading.take_train(make_kept()), loading.take_evaluation(make_kept(), "eval", rows)
    assert (train.draws_once, evaluation.draws_once) == (True, True)
    assert loading.state() == []
    read(evaluation)
    assert loading.state() == ["eval"]
    read(train)
    assert loading.state() == ["eval", "train"]


def test_a_continued_run_knows_which_loaders_had_begun(tmp_path):
    loading, rows = make_loading(tmp_path, **KEEPING), [1]
    loading.go_on(["train"])
    assert loading.state() == ["train"]
    assert loading.take_train(make_kept()).has_begun
    loading.look_at("eval", rows, {})
    assert not loading.take_evaluation(make_kept(), "eval", rows).has_begun
    loading.go_on(None)
    assert not loading.take_train(make_kept()).has_begun


def test_evaluation_of_other_rows_is_made_anew_and_is_no_loader_of_the_run(tmp_path):
    loading, own, other = make_loading(tmp_path, **KEEPING), [1], [2]
    kept = {"eval": "loader of the run"}
    loading.look_at("eval", own, kept)
    kept["eval"] = "loader of the run"
    loading.look_at("eval", own, kept)
    assert kept  # the same rows
    loading.look_at("eval", other, kept)
    assert not kept
    read(loading.take_evaluation(make_kept(), "eval", own))
    assert loading.state() == []


@pytest.mark.parametrize(
    ("progress", "log", "sets", "begun"),
    [
        (["eval"], [{"eval_loss": 1}], None, ["eval"]),
        (None, [{"loss": 1}], None, ["train"]),
        (None, [{"eval_loss": 1}], None, ["train", "eval"]),
        (None, [{"eval_a_loss": 1}], {"a": [], "b": []}, ["train", "a", "b"]),
    ],
)
def test_a_checkpoint_that_does_not_say_what_had_begun_is_judged_by_its_log(tmp_path, progress, log, sets, begun):
    said = {"evaluation_pending": False, "only_model": False, "last_logged_step": 0, "best_saved_step": None}
    said["data_position"] = None
    if progress is not None:
        (tmp_path / "progress.json").write_text(json.dumps({**said, "begun_loaders": progress}))
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert begun_before(tmp_path, sets) == begun


class Killed(RuntimeError):
    """As torch says it."""


def test_a_worker_that_died_is_named_with_where_the_run_can_go_on(tmp_path):
    workers = DataWorkers(make_args(tmp_path, dataloader_num_workers=2), Places(tmp_path))
    said = r"Killed\. No checkpoint was saved yet\..*fewer than dataloader_num_work"
    with pytest.raises(DataWorkerDied, match=said), workers.naming_deaths():
        raise Killed("DataLoader worker (pid 7) is killed by signal: Killed.")
    with pytest.raises(RuntimeError, match="something else"), workers.naming_deaths():
        raise RuntimeError("something else")


def test_workers_that_live_on_are_ended(tmp_path):
    loader = make_repeatable(DataLoader(range(4), num_workers=1, persistent_workers=True))
    read(loader)
    (process,) = loader._iterator._workers
    assert process.is_alive()
    DataWorkers(make_args(tmp_path), Places(tmp_path)).end([loader])
    assert not process.is_alive()
