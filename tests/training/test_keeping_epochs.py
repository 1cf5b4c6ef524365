"""`--keep_every_epochs`: those of every N-th epoch stay beside newest and best, within the budget, also after kills."""

import re

import pytest
from continued_runs import train
from recipe_runs import kill_at, run

from hf_ext.errors import ArgumentError

EPOCHS = {"num_train_epochs": 5, "dataloader_num_workers": 0}  # of 4 steps


def steps_in(folder) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


# Saves of steps 3, 6, ... 18 and of the last one, 20; epochs 2 and 4 end with steps 8 and 16.
SAVING = {"save_steps": 3, "keep_every_epochs": 2, **EPOCHS}
KEPT = [8, 16]


def test_those_of_every_nth_epoch_stay_beside_the_limit_whatever_else_is_saved(tmp_path):
    train(tmp_path / "limit", save_total_limit=2, **SAVING)
    assert steps_in(tmp_path / "limit") == [*KEPT, 18, 20]
    train(tmp_path / "without", **{**SAVING, "keep_every_epochs": None}, save_total_limit=2)
    assert steps_in(tmp_path / "without") == [18, 20]
    train(tmp_path / "no others", save_strategy="no", save_total_limit=1, **SAVING)
    assert steps_in(tmp_path / "no others") == KEPT


def test_a_run_that_ended_early_goes_on_to_the_same_checkpoints(tmp_path):
    for kill_step in (7, 17):  # before and after epochs' checkpoints
        folder = tmp_path / str(kill_step)
        train(folder, kill_at=kill_step, save_total_limit=2, **SAVING)
        train(folder, resume="auto", save_total_limit=2, **SAVING)
        assert steps_in(folder) == [*KEPT, 18, 20]


@pytest.mark.nightly
def test_the_budget_wins_and_the_oldest_epoch_goes_before_a_newer_one(tmp_path):
    keeping = {"per_device_train_batch_size": 8, "save_steps": 1, "num_train_epochs": 44, "keep_every_epochs": 2}
    keeping |= {"dataloader_num_workers": 0}  # a step an epoch
    with pytest.raises(ArgumentError, match="cannot hold this run's checkpoints") as refusal:
        train(tmp_path / "refused", save_total_size_gb=1e-6, **keeping)
    smallest = float(re.search(r"save_total_size_gb ([\d.]+\d)", str(refusal.value))[1])
    train(tmp_path / "small", save_total_size_gb=smallest, **keeping)
    *older, before, newest = steps_in(tmp_path / "small")
    assert (before, newest) == (43, 44)  # the one before stood until the last was written
    assert 1 < len(older) < 21
    assert older == [*range(older[0], 43, 2)]  # odd ones went before even ones, older ones before newer ones


def test_what_cannot_be_kept_is_refused_before_the_first_step(tmp_path):
    for given in (
        {"keep_every_epochs": 6},
        {"keep_every_epochs": 2, "save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "loss"},
        {"keep_every_epochs": 2, "max_steps": 9, "rows": lambda table: table.to_iterable_dataset()},
    ):
        with pytest.raises(ArgumentError, match=r"keep_every_epochs=\d: needs that many epochs"):
            train(tmp_path, **{**SAVING, **given})


@pytest.mark.nightly
def test_after_kill_9_the_same_command_leaves_the_same_checkpoints(tmp_path):
    recipe = "examples/pde_operator/train"
    words = "--resolution 16 --num_train_samples 24 --num_eval_samples 8 --hidden_size 16 --num_hidden_layers 1 "
    words += "--num_attention_heads 2 --per_device_train_batch_size 4 --num_train_epochs 4 --save_steps 4 "
    words += "--save_total_limit 1 --keep_every_epochs 2 --eval_strategy no --disable_tqdm true"  # 6 steps an epoch
    run(recipe, tmp_path, *words.split(), output="whole")
    kill_at("checkpoint-12/manifest.json", recipe, tmp_path, *words.split(), output="killed")
    run(recipe, tmp_path, *words.split(), output="killed")
    assert steps_in(tmp_path / "killed") == steps_in(tmp_path / "whole") == [12, 24]
