"""What would end a run at its first evaluation or save is said before its first step, and nothing else changes."""

import json
import logging
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_classifier import ROWS, make_args, make_model
from torch import nn
from transformers import TrainerCallback

from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer

EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2}


class Norm(nn.Module):
    """A classifier with what an evaluation must leave alone: dropout, running means, and a count of its calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(32, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.dropout(self.norm(self.embed(input_ids).mean(1))))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make(folder: Any, compute: Any = None, cls: type = FastTrainer, sets: Any = ROWS, **given: Any) -> Any:
    own = {name: given.pop(name) for name in ("callbacks", "model") if name in given}
    model = own.pop("model", None) or make_model()
    args = make_args(folder, **{**EVERY_TWO, **given})
    return cls(model, args, train_dataset=ROWS, eval_dataset=sets, compute_metrics=compute, **own)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def refused(folder: Any, *words: str, **given: Any) -> None:
    trainer = make(folder, **given)
    with pytest.raises(ArgumentError) as error:
        trainer.train()
    assert all(word in str(error.value) for word in words), error.value
    assert trainer.state.global_step == 0
    assert not [*folder.glob("*checkpoint*")]


def test_what_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path):
    for value, words in (
        (np.array([0.5, 0.4]), ("'f1'", "ndarray", "float(value)", "'f1_0'")),
        (np.array([0.5]), ("'f1'", "ndarray")),
        (torch.ones(2), ("'f1'", "Tensor")),
        ({"a": [object()]}, ("'f1'", "dict", "object")),
        ({1: 0.5, "a": 0.5}, ("'f1'", "dict")),
        (1j, ("'f1'", "complex")),
    ):
        refused(tmp_path, *words, compute=lambda p, value=value: {"f1": value})
    make(tmp_path, lambda p: {"f1": np.ones(2)}, save_strategy="no").train()  # nothing is written
    refused(tmp_path, "returned NoneType", compute=lambda p: None)
    refused(tmp_path, "returned 0 as float", compute=lambda p: {0: 0.5})


def test_what_a_checkpoint_can_hold_is_taken(tmp_path):
    found = {"a": np.float32(0.5), "b": np.bool_(True), "c": torch.tensor(0.5), "d": {"e": [np.float32(1)]}, "f": None}
    make(tmp_path, lambda p: dict(found), save_steps=4).train()
    assert (tmp_path / "checkpoint-4" / "trainer_state.json").is_file()


def test_a_metric_for_best_model_that_evaluations_do_not_give_is_refused_before_the_first_step(tmp_path):
    two = {"near": ROWS, "far": ROWS[:3]}
    words = "but eval_loss, eval_accuracy. "
    refused(
        tmp_path, "'eval_acuracy'", "mean 'eval_accuracy'", words, compute=accuracy, metric_for_best_model="acuracy"
    )
    refused(tmp_path, "'eval_loss'", "eval_near_loss, eval_far_loss", sets=two, metric_for_best_model="loss")
    refused(tmp_path, "eval_far_accuracy", compute=accuracy, sets=two, load_best_model_at_end=True)
    refused(tmp_path, "there is no", compute=lambda p: {"f1": [0.5, 0.4]}, metric_for_best_model="f1")
    given = {"prediction_loss_only": True, "metric_for_best_model": "accuracy"}
    refused(tmp_path, "but eval_loss. ", compute=accuracy, **given)
    for name in ("eval_near_accuracy", "far_loss", "near_runtime"):
        trainer = make(tmp_path / name, accuracy, sets=two, metric_for_best_model=name, greater_is_better=True)
        trainer.train()
        assert trainer.state.global_step == 4


def test_names_that_follow_from_the_rows_are_looked_for_in_all_of_them(tmp_path):
    def per_class(prediction):
        return {f"share_{label}": float((prediction.label_ids == label).mean()) for label in set(prediction.label_ids)}

    rows = [{**row, "labels": int(i == 5)} for i, row in enumerate(ROWS)]
    trainer = make(tmp_path, per_class, sets=rows, metric_for_best_model="share_1", per_device_eval_batch_size=1)
    trainer.train()
    assert trainer.state.best_metric == 1 / 16


def test_metrics_that_a_callback_adds_or_that_fail_on_few_rows_are_left_alone(tmp_path, caplog):
    class Adds(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            metrics["eval_mine"] = 1.0

    def needs_all(error, prediction):
        if len(prediction.label_ids) < len(ROWS):
            raise error
        return accuracy(prediction)

    trainer = make(tmp_path / "adds", accuracy, callbacks=[Adds()], metric_for_best_model="mine")
    trainer.train()
    assert trainer.state.best_metric == 1.0
    refused(tmp_path, "ndarray", compute=lambda p: {"f1": np.zeros(2)}, callbacks=[Adds()])
    for i, error in enumerate((ZeroDivisionError("one class"), ArgumentError("8 rows"))):
        given = {"per_device_eval_batch_size": 4, "metric_for_best_model": "accuracy"}
        make(tmp_path / f"{i}", partial(needs_all, error), **given).train()
    assert "The evaluation is not checked before training: ZeroDivisionError: one class" in caplog.text
    assert "The evaluation is not checked before training: RuntimeError: ArgumentError: 8 rows" in caplog.text


def test_methods_of_a_subclass_that_make_an_evaluation_are_not_tried(tmp_path):
    called = []

    class Mine(FastTrainer):
        def evaluate(self, *args, **kwargs):
            called.append(self.state.global_step)
            return {**super().evaluate(*args, **kwargs), "eval_mine": 1.0}

    make(tmp_path, accuracy, cls=Mine, metric_for_best_model="mine").train()
    assert called == [2, 4]


class Sees(TrainerCallback):
    """Evaluations and batches of them, as callbacks hear of them."""

    def __init__(self):
        self.heard: list[Any] = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.heard.append(("evaluate", state.global_step, metrics["eval_loss"]))

    def on_prediction_step(self, args, state, control, **kwargs):
        self.heard.append(("batch", state.global_step))


class Shuffled(torch.utils.data.Dataset):
    """Rows that draw from generators, the process's and one of their own."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, i):
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        return ROWS[int(self.generator.integers(len(ROWS)))]


class Moved(Shuffled):
    """The broken twin: what it keeps its place in is no generator."""

    def __init__(self):
        self.calls = 0

    def __getitem__(self, i):
        self.calls += 1
        return ROWS[self.calls // 3 % len(ROWS)]


def run(folder: Any, compute: Any, rows: type = Shuffled) -> tuple[Any, ...]:
    sees, model = Sees(), Norm()
    given = {"callbacks": [sees], "model": model, "metric_for_best_model": "loss", "per_device_eval_batch_size": 4}
    trainer = make(folder, compute, sets=rows(), **given)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [value.tolist() for value in model.state_dict().values()]
    num_logged = len(trainer.state.log_history)
    return losses, weights, sees.heard, trainer.state.best_metric, num_logged, trainer.evaluation_facts()["full_rows"]


def test_training_and_evaluations_are_the_same_with_and_without_the_trial(tmp_path):
    called = []

    def counting(prediction):
        called.append(len(prediction.label_ids))
        return {}

    expected = run(tmp_path / "untried", None)  # without metrics there is nothing to try
    tried = run(tmp_path / "tried", counting)
    assert called == [8, 16, 16]
    assert tried == expected
    assert run(tmp_path / "moved", counting, Moved) != run(tmp_path / "still", None, Moved)


def test_what_comes_into_the_log_another_way_does_not_cost_the_checkpoint(tmp_path):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"gates": np.zeros(2), "path": tmp_path, "rate": np.float32(0.5)})

    make(tmp_path, callbacks=[Logs()], max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0] == {"gates": [0.0, 0.0], "path": str(tmp_path), "rate": 0.5}


def test_a_metric_that_becomes_none_is_not_the_best(tmp_path, caplog):
    values = iter([0.1, 0.5, None])  # of the trial, and of two evaluations
    trainer = make(tmp_path, lambda p: {"f1": next(values)}, metric_for_best_model="f1", greater_is_better=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert (trainer.state.best_metric, trainer.state.global_step) == (0.5, 4)
    assert "eval_f1 is None at step 4: never the best." in caplog.text


def test_a_stream_is_left_out(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    make(tmp_path, lambda p: {"f1": 1.0}, sets=stream, metric_for_best_model="f1", greater_is_better=True).train()
