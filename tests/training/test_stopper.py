"""Stopping without a Trainer: why a run stops, what is then due, and an evaluation that is given up."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from parts_alone import make_args, make_now
from transformers import EarlyStoppingCallback

from hf_ext.distributed import Team
from hf_ext.training.evaluation_record import EvaluationRecord
from hf_ext.training.stopper import EvaluationGivenUp, StopCause, Stopper, StopReason


class Counter:
    """A watcher that counts what it saw."""

    name, missing, seen = "counter", "", 0

    def snapshot(self) -> int:
        return self.seen

    def rollback(self, snapshot: int) -> None:
        self.seen = snapshot


@pytest.fixture
def make(tmp_path):
    def make(**given: Any) -> Stopper:
        args = make_args(tmp_path, **given)
        return Stopper(args, Team(args))

    return make


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def due_of(now: Any, calls: list[tuple[bool, bool]]) -> Any:
    """Trainer's part: notes what it was to do, evaluate and save, and does it."""

    def due() -> Any:
        calls.append((now.control.should_evaluate, now.control.should_save))
        now.control.should_evaluate = now.control.should_save = False
        return now.control

    return due


def test_a_signal_is_the_reason_of_a_stop_and_is_not_obeyed_itself(make):
    stopper, now = make(), make_now()
    with stopper.during_training(is_resumed=False):
        send(signal.SIGTERM)
        assert stopper.reason is None  # nobody has looked yet
        stopper.notice(now.state, now.control)
    assert stopper.reason == StopReason(StopCause.SIGNAL, "received SIGTERM")
    assert now.control.should_training_stop
    assert stopper.left_s() is None


def test_a_signal_that_nothing_is_left_to_stop_for_is_raised_when_training_has_ended(make):
    raised = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: raised.append(number))
    try:
        with make().during_training(is_resumed=False):
            send(signal.SIGTERM)
            assert raised == []
    finally:
        signal.signal(signal.SIGTERM, before)
    assert raised == [signal.SIGTERM]


def test_the_time_is_the_reason_of_a_stop_with_room_for_two_of_the_longest_saves(make):
    stopper, now = make(max_hours=1.0), make_now()
    stopper.process_began = time.monotonic() - 3000
    with stopper.during_training(is_resumed=False):
        stopper.notice(now.state, now.control)
        assert stopper.reason is None  # ten minutes are left, and five are needed
        stopper.note_save(400.0)
        stopper.note_save(1.0)
        stopper.notice(now.state, now.control)
    assert stopper.reason == StopReason(StopCause.TIME, "max_hours=1.0 is near")
    left = stopper.left_s()
    assert left is not None
    assert 500 < left <= 600


def test_each_training_begins_without_a_reason(make):
    stopper, now = make(), make_now()
    with stopper.during_training(is_resumed=False):
        send(signal.SIGHUP)
        stopper.notice(now.state, now.control)
    with stopper.during_training(is_resumed=True, ignore_keys=["hidden_states"]):
        assert stopper.reason is None
        assert (stopper.is_resumed, stopper.ignore_keys) == (True, ["hidden_states"])


def test_a_stop_holds_an_evaluation_back_and_saves(make):
    stopper, now, calls = make(), make_now(global_step=3), []
    with stopper.during_training(is_resumed=False):
        send(signal.SIGTERM)
        now.control.should_evaluate = True
        stopper.do_due(due_of(now, calls), now.state, now.control)  # after the step
        stopper.on_epoch_end(None, now.state, now.control)
        stopper.do_due(due_of(now, calls), now.state, now.control)  # at the end of the epoch that was left
    assert calls == [(False, False), (False, True)]
    assert stopper.evaluation_pending
    assert stopper.state() is True


def test_the_save_of_a_step_that_ends_an_epoch_follows_what_is_due_with_the_epoch(make):
    stopper, now, calls = make(), make_now(global_step=5, epoch=1.0), []
    with stopper.during_training(is_resumed=False):
        now.control.should_save = True
        stopper.do_due(due_of(now, calls), now.state, now.control)
        stopper.on_epoch_end(None, now.state, now.control)
        now.control.should_evaluate = True
        stopper.do_due(due_of(now, calls), now.state, now.control)
    assert calls == [(False, False), (True, True)]


def test_an_evaluation_that_is_given_up_leaves_no_trace_and_is_pending(make):
    record, counter, stopper = EvaluationRecord(), Counter(), make()
    now = make_now(record, log_history=[{"step": 1}])
    with stopper.during_training(is_resumed=False), stopper.interruptible(now, [counter]):
        now.state.log_history.append({"eval_a_loss": 1.0})
        record.add_pass("a", 0, 8, True, 1.0)
        counter.seen = 1
        stopper.on_prediction_step(None, now.state, now.control)  # no stop so far
        send(signal.SIGTERM)
        stopper.on_prediction_step(None, now.state, now.control)
        raise AssertionError("not reached")
    assert stopper.evaluation_pending
    assert not stopper.is_evaluating
    assert (now.state.log_history, record.sets, counter.seen) == ([{"step": 1}], {}, 0)


def test_what_an_evaluation_raises_otherwise_is_raised_and_takes_nothing_back(make):
    counter, stopper, now = Counter(), make(), make_now()

    def evaluate() -> None:
        with stopper.interruptible(now, [counter]):
            counter.seen = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert (counter.seen, stopper.evaluation_pending, stopper.is_evaluating) == (1, False, False)


def test_a_users_own_evaluation_runs_to_its_end(make):
    stopper, now = make(), make_now()
    stopper.reason = StopReason(StopCause.SIGNAL, "received SIGTERM")
    stopper.on_prediction_step(None, now.state, now.control)
    stopper.is_evaluating = True
    with pytest.raises(EvaluationGivenUp):
        stopper.on_prediction_step(None, now.state, now.control)


@pytest.mark.parametrize(
    ("step", "patience_left", "is_resumed", "ends"),
    [(10, 1, True, True), (9, 1, True, False), (9, 0, True, True), (10, 0, False, False)],
)
def test_only_a_resumed_run_that_had_come_to_its_end_does_not_train_on(make, step, patience_left, is_resumed, ends):
    stopper, now, early = make(), make_now(global_step=step), EarlyStoppingCallback(3)
    early.early_stopping_patience_counter = 3 - patience_left
    with stopper.during_training(is_resumed):
        stopper.end_if_finished(now.state, now.control, [early])
    assert now.control.should_training_stop is ends


def test_training_is_at_its_end_by_its_last_step_or_a_callback_and_not_by_a_signal(make):
    stopper = make()
    last, stopped, going = make_now(global_step=10), make_now(global_step=4), make_now(global_step=4)
    stopped.control.should_training_stop = True
    assert [stopper.is_at_end(now.state, now.control) for now in (last, stopped, going)] == [True, True, False]
    stopper.reason = StopReason(StopCause.SIGNAL, "received SIGTERM")
    assert not stopper.is_at_end(stopped.state, stopped.control)
