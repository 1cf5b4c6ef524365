"""Persistent workers, evaluations and continuing: dropout is that of the uninterrupted run, and stock Trainer's."""

import copy
import random

import numpy as np
import pytest
import torch
from resuming_runs import Killed
from torch.utils.data import DataLoader
from train_until_stopped import Case, Collator, make_model, make_rows
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_ext.data.repeatable_loaders import make_repeatable
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

SETTINGS = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "remove_unused_columns": False, "seed": 3}
SETTINGS |= {"per_device_train_batch_size": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "logging_steps": 1}
SETTINGS |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "save_steps": 2}
EVALUATING = {"eval_strategy": "steps", "eval_steps": 2}
MODEL = make_model()  # with dropout


class Kill(TrainerCallback):
    """Ends a run after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


class Drawing(Collator):
    """Adds noise to the labels, from the generators of torch, NumPy and Python."""

    def __call__(self, rows):
        batch = super().__call__(rows)
        noise = torch.rand(len(rows)) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return {**batch, "labels": batch["labels"] + noise}


def train(folder, trainer=FastTrainer, kill_at=None, resume=None, collator=Collator, **given):
    arguments = FastTrainingArguments if trainer is FastTrainer else TrainingArguments
    args = arguments(output_dir=str(folder), **{**SETTINGS, **given})
    rows = make_rows(8, 1), make_rows(4, 2) if "eval_strategy" in given else None
    callbacks = [] if kill_at is None else [Kill(kill_at)]
    made = trainer(copy.deepcopy(MODEL), args, collator(Case()), *rows, callbacks=callbacks)
    try:
        made.train(resume_from_checkpoint=resume)
    except Killed:
        assert kill_at is not None
    if isinstance(made, FastTrainer):
        made.end()
    for loader in made.accelerator._dataloaders:  # of stock Trainer: torch waits 5 s for workers left to it
        getattr(loader, "base_dataloader", loader)._iterator = None
    return made


def interrupt(folder, **given):
    """A run killed in the second step after its checkpoint, and continued."""
    train(folder, kill_at=4, **given)
    return train(folder, resume=str(folder / "checkpoint-2"), **given)


def same(ours, theirs, names=("loss", "grad_norm", "eval_loss")):
    logged = [[e[n] for e in trainer.state.log_history for n in names if n in e] for trainer in (ours, theirs)]
    weights = zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
    return logged[0] == logged[1] and all(torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("evaluating", [{}, EVALUATING], ids=["training", "evaluating"])
def test_with_persistent_workers_and_nothing_of_ours_it_trains_as_stock_trainer_and_continues_exactly(
    tmp_path, evaluating
):
    whole = train(tmp_path / "whole", **evaluating)
    assert same(whole, train(tmp_path / "stock", Trainer, **evaluating), ("loss", "grad_norm"))
    assert same(interrupt(tmp_path / "killed", **evaluating), whole)


def test_persistent_workers_of_the_plan_change_nothing(tmp_path):
    asked = {**EVALUATING, "speedups": ["data_loading"]}
    alone = train(tmp_path / "alone", **EVALUATING, dataloader_num_workers=0, dataloader_persistent_workers=False)
    assert same(train(tmp_path / "workers", **asked), alone)
    assert same(interrupt(tmp_path / "killed", **asked), alone)


def test_the_comparison_sees_a_loader_that_draws_as_torch_does(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_ext.mixins.repeatable_loading.make_repeatable", lambda loader, *_: loader)
    whole = train(tmp_path / "whole", **EVALUATING)
    assert not same(interrupt(tmp_path / "killed", **EVALUATING), whole)


def test_what_a_collator_draws_in_workers_depends_on_seed_epoch_and_batch_alone(tmp_path):
    asked = {**EVALUATING, "speedups": ["data_loading"], "collator": Drawing}
    whole = train(tmp_path / "whole", **asked)
    assert same(interrupt(tmp_path / "killed", **asked, dataloader_num_workers=2), whole)
    passing = {**asked, "dataloader_persistent_workers": False}
    assert same(interrupt(tmp_path / "passing", **passing), whole)
    assert not same(train(tmp_path / "other", **asked, seed=4), whole)


def numbers_taken(loader, passes):
    """How many of its next numbers torch's generator has given away after some passes over a loader."""
    torch.manual_seed(5)
    expected = [torch.get_rng_state()]
    for _ in range(passes + 1):
        torch.empty((), dtype=torch.int64).random_()
        expected.append(torch.get_rng_state())
    torch.manual_seed(5)
    for _ in range(passes):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    return next(i for i, state in enumerate(expected) if torch.equal(state, torch.get_rng_state()))


@pytest.mark.parametrize(
    ("given", "draws_once", "has_begun", "taken"),
    [
        ({}, False, False, 3),
        ({"num_workers": 1}, False, False, 3),
        ({"num_workers": 1, "persistent_workers": True}, False, False, 3),
        ({"num_workers": 1, "persistent_workers": True}, True, False, 1),
        ({"num_workers": 1, "persistent_workers": True}, True, True, 0),
    ],
)
def test_of_the_global_generator_each_pass_takes_one_number_or_the_first_alone(given, draws_once, has_begun, taken):
    loader = make_repeatable(DataLoader([0, 1, 2, 3], batch_size=2, **given), draws_once, has_begun)
    assert numbers_taken(loader, 3) == taken
    loader._iterator = None


def test_what_torch_itself_takes_depends_on_workers():
    loader = DataLoader([0, 1, 2, 3], batch_size=2, num_workers=1, persistent_workers=True)
    assert numbers_taken(loader, 3) == 1
    loader._iterator = None
    assert numbers_taken(DataLoader([0, 1, 2, 3], batch_size=2), 3) == 3
