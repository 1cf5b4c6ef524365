"""Begun loaders and data workers without a trainer: what a checkpoint keeps of them and gives back."""

from types import SimpleNamespace

import pytest
from loader_requests import make_args, make_planned
from torch.utils.data import DataLoader

from hf_ext.checkpoints.store import CheckpointStore
from hf_ext.data.repeatable_loaders import RepeatableLoader, make_repeatable
from hf_ext.errors import DataWorkerDied
from hf_ext.training.data_workers import DataWorkers
from hf_ext.training.repeatable_loading import RepeatableLoading

KEEPING = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}


def read(loader) -> list[int]:
    return [int(row) for row in loader]


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


class Killed(RuntimeError):
    """As torch says it."""


def test_a_worker_that_died_is_named_with_where_the_run_can_go_on(tmp_path):
    workers = DataWorkers(
        make_args(tmp_path, dataloader_num_workers=2), SimpleNamespace(checkpoints=CheckpointStore(tmp_path))
    )
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
    DataWorkers(make_args(tmp_path), None).end([loader])
    assert not process.is_alive()
