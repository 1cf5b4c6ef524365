"""A `metric_for_best_model` that evaluations will not give is refused before the first step; nothing else changes."""

import json
import logging
import random
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
    """A classifier with what an evaluation must leave alone: dropout and running means."""

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


def test_a_metric_for_best_model_that_evaluations_do_not_give_is_refused_before_the_first_step(tmp_path):
    two = {"near": ROWS, "far": ROWS[:3]}
    for given, words in (
        ({"compute": accuracy, "metric_for_best_model": "acuracy"}, ("'eval_acuracy'", "mean 'eval_accuracy'", "loss")),
        ({"sets": two, "metric_for_best_model": "loss"}, ("'eval_loss'", "eval_far_loss, eval_near_loss")),
        ({"compute": accuracy, "sets": two, "load_best_model_at_end": True}, ("eval_far_accuracy",)),
        ({"metric_for_best_model": "accuracy"}, ("but eval_loss. ",)),
    ):
        trainer = make(tmp_path, **given)
        with pytest.raises(ArgumentError) as error:
            trainer.train()
        assert all(word in str(error.value) for word in words), error.value
        assert trainer.state.global_step == 0
    for name in ("eval_near_accuracy", "far_loss", "near_runtime"):
        trainer = make(tmp_path / name, accuracy, sets=two, metric_for_best_model=name, greater_is_better=True)
        trainer.train()
        assert trainer.state.global_step == 4


class Own(FastTrainer):
    def evaluate(self, *args, **kwargs):
        return {**super().evaluate(*args, **kwargs), "eval_mine": 1.0}


class Adds(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_mine"] = 1.0


def test_metrics_that_others_add_or_that_fail_on_few_rows_are_left_alone(tmp_path, caplog):
    def needs_all(prediction):
        if len(prediction.label_ids) < len(ROWS):
            raise ZeroDivisionError("one class")
        return {"mine": 1.0}

    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    for i, given in enumerate(
        (
            {"callbacks": [Adds()]},
            {"cls": Own},
            {"compute": needs_all, "per_device_eval_batch_size": 4},
            {"compute": lambda p: {"mine": 1.0}, "sets": stream},
        )
    ):
        trainer = make(tmp_path / f"{i}", metric_for_best_model="mine", greater_is_better=True, **given)
        trainer.train()
        assert trainer.state.best_metric == 1.0
    assert "The evaluation is not checked before training: ZeroDivisionError: one class" in caplog.text


class Sees(TrainerCallback):
    """Logs, and batches of evaluations, as callbacks hear of them."""

    def __init__(self):
        self.heard: list[Any] = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.heard.append(("log", state.global_step, logs.get("loss"), logs.get("eval_loss")))

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


def run(folder: Any, best: str, called: list[int], rows: type = Shuffled) -> tuple[Any, ...]:
    def counting(prediction):
        called.append(len(prediction.label_ids))
        return {"steps": 1.0}

    sees, model = Sees(), Norm()
    given = {"model": model, "metric_for_best_model": best, "greater_is_better": False, "per_device_eval_batch_size": 4}
    trainer = make(folder, counting, sets=rows(), callbacks=[sees], **given)
    trainer.train()
    weights = [value.tolist() for value in model.state_dict().values()]
    return weights, sees.heard, trainer.evaluation_facts()["full_rows"]


def test_training_and_evaluations_are_the_same_with_and_without_the_trial(tmp_path):
    called: list[int] = []
    expected = run(tmp_path / "untried", "loss", called)  # which is known without
    assert called == [16, 16]
    assert run(tmp_path / "tried", "steps", called) == expected
    assert called == [16, 16, 8, 16, 16]
    assert run(tmp_path / "moved", "steps", [], Moved) != run(tmp_path / "still", "loss", [], Moved)


def test_what_json_does_not_hold_does_not_cost_the_checkpoint(tmp_path):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"gates": np.zeros(2), "path": tmp_path, "rate": np.float32(0.5)})

    make(tmp_path, lambda p: {"f1": np.array([0.5, 0.25])}, callbacks=[Logs()], max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0] == {"gates": [0.0, 0.0], "path": str(tmp_path), "rate": 0.5}
    assert next(entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry) == [0.5, 0.25]


def test_a_metric_that_becomes_none_is_not_the_best(tmp_path, caplog):
    values = iter([0.1, 0.5, None])  # of the trial, and of two evaluations
    trainer = make(tmp_path, lambda p: {"f1": next(values)}, metric_for_best_model="f1", greater_is_better=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert (trainer.state.best_metric, trainer.state.global_step) == (0.5, 4)
    assert "eval_f1 is None at step 4: never the best." in caplog.text
