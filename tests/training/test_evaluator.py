"""Subsets and full evaluations without a Trainer: which rows are looked at when, and what makes a model the best."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from parts_alone import make_args, make_now
from transformers import EarlyStoppingCallback, EvalPrediction
from transformers.trainer_utils import EvalLoopOutput

from hf_ext.distributed import Team
from hf_ext.errors import ArgumentError
from hf_ext.training.evaluation_record import EvaluationRecord
from hf_ext.training.evaluator import Evaluator, Means
from hf_ext.training.stopper import StopCause, Stopper, StopReason

LABELS = np.arange(10.0)
ROWS = [{"labels": label} for label in LABELS]
GIVEN = ("Evaluation", None, None, "eval")
SUBSET = {"eval_subset": 4, "eval_strategy": "steps", "metric_for_best_model": "mae", "greater_is_better": False}


def mean_error(prediction: EvalPrediction) -> dict[str, float]:
    return {"mae": float(np.abs(prediction.predictions - prediction.label_ids).mean())}


class Model:
    """Is wrong by `error` in every row; its loader is the numbers of the rows."""

    def __init__(self, sets: Any = ROWS):
        self.error, self.looked_at = 1.0, []
        self.means = Means(sets, mean_error, self.one_pass, lambda dataset, rows: rows)

    def one_pass(self, rows: Any, given: Any, stand_in: Any) -> tuple[EvalLoopOutput, float | None]:
        self.looked_at.append(len(rows))
        labels = LABELS[rows]
        compute = mean_error if stand_in is None else stand_in
        metrics = compute(EvalPrediction(labels + self.error, labels))
        metrics = {f"eval_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(labels + self.error, labels, {**metrics, "eval_loss": self.error}, len(rows)), None


class Seen:
    """A watcher that notes the steps it saw."""

    name, missing = "seen", ""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def see(self, evaluation: Any, logs: Any, state: Any, control: Any) -> dict[str, float]:
        self.steps.append(state.global_step)
        return {"eval_seen": float(len(self.steps))}

    def load(self, tree: Any) -> None:
        self.steps = []


@pytest.fixture
def make(tmp_path):
    def make(*watchers: Any, sets: Any = ROWS, **given: Any) -> tuple[Evaluator, Stopper]:
        args = make_args(tmp_path, **given)
        team = Team(args)
        stopper = Stopper(args, team)
        return Evaluator(args, team, stopper, sets, watchers), stopper

    return make


def evaluate(evaluator: Evaluator, model: Model, now: Any, name: str | None = None) -> dict[str, float]:
    """What Trainer does for an evaluation of the run."""
    with evaluator.looking_at(name, model.means.sets):
        loader = evaluator.loader(model.means)
        output = evaluator.run(np.arange(10) if loader is None else loader, GIVEN, model.means, now)
    return output.metrics


def judge(evaluator: Evaluator, model: Model, now: Any, metrics: dict[str, float]) -> dict[str, float] | None:
    decisive = evaluator.decisive(metrics)
    if decisive is not None:
        evaluator.note_best(metrics, model.means, now)
    return decisive


def test_without_a_subset_all_is_as_in_trainer(make):
    evaluator, _ = make()
    model, now = Model(), make_now(EvaluationRecord(), global_step=1)
    assert evaluate(evaluator, model, now) == {"eval_mae": 1.0, "eval_loss": 1.0}
    assert model.looked_at == [10]
    assert evaluator.compared is not None
    assert evaluator.compared.is_full
    assert evaluator.decisive({"eval_mae": 1.0}) == {"eval_mae": 1.0}


def test_the_rest_follows_where_the_subset_beats_that_of_the_best_and_only_there(make):
    evaluator, _ = make(**SUBSET)
    model, now = Model(), make_now(EvaluationRecord(), global_step=1)
    keys = []
    for error in (2.0, 3.0, 1.0):
        model.error = error
        metrics = evaluate(evaluator, model, now)
        keys.append(judge(evaluator, model, now, metrics))
    assert model.looked_at == [4, 6, 4, 4, 6]
    assert keys == [{"eval_mae": 2.0}, None, {"eval_mae": 1.0}]


def test_every_fifth_evaluation_and_the_last_are_of_all_rows(make):
    evaluator, _ = make(**SUBSET)
    model, record = Model(), EvaluationRecord()
    judge(evaluator, model, make_now(record), evaluate(evaluator, model, make_now(record, global_step=1)))
    model.error = 2.0
    model.looked_at.clear()
    for step in (2, 3, 4, 5, 10):
        evaluate(evaluator, model, make_now(record, global_step=step))
    assert model.looked_at == [4, 4, 4, 4, 6, 4, 6]
    assert (record.of("").num_evaluations, record.of("").num_full) == (6, 3)


def test_what_is_not_finite_decides_nothing(make):
    evaluator, _ = make(**SUBSET)
    model = Model()
    model.error = math.nan
    evaluate(evaluator, model, make_now(EvaluationRecord(), global_step=1))
    assert model.looked_at == [4]


def test_the_rest_is_made_up_for_where_a_callback_then_ends_the_run_and_not_where_a_signal_does(make):
    evaluator, stopper = make(**SUBSET)
    model, now = Model(), make_now(EvaluationRecord(), global_step=1)
    judge(evaluator, model, now, evaluate(evaluator, model, now))
    for reason, full in ((None, {"eval_full_mae": 2.0, "eval_full_loss": 2.0}), ("received SIGTERM", None)):
        model.error = 2.0
        evaluate(evaluator, model, now)
        now.control.should_training_stop = True
        stopper.reason = reason and StopReason(StopCause.SIGNAL, reason)
        assert evaluator.finish_left_out(model.means, now) == full
        assert evaluator.finish_left_out(model.means, now) is None  # once
        now.control.should_training_stop, stopper.reason = False, None


def test_other_rows_than_the_runs_own_are_no_evaluation_of_the_run(make):
    evaluator, _ = make(**SUBSET)
    model = Model()
    with evaluator.looking_at(ROWS[:3], ROWS):
        assert not evaluator.looks_at_own
        assert evaluator.loader(model.means) is None
    with evaluator.looking_at(None, ROWS):
        assert evaluator.looks_at_own
    assert not evaluator.looks_at_own


def test_a_choice_holds_as_long_as_the_set_does(make):
    evaluator, _ = make(**SUBSET)
    model, other = Model(), Model(list(ROWS))
    evaluator.choose_rows(model.means)
    first = evaluator.rows.chosen("")
    evaluator.choose_rows(model.means)
    assert evaluator.rows.chosen("") is first
    evaluator.choose_rows(other.means)
    assert evaluator.rows.chosen("") is not first


def test_a_watcher_sees_each_evaluation_of_the_loop_once_and_no_other(make):
    seen = Seen()
    evaluator, stopper = make(seen, eval_strategy="steps")
    model, now = Model(), make_now(EvaluationRecord(), global_step=3)
    evaluate(evaluator, model, now)
    assert evaluator.watch({}, now.state, now.control) == {}  # a user's own
    with stopper.interruptible(now):
        assert evaluator.watch({}, now.state, now.control) == {"eval_seen": 1.0}
        assert evaluator.watch({}, now.state, now.control) == {}
    assert seen.steps == [3]


def test_the_record_counts_anew_unless_a_run_is_resumed(make):
    evaluator, stopper = make()
    record = EvaluationRecord()
    for is_resumed, kept in ((True, 1), (False, 0)):
        record.add_pass("", 0, 10, True, 1.0)
        stopper.is_resumed = is_resumed
        evaluator.begin([record], None)
        assert len(record.sets) == kept


def test_transformers_early_stopping_is_refused_beside_a_subset(make):
    make()[0].begin([EvaluationRecord(), EarlyStoppingCallback(1)], None)
    with pytest.raises(ArgumentError, match="compares the score of a subset with the best score of all rows"):
        make(**SUBSET)[0].begin([EvaluationRecord(), EarlyStoppingCallback(1)], None)


@pytest.mark.parametrize(
    ("given", "key", "is_better"),
    [
        ({"metric_for_best_model": "spearman", "greater_is_better": True}, "eval_spearman", True),
        ({"metric_for_best_model": "eval_loss", "greater_is_better": False}, "eval_loss", False),
    ],
)
def test_what_is_best_is_a_matter_of_the_metrics_direction(make, given, key, is_better):
    evaluator, _ = make(**given)
    assert evaluator.best_metric_key == key
    assert evaluator.beats(2.0, 1.0) is is_better
    assert not evaluator.beats(1.0, 1.0)


def test_a_search_compares_trials_by_metrics_of_one_kind(make):
    evaluator, _ = make(**SUBSET)
    going, last, metrics = make_now(global_step=1), make_now(global_step=10), {"eval_mae": 1.0, "eval_full_mae": 2.0}
    assert evaluator.objective(metrics, going.state, going.control) == {"eval_mae": 1.0}
    assert evaluator.objective(metrics, last.state, last.control) == {"eval_mae": 2.0}
