"""Early stopping without a Trainer, and what is wrong with predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parts_alone import make_args, make_now
from watched_runs import LABELS, NUM_ROWS, model_of

from hf_ext.distributed import Team
from hf_ext.evaluation import collapse_report
from hf_ext.evaluation.guards import AlarmKind, examine_predictions
from hf_ext.training.early_stopping import EarlyStopping
from hf_ext.training.evaluation_passes import Evaluation
from hf_ext.training.watcher import extended

GOOD, FLAT = model_of(0.3), 8 + (model_of(0.3) - 8) / 50
ROUNDED = np.round(GOOD * 16) / 16  # bfloat16 numbers, as they are below 16
CONSTANT = np.full(NUM_ROWS, 8.0)
WORSE = [model_of(0.3), *(model_of(1.0, i) for i in range(3))]
STOPPING = {"early_stopping_patience": 2, "metric_for_best_model": "spearman", "eval_strategy": "steps"}


def evaluation(predictions: np.ndarray, name: str = "") -> Evaluation:
    return Evaluation(predictions, LABELS, name, True)


@pytest.fixture
def make_early(tmp_path):
    def make(sets: Any = LABELS, **given: Any) -> EarlyStopping:
        args = make_args(tmp_path, **{**STOPPING, **given})
        return EarlyStopping(args, Team(args), sets, lambda prediction: {})

    return make


def show(watcher: Any, *predictions: np.ndarray, first_step: int = 1) -> list[bool]:
    """Shows an evaluation a step; returns after which of them training was to stop."""
    stops = []
    for step, column in enumerate(predictions, first_step):
        now = make_now(global_step=step)
        watcher.see(evaluation(column), {}, now.state, now.control)
        stops.append(now.control.should_training_stop)
    return stops


# --- alarms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("predictions", "kinds"),
    [
        (GOOD, []),
        (CONSTANT, [AlarmKind.CONSTANT, AlarmKind.NO_BETTER]),
        (FLAT, [AlarmKind.LITTLE_SPREAD]),
        (np.where(LABELS > 8, 9.1, 7.1), [AlarmKind.FEW_VALUES, AlarmKind.BLOCK]),
        (np.where(np.arange(NUM_ROWS) == 3, np.nan, GOOD), [AlarmKind.NOT_FINITE]),
        (16 - GOOD, [AlarmKind.NO_BETTER]),
        (ROUNDED, [AlarmKind.BFLOAT16]),
    ],
)
def test_every_alarm_has_its_kind_and_the_report_its_sentence(predictions, kinds):
    report, alarms = examine_predictions(predictions, LABELS)
    assert set(kinds) <= {alarm.kind for alarm in alarms}
    assert bool(kinds) == bool(alarms)
    assert collapse_report(predictions, LABELS) == {**report, "alarms": [alarm.text for alarm in alarms]}


# --- early stopping ------------------------------------------------------------------------------------------------


def test_patience_evaluations_without_improvement_end_training(make_early):
    early = make_early()
    assert show(early, *WORSE) == [False, False, True, True]
    assert [decision["num_without_improvement"] for decision in early.decisions] == [0, 1, 2, 3]


def test_the_interval_is_logged_under_the_name_of_the_set_and_others_are_not_looked_at(make_early):
    early, now = make_early({"a": LABELS, "b": LABELS}, metric_for_best_model="a_spearman"), make_now(global_step=1)
    early.see(evaluation(GOOD, "a"), {}, now.state, now.control)
    now.state.global_step = 2
    assert early.see(evaluation(FLAT, "b"), {}, now.state, now.control) == {}
    added = early.see(evaluation(model_of(1.0), "a"), {}, now.state, now.control)
    assert set(added) == {"eval_a_improvement", "eval_a_improvement_low", "eval_a_improvement_high"}
    assert added["eval_a_improvement_high"] < 0


def test_state_that_is_loaded_decides_as_the_run_would_have_and_lost_state_does_not(make_early):
    whole, resumed, lost = make_early(), make_early(), make_early()
    show(whole, *WORSE[:2])
    resumed.load(whole.state())
    lost.load(None)
    whole_stops = show(whole, *WORSE[2:], first_step=3)
    assert show(resumed, *WORSE[2:], first_step=3) == whole_stops
    assert resumed.decisions == whole.decisions
    assert show(lost, *WORSE[2:], first_step=3) != whole_stops


@pytest.mark.parametrize(("patience", "ends"), [(2, True), (4, False)])
def test_a_run_that_had_stopped_trains_on_only_with_another_patience(make_early, patience, ends):
    stopped, again, now = make_early(), make_early(early_stopping_patience=patience), make_now(global_step=3)
    show(stopped, *WORSE[:3])
    again.load(stopped.state())
    again.on_train_begin(None, now.state, now.control)
    assert now.control.should_training_stop is ends


def test_a_decision_that_is_given_up_is_taken_back(make_early):
    early = make_early()
    show(early, *WORSE[:2])
    before = early.snapshot()
    show(early, WORSE[2], first_step=3)
    early.rollback(before)
    assert len(early.decisions) == 2
    assert show(early, WORSE[2], first_step=3) == [True]


def test_without_patience_nothing_is_looked_at_or_stored(make_early):
    early = make_early(early_stopping_patience=None, metric_for_best_model=None)
    show(early, *WORSE)
    assert (early.decisions, early.state(), early.num_bytes(), early.missing) == ([], None, 0, "")
    early.load({"settings": {}, "rule": None, "decisions": [{"step": 1, "should_stop": True}]})
    assert early.decisions == []


def test_the_bound_of_its_bytes_counts_rows_and_patience(make_early):
    early = make_early()
    assert early.num_bytes() == 26 * NUM_ROWS * 3
    early.look_at(LABELS[:50])
    assert early.num_bytes() == 26 * 50 * 3


def test_what_is_added_to_a_log_is_there_while_it_is_logged_alone():
    logs = {"eval_loss": 1.0}
    with extended(logs, {"eval_loss": 2.0, "eval_improvement": 0.1}):
        assert logs == {"eval_loss": 1.0, "eval_improvement": 0.1}
    assert logs == {"eval_loss": 1.0}
