"""Alarms about predictions that collapse: when they are said, that they are said once, and what is logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from watched_runs import LABELS, NUM_ROWS, Kill, Terminate, make_script, make_trainer, model_of

from hf_ext.errors import TrainingStopped
from hf_ext.trainer import FastTrainer

GOOD = model_of(0.3)
CONSTANT = np.full(NUM_ROWS, 8.0)
FLAT = 8 + (GOOD - 8) / 50  # in order, but close to a constant
NINE_VALUES = np.round(GOOD / 1.2) * 1.2
ROUNDED = torch.tensor(GOOD).bfloat16().double().numpy()
SAVING = {"save_strategy": "steps", "save_steps": 1}


def train(folder: Path, *predictions: np.ndarray, **given: Any) -> FastTrainer:
    trainer = make_trainer(folder, make_script(*predictions), **{"max_steps": len(predictions), **given})
    trainer.train()
    return trainer


def said(trainer: FastTrainer) -> list[tuple[int, str]]:
    """Step and first words of every alarm."""
    entries = [(entry["step"], alarm) for entry in trainer.collapse_alarms for alarm in entry["alarms"]]
    return [(step, " ".join(alarm.split()[:4])) for step, alarm in entries]


def test_predictions_that_learn_raise_no_alarm_and_their_spread_is_logged(tmp_path, caplog):
    trainer = train(tmp_path, GOOD, GOOD)
    assert trainer.collapse_alarms == []
    assert "ALARM" not in caplog.text
    log = next(log for log in trainer.state.log_history if "eval_spread_ratio" in log)
    assert log["eval_spread_ratio"] == pytest.approx(np.std(GOOD) / np.std(LABELS))
    assert log["eval_num_distinct"] == NUM_ROWS


def test_an_alarm_is_said_once_until_it_goes_away(tmp_path, caplog):
    caplog.set_level(logging.INFO, "hf_ext")
    trainer = train(tmp_path, GOOD, FLAT, FLAT * 1.001, GOOD, FLAT, FLAT)
    assert said(trainer) == [(2, "The predictions spread 0.020"), (5, "The predictions spread 0.020")]
    assert [record.levelname for record in caplog.records if "ALARM" in record.message] == ["WARNING"] * 2


def test_another_kind_of_alarm_is_said_beside_one_that_holds(tmp_path):
    trainer = train(tmp_path, GOOD, NINE_VALUES, np.where(np.arange(NUM_ROWS) < 60, 8.4, NINE_VALUES), GOOD)
    assert said(trainer)[0] == (2, "9 distinct values in") or said(trainer)[0][1].endswith("distinct values in")
    assert {step for step, _ in said(trainer)} == {2}


def test_predictions_rounded_to_bfloat16_are_detected_at_the_first_evaluation(tmp_path):
    assert said(train(tmp_path, ROUNDED, GOOD, max_steps=10)) == [(1, "Every prediction is a")]


def test_a_fresh_head_may_be_constant_in_warm_up_and_not_after_it(tmp_path):
    early = train(tmp_path / "early", *[FLAT] * 3, *[GOOD] * 7, warmup_steps=3, lr_scheduler_type="constant")
    assert said(early) == []
    late = train(tmp_path / "late", *[FLAT] * 4, *[GOOD] * 6, warmup_steps=3)
    assert said(late) == [(4, "The predictions spread 0.020")]


def test_values_that_are_not_finite_are_alarming_at_once(tmp_path):
    broken = np.where(np.arange(NUM_ROWS) == 3, np.nan, GOOD)
    trainer = train(tmp_path, broken, GOOD, max_steps=10)
    assert any("1 of 200 predictions are NaN or infinite" in alarm for alarm in trainer.collapse_alarms[0]["alarms"])


def test_each_evaluation_set_has_its_own_alarms(tmp_path):
    sets = {"a": make_script(FLAT), "b": make_script(GOOD)}
    trainer = make_trainer(tmp_path, sets, max_steps=3, metric_for_best_model="a_spearman")
    trainer.train()
    assert [(entry["step"], entry["name"]) for entry in trainer.collapse_alarms] == [(1, "a")]
    assert "eval_b_spread_ratio" in trainer.state.log_history[-2]
    json.dumps(trainer.collapse_alarms, allow_nan=False)


def test_classes_are_no_regression(tmp_path):
    labels = (LABELS > 8).astype(float)
    trainer = make_trainer(tmp_path, make_script(CONSTANT, labels=labels), metrics=lambda p: {"spearman": 0.0})
    trainer.train()
    assert trainer.collapse_alarms == []
    assert not any("eval_spread_ratio" in log for log in trainer.state.log_history)


def test_a_resumed_run_neither_repeats_nor_forgets_an_alarm(tmp_path):
    script = make_script(GOOD, FLAT, FLAT, FLAT, ROUNDED)
    whole = make_trainer(tmp_path / "whole", script, max_steps=6)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path / "run", script, Kill(3), max_steps=6, **SAVING).train()
    resumed = make_trainer(tmp_path / "run", script, resume="auto", max_steps=6)
    resumed.train()
    assert [step for step, _ in said(whole)] == [2, 5]
    assert resumed.collapse_alarms == whole.collapse_alarms


def test_an_evaluation_that_is_given_up_in_its_second_set_is_alarming_once(tmp_path):
    sets = {"a": make_script(GOOD, FLAT), "b": make_script(GOOD)}
    settings = {"max_steps": 4, "metric_for_best_model": "a_spearman", **SAVING}
    stopped = make_trainer(tmp_path, sets, Terminate(4), **settings)
    with pytest.raises(TrainingStopped):
        stopped.train()
    assert stopped.collapse_alarms == []
    resumed = make_trainer(tmp_path, sets, resume="auto", **settings)
    resumed.train()
    assert said(resumed) == [(3, "The predictions spread 0.020")]
