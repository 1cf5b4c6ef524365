"""Data workers and continuing: a run that was continued is the one that was not killed, or is said to be another."""

import numpy as np
import pytest
import torch
from continued_runs import EVALUATING, interrupt, same, train
from torch.utils.data import DataLoader
from train_until_stopped import Collator

from hf_ext.trainer import FastTrainer


class Masking(Collator):
    """As transformers' collator for masked language models says that it masks."""

    mlm = True


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", [2, 4, 6])  # in the first epoch, at its end, in the second
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_with_any_number_of_workers_a_continued_run_is_the_whole_one(tmp_path, step, num_workers):
    asked = {**EVALUATING, "dataloader_num_workers": num_workers}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", step=step, **asked), whole)
    assert same(train(tmp_path / "none", **EVALUATING, dataloader_num_workers=0), whole)
    assert not same(train(tmp_path / "other", **asked, seed=4), whole)


@pytest.mark.nightly
def test_with_workers_that_are_spawned_a_continued_run_is_the_whole_one(tmp_path):
    spawned = interrupt(tmp_path / "spawned", dataloader_multiprocessing_context="spawn")
    assert same(spawned, train(tmp_path / "whole"))


def test_workers_do_not_live_on(tmp_path, caplog):
    whole = train(tmp_path / "whole", **EVALUATING)
    asked = {**EVALUATING, "dataloader_persistent_workers": True}
    assert same(interrupt(tmp_path / "killed", **asked), whole)
    assert "dataloader_persistent_workers is off" in caplog.text


class OwnLoader(FastTrainer):
    def get_train_dataloader(self):
        own = {"collate_fn": self.data_collator, "num_workers": 1, "persistent_workers": True}
        return DataLoader(self.train_dataset, 2, generator=torch.Generator().manual_seed(7), shuffle=True, **own)


class Reversed(FastTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return [*range(len(self.train_dataset))][::-1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, []),
        ({"collator": Masking}, ["Masking draws masks at random"]),
        ({"trainer": Reversed}, ["The order of rows is the class's own"]),
        ({"trainer": OwnLoader}, ["The order of rows is the class's own", "live on (persistent_workers)"]),
    ],
)
def test_what_a_continued_run_cannot_go_on_with_exactly_is_said(tmp_path, caplog, asked, words):
    train(tmp_path, kill_at=3, **asked)
    assert "if it had not ended" not in caplog.text
    train(tmp_path, resume=str(tmp_path / "checkpoint-2"), **asked)
    assert caplog.text.count("if it had not ended") == len(words)
    assert all(said in caplog.text for said in words)


@pytest.mark.nightly
def test_the_evaluation_on_start_is_not_repeated_when_a_run_is_continued(tmp_path):
    asked = {**EVALUATING, "eval_on_start": True}
    whole = train(tmp_path / "whole", **asked)
    resumed = interrupt(tmp_path / "killed", **asked)
    evaluated = [[e["step"] for e in run.state.log_history if "eval_loss" in e] for run in (whole, resumed)]
    assert evaluated == [[0, 2, 4, 6, 8]] * 2
    assert same(resumed, whole)


def test_the_mean_loss_of_a_continued_run_is_that_of_its_own_steps(tmp_path):
    whole = train(tmp_path / "whole", dataloader_num_workers=0)
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    ours = interrupt(tmp_path / "ours", dataloader_num_workers=0, logging_steps=100)
    assert ours.state.log_history[-1]["train_loss"] == pytest.approx(np.mean(losses[2:]), rel=1e-5)
    again = train(tmp_path / "ours", dataloader_num_workers=0, logging_steps=100, resume="auto")
    assert again.state.log_history[-1]["train_loss"] == 0.0


def test_a_best_checkpoint_in_the_folder_that_a_run_continues_from_is_loaded_at_the_end(tmp_path):
    best = {**EVALUATING, "load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    best |= {"dataloader_num_workers": 0}
    whole = train(tmp_path / "whole", **best)
    assert whole.state.best_global_step == 2
    train(tmp_path / "old", kill_at=5, **best)
    ours = train(tmp_path / "new", resume=str(tmp_path / "old" / "checkpoint-4"), **best)
    assert ours.state.best_model_checkpoint == str(tmp_path / "old" / "checkpoint-2")
    assert same(ours, whole)
