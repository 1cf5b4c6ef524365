"""A `metric_for_best_model` that evaluations cannot give is refused before the first step; odd metrics cost nothing."""

import json
import logging
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tiny_classifier import ROWS, make_args, make_model
from transformers import TrainerCallback

from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer

EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2}


def make(folder: Any, compute: Any = None, cls: type = FastTrainer, sets: Any = ROWS, **given: Any) -> Any:
    callbacks = given.pop("callbacks", None)
    args = make_args(folder, **{**EVERY_TWO, **given})
    return cls(make_model(), args, train_dataset=ROWS, eval_dataset=sets, compute_metrics=compute, callbacks=callbacks)


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_a_metric_for_best_model_that_evaluations_do_not_give_is_refused_before_the_first_step(tmp_path):
    two = {"near": ROWS, "far": ROWS[:3]}
    for given, words in (
        ({"sets": two, "metric_for_best_model": "loss"}, ("'eval_loss'", "eval_far_loss, eval_near_loss")),
        ({"compute": accuracy, "sets": two, "load_best_model_at_end": True}, ("eval_far_loss", "and more")),
        ({"metric_for_best_model": "accuracy"}, ("but eval_loss. ",)),
        ({"metric_for_best_model": "los"}, ("mean 'eval_loss'",)),
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


def test_metrics_that_others_add_are_left_alone(tmp_path):
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    for i, given in enumerate(
        ({"callbacks": [Adds()]}, {"cls": Own}, {"compute": lambda p: {"mine": 1.0}, "sets": stream})
    ):
        trainer = make(tmp_path / f"{i}", metric_for_best_model="mine", greater_is_better=True, **given)
        trainer.train()
        assert trainer.state.best_metric == 1.0


def test_what_json_does_not_hold_does_not_cost_the_checkpoint(tmp_path):
    class Logs(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            state.log_history.append({"gates": np.zeros(2), "path": tmp_path, "rate": np.float32(0.5)})

    make(tmp_path, lambda p: {"f1": np.array([0.5, 0.25])}, callbacks=[Logs()], max_steps=2).train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["log_history"][0] == {"gates": [0.0, 0.0], "path": str(tmp_path), "rate": 0.5}
    assert next(entry["eval_f1"] for entry in state["log_history"] if "eval_f1" in entry) == [0.5, 0.25]


def test_a_metric_that_becomes_none_is_not_the_best(tmp_path, caplog):
    values = iter([0.5, None])
    trainer = make(tmp_path, lambda p: {"f1": next(values)}, metric_for_best_model="f1", greater_is_better=True)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert (trainer.state.best_metric, trainer.state.global_step) == (0.5, 4)
    assert "eval_f1 is None at step 4: never the best." in caplog.text
