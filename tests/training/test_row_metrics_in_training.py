"""Metrics of binders and within groups in every evaluation of a run: of the right rows, choosing the best, stopping."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import TrainerCallback
from watched_runs import LABELS, NUM_ROWS, make_script, make_trainer, model_of

from hf_ext.errors import ArgumentError, CheckpointError, DataError
from hf_ext.evaluation import score_predictions
from hf_ext.evaluation.row_metrics import RowMetrics, choose_rows
from hf_ext.trainer import FastTrainer

ANTIGENS = np.array([f"antigen {i % 8}" for i in range(NUM_ROWS)])  # of 25 rows each
METRICS = RowMetrics(9.0, "antigen")
SAVING = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}


def make_rows(*predictions: np.ndarray, antigens: np.ndarray = ANTIGENS) -> Dataset:
    return make_script(*predictions).with_format(None).add_column("antigen", antigens.tolist()).with_format("torch")


def make(folder: Path, *predictions: np.ndarray, **given: Any) -> FastTrainer:
    """A run whose evaluations, in batches of 64, make these predictions after 1, 2, 3, ... steps."""
    rows = given.pop("rows", None) or make_rows(*predictions)
    given = {"metrics": METRICS, "per_device_eval_batch_size": 64, "max_steps": len(predictions), **given}
    return make_trainer(folder, rows, **given)


def evaluations(trainer: FastTrainer) -> list[dict[str, float]]:
    return [log for log in trainer.state.log_history if "eval_loss" in log]


def says(log: dict[str, float], prefix: str, predicted: np.ndarray, rows: Any = slice(None), antigens=ANTIGENS) -> bool:
    """Whether an evaluation logged what the final scores say of these rows."""
    scores = score_predictions(predicted[rows], LABELS[rows], groups=antigens[rows], num_resamples=0)
    found = {name: log[f"{prefix}{name}"] for name in scores}
    return len(found) == 12 and found == pytest.approx({k: score["value"] for k, score in scores.items()}, abs=1e-5)


def test_evaluations_of_all_rows_of_a_subset_and_after_training_say_what_the_final_scores_do(tmp_path):
    models = [model_of(1.0), model_of(0.5), model_of(0.7)]
    whole = make(tmp_path / "whole", *models)
    whole.train()
    assert [says(log, "eval_", model) for log, model in zip(evaluations(whole), models, strict=True)] == [True] * 3
    assert [log["eval_num_defined_groups"] for log in evaluations(whole)] == [8.0] * 3

    part = make(tmp_path / "part", *models, eval_subset=120)
    part.train()
    rows = choose_rows(part.eval_dataset, size=120, group_column="antigen").rows
    assert len(rows) == 120
    assert [says(log, "eval_", model, rows) for log, model in zip(evaluations(part), models, strict=True)] == [True] * 3
    last = evaluations(part)[-1]
    assert says(last, "eval_full_", models[-1])
    of_other_rows = np.random.default_rng(0).permutation(ANTIGENS)  # the broken twin
    assert not says(last, "eval_", models[-1], rows, of_other_rows)
    assert not says(last, "eval_full_", models[-1], antigens=of_other_rows)

    assert says(part.evaluate(), "eval_", models[-1])
    others = make_rows(*models).select(range(150))
    assert says(part.evaluate(others), "eval_", models[-1], slice(150))
    predicted = part.predict(others).metrics  # of rows that nobody named
    assert predicted["test_recall"] > 0
    assert "test_per_group_spearman" not in predicted


def test_of_several_sets_each_has_its_own_groups(tmp_path):
    models = [model_of(1.0), model_of(0.5)]
    other = np.array([f"antigen {i // 50}" for i in range(NUM_ROWS)])
    sets = {"a": make_rows(*models), "b": make_rows(*models, antigens=other)}
    trainer = make(tmp_path, *models, rows=sets, eval_subset=150, metric_for_best_model="b_per_group_spearman")
    trainer.train()
    log = {key: value for entry in trainer.state.log_history for key, value in entry.items() if entry["step"] == 2}
    for name, antigens in (("a", ANTIGENS), ("b", other)):
        rows = choose_rows(sets[name], size=150, group_column="antigen").rows
        assert says(log, f"eval_{name}_", models[1], rows, antigens)
        assert says(log, f"eval_full_{name}_", models[1], antigens=antigens)


# --- the best model ---------------------------------------------------------------------------------------------------

# Recall is highest at step 1, precision at 3 and undefined at 2, the order of all rows best at 4.
HIGH, NOTHING = model_of(1.0) + 2.0, np.minimum(model_of(1.5), 8.9)
CAREFUL, ORDERED = np.where(LABELS > 10, 9.5, model_of(1.5, 3).clip(max=8.9)), model_of(0.3) - 0.1
MODELS = [HIGH, NOTHING, CAREFUL, ORDERED]


def best_step(folder: Path, metric: str, **given: Any) -> int | None:
    trainer = make(folder, *MODELS, metric_for_best_model=metric, **SAVING, **given)
    assert trainer.args.greater_is_better
    trainer.train()
    return trainer.state.best_global_step


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("metric", "step", "num_rows"),
    [("recall", 1, 150), ("precision", 3, 150), ("per_group_spearman", 4, 150), ("average_precision", 4, None)],
)
def test_each_metric_chooses_its_own_best_model_on_all_rows_and_beside_a_subset(tmp_path, metric, step, num_rows):
    assert best_step(tmp_path, metric, eval_subset=num_rows) == step


def test_a_metric_without_a_value_never_makes_a_model_the_best_and_that_is_said(tmp_path, caplog):
    trainer = make(tmp_path, NOTHING, NOTHING, CAREFUL, metric_for_best_model="precision", **SAVING)
    trainer.train()
    assert [math.isnan(log["eval_precision"]) for log in evaluations(trainer)] == [True, True, False]
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (3, 1.0)
    said = [record.message for record in caplog.records if "never the best" in record.message]
    assert said == [f"eval_precision is nan at step {step}: never the best." for step in (1, 2)]


def test_a_run_goes_on_with_the_threshold_that_chose_its_best_model_or_chooses_anew(tmp_path):
    given = {"metric_for_best_model": "recall", "resume": "auto", **SAVING}
    make(tmp_path, *MODELS, **{**given, "max_steps": 2}).train()
    more = {**given, "max_steps": 4, "allow_changed": ["max_steps"]}
    with pytest.raises(CheckpointError, match="metric_for_best_model: recall at 9 in the checkpoint, recall at 8 now"):
        make(tmp_path, *MODELS, metrics=RowMetrics(8.0, "antigen"), **more).train()
    more["allow_changed"] = ["max_steps", "metric_for_best_model"]
    other = make(tmp_path, *MODELS, metrics=RowMetrics(8.0, "antigen"), **more)
    other.train()
    values = {log["step"]: log["eval_recall"] for log in evaluations(other)}
    assert values[1] > values[3] < values[4]  # at 9 and at 8: step 1 would have stayed the best
    assert other.state.best_global_step == 4


# --- early stopping ---------------------------------------------------------------------------------------------------

WORSE = [model_of(0.2), *(model_of(1.5, i) - 1.0 for i in range(1, 6))]


@pytest.mark.parametrize("metric", ["recall", "average_precision", "per_group_spearman"])
def test_a_run_that_gets_worse_in_a_metric_stops_by_it_at_its_threshold_and_groups(tmp_path, metric):
    antigens = np.array([f"antigen {i % 16}" for i in range(NUM_ROWS)])
    rows = make_rows(*WORSE, antigens=antigens)
    trainer = make(tmp_path, *WORSE, rows=rows, metric_for_best_model=metric, early_stopping_patience=2)
    trainer.train()
    assert trainer.state.global_step == 3
    for log, decision in zip(evaluations(trainer)[1:], trainer.stopping_decisions[1:], strict=True):
        assert decision["against_best"]["after"] == pytest.approx(log[f"eval_{metric}"], abs=1e-6)
        assert log["eval_improvement_high"] < 0


class CountSteps(TrainerCallback):
    """Of a run in which there may be none."""

    num_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"metrics": RowMetrics(99.0), "metric_for_best_model": "recall"},
            "recall'.*threshold 99. Take another metric",
        ),
        ({"metric_for_best_model": "per_group_spearman", "eval_subset": 40}, "no antigen has 10 .* more rows"),
        (
            {"metric_for_best_model": "per_group_spearman", "early_stopping_patience": 2},
            "early stopping needs 10 groups of 10 rows and more, here are 8",
        ),
        ({"metrics": RowMetrics(9.0, "antibody")}, "group_column='antibody': the evaluation set has"),
    ],
)
def test_what_no_prediction_could_give_a_value_is_refused_before_the_first_step(tmp_path, given, message):
    trainer, steps = make(tmp_path, *WORSE, **given), CountSteps()
    trainer.add_callback(steps)
    with pytest.raises(DataError, match=message):
        trainer.train()
    assert steps.num_steps == 0


def test_early_stopping_by_a_threshold_that_nobody_knows_is_refused(tmp_path):
    stop = partial(make, tmp_path, *WORSE, early_stopping_patience=2, metric_for_best_model="recall")
    for metrics in (RowMetrics(None, "antigen"), lambda prediction: {"recall": 0.5}):
        with pytest.raises(ArgumentError, match=r"'recall'.*where compute_metrics is a RowMetrics that computes it"):
            stop(metrics=metrics)
