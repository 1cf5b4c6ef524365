"""Trainer's `hyperparameter_search` by optuna: each trial trains a model of its own, as the plan says."""

import os
import signal
from pathlib import Path

import pytest
import torch
from miniature_esm import esm_config
from peft import PeftModel
from run_outcomes import losses
from safetensors.torch import load_file
from tiny_classifier import ROWS, make_args
from token_rows import pad_rows
from transformers import EsmForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from hf_ext.errors import TrainingStopped
from hf_ext.trainer import FastTrainer

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.CRITICAL)

MIXED = [{"input_ids": [0, *range(4, 6 + i % 8), 2], "labels": i % 2} for i in range(16)]  # 4 to 11 tokens


def build(trial=None):
    """With dropout, and without a seed of its own."""
    return EsmForSequenceClassification(esm_config())


def make(folder, cls=FastTrainer, model_init=build, rows=ROWS, callbacks=(), **given):
    args_cls = {} if issubclass(cls, FastTrainer) else {"cls": TrainingArguments}
    args = make_args(folder, **args_cls, **{"eval_strategy": "steps", "eval_steps": 2, **given})
    return cls(None, args, pad_rows, rows, rows, model_init=model_init, callbacks=[*callbacks])


def search(trainer, rates, **given):
    """A trial for each rate."""

    def space(trial):
        rate = rates[trial.number]
        return {"learning_rate": trial.suggest_float("learning_rate", rate, rate)}

    return trainer.hyperparameter_search(space, n_trials=len(rates), direction="minimize", **given)


class Kept(TrainerCallback):
    """Keeps the losses of all that was trained."""

    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.losses += [logs["loss"]] if "loss" in logs else []


def test_a_search_and_the_run_after_it_are_those_of_stock_trainer(tmp_path):
    found = {}
    for cls in (Trainer, FastTrainer):
        kept, folder = Kept(), tmp_path / cls.__name__
        trainer = make(folder, cls, callbacks=[kept], load_best_model_at_end=True)
        best = search(trainer, [1e-3, 3e-2])
        folders = sorted(str(path.relative_to(folder)) for path in folder.rglob("checkpoint-*"))
        trainer.args.learning_rate = best.hyperparameters["learning_rate"]
        trainer.train()
        found[cls] = best.run_id, folders, kept.losses, trainer.model.state_dict(), best.objective
    stock, ours = found[Trainer], found[FastTrainer]
    assert ours[:3] == stock[:3]
    assert ours[1] == [f"run-{trial}/checkpoint-{step}" for trial in (0, 1) for step in (2, 4)]
    assert len(ours[2]) == 12  # two trials and a run, of four steps each
    assert len({tuple(ours[2][i : i + 4]) for i in (0, 4, 8)}) == 2  # of which one trial has other rates
    assert all(torch.equal(weight, stock[3][name]) for name, weight in ours[3].items())
    assert ours[4] == pytest.approx(stock[4], abs=1e-6)  # of means


class Rows(TrainerCallback):
    """Keeps the number of rows that a layer of the model at hand computes on, from when training begins."""

    def __init__(self):
        self.found = []

    def watch(self, model):
        model.esm.encoder.layer[0].register_forward_pre_hook(lambda layer, args: self.found.append(len(args[0])))

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.watch(model)


def test_speedups_are_applied_to_the_model_of_each_trial_and_taken_from_it_afterwards(tmp_path):
    models, watched = [], Rows()

    def build_and_keep(trial):
        models.append(build())
        return models[-1]

    speedups = ["attention", "packing"]
    trainer = make(tmp_path, model_init=build_and_keep, rows=MIXED, callbacks=[watched], speedups=speedups)
    search(trainer, [1e-3, 1e-2])
    assert watched.found == [1] * 2 * (4 + 2 * 2)  # two trials of four steps and two evaluations, in two batches each
    trainer.train()
    assert watched.found == [1] * 3 * (4 + 2 * 2)
    assert trainer.model is models[3]  # the first was Trainer's own, to begin with
    trainer.end()
    watched.found.clear()
    for model in models[1:]:
        model(**pad_rows(MIXED[:4]))
    assert watched.found == [4] * 3  # padded


def test_a_trial_that_is_not_finite_fails_and_the_search_goes_on(tmp_path, caplog):
    best = search(make(tmp_path), [1e38, 1e-2])
    assert best.run_id == "1"
    assert "This trial is given up" in caplog.text


def test_a_trial_can_be_continued_and_never_continues_another_run(tmp_path):
    make(tmp_path).train()
    trainer = make(tmp_path, resume="auto", allow_changed=["all"])
    search(trainer, [3e-3, 1e-2])
    whole = load_file(tmp_path / "run-1" / "checkpoint-4" / "model.safetensors")
    states = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("run-*/checkpoint-2/scheduler.pt"))]
    assert [state["base_lrs"] for state in states] == [[3e-3, 3e-3], [1e-2, 1e-2]]
    trainer.train(resume_from_checkpoint=str(tmp_path / "run-1" / "checkpoint-2"))
    assert len(losses(trainer)) == 4
    assert all(torch.equal(whole[name], weight) for name, weight in trainer.model.state_dict().items() if name in whole)


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_search_that_is_stopped_says_what_goes_on_from_there(tmp_path):
    study = {"study_name": "s", "storage": optuna.storages.InMemoryStorage(), "load_if_exists": True}
    with pytest.raises(TrainingStopped, match="load_if_exists=True"):
        search(make(tmp_path, callbacks=[Kill()]), [1e-3], **study)
    again = make(tmp_path)
    assert again.hyperparameter_search(lambda trial: {}, n_trials=1, **study).run_id == "1"
    assert {path.name for path in tmp_path.glob("run-*")} == {"run-0", "run-1"}


def test_adapters_go_around_each_model_and_arguments_that_were_set_since_stay(tmp_path):
    trainer = make(tmp_path, use_peft=True, lora_r=2, speedups=["data_loading"])
    trainer.args.dataloader_pin_memory = True  # which the plan has switched off
    found = set()
    for _ in range(2):
        trainer.train()
        assert isinstance(trainer.model, PeftModel)
        assert not isinstance(trainer.model.get_base_model(), PeftModel)
        assert trainer.args.dataloader_pin_memory
        found.add((trainer.plan["lora"].reason, *losses(trainer)))
    assert len(found) == 1
    assert Path(tmp_path, "checkpoint-4", "adapter_model.safetensors").is_file()
