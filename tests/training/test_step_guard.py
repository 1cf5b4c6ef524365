"""`StepGuard` without a Trainer: a loop by hand that hands it losses, norms and events."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tiny_classifier import make_args
from torch.utils.data import DataLoader
from transformers import TrainerState

from hf_ext.data.streams import PassedRows
from hf_ext.errors import NotFiniteError
from hf_ext.training.backends import Replicated
from hf_ext.training.named_rows import name_rows
from hf_ext.training.step_guard import MAX_SKIPPED_IN_A_ROW, GuardedEpoch, StepGuard, can_be_best


class Loop:
    """One weight, trained by `sgd` on rows 0, 1, 2, ...; the loss of a row is what `losses` says of it."""

    def __init__(self, folder, policy="skip", scaler=None):
        self.args = make_args(folder, nan_policy=policy)
        self.guard = StepGuard(self.args, Replicated(self.args, None, None))
        self.model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.model.weight)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.loss = torch.zeros(())
        self.accelerator = SimpleNamespace(scaler=scaler)
        loader = DataLoader([{"x": i} for i in range(100)], batch_size=2)
        loader.set_epoch = lambda epoch: None
        self.state, self.loader = TrainerState(), loader

    @contextmanager
    def epoch(self, **given):
        epoch = GuardedEpoch(0, 50, self.accelerator, self.model, self.loss, **given)
        with self.guard.epoch(epoch, lambda: "checkpoint-4 is the last good one"):
            yield

    def step(self, loss, gradient):
        self.guard.on_step_begin(None, self.state, None)
        self.loss += self.guard.see_loss(torch.tensor(loss))
        self.model.weight.grad = torch.full((1, 1), gradient)
        self.guard.see_norm(self.model.weight.grad.norm(), num_batches=1)
        self.guard.on_pre_optimizer_step(None, self.state, None, train_dataloader=self.loader, optimizer=None)
        self.sgd.step()
        self.guard.on_optimizer_step(None, self.state, None)
        self.state.global_step += 1


def test_a_finite_step_is_left_as_it_is(tmp_path):
    loop = Loop(tmp_path)
    with loop.epoch():
        assert not loop.args.logging_nan_inf_filter
        loop.step(2.0, 1.0)
    assert loop.args.logging_nan_inf_filter
    assert (loop.model.weight.item(), loop.loss.item()) == (0.5, 2.0)
    assert (loop.guard.num_left_out, loop.guard.take_left_out()) == (0, 0)


@pytest.mark.parametrize(("loss", "gradient"), [(float("nan"), 1.0), (1.0, float("inf"))])
def test_a_step_that_is_left_out_leaves_weights_and_losses_and_is_counted_once(tmp_path, caplog, loss, gradient):
    loop = Loop(tmp_path)
    with loop.epoch(), caplog.at_level(logging.WARNING):
        loop.step(2.0, 1.0)
        loop.step(loss, gradient)
    assert (loop.model.weight.item(), loop.loss.item()) == (0.5, 2.0)
    assert [loop.guard.take_left_out(), loop.guard.take_left_out(), loop.guard.num_left_out] == [1, 0, 1]
    assert "step 2: loss" in caplog.text
    assert "rows 2, 3 of the training data" in caplog.text


def test_the_policy_to_stop_says_the_rows_and_what_is_left(tmp_path):
    loop = Loop(tmp_path, "stop")
    with pytest.raises(NotFiniteError) as raised, loop.epoch():
        loop.step(float("nan"), 1.0)
    assert loop.model.weight.item() == 1.0
    message = str(raised.value)
    assert "step 1: loss nan, gradient norm 1.0; rows 0, 1 of the training data (process 0)." in message
    assert "The weights were not touched; checkpoint-4 is the last good one. Nothing was overwritten." in message


def test_rows_of_a_loader_of_the_users_have_no_numbers(tmp_path, caplog):
    loop = Loop(tmp_path)
    with loop.epoch(is_own_loader=True), caplog.at_level(logging.WARNING):
        loop.step(float("nan"), 1.0)
    assert "micro-batches 0 of the epoch" in caplog.text


def test_too_many_in_a_row_stop_the_run(tmp_path):
    loop = Loop(tmp_path)
    with loop.epoch():
        for _ in range(MAX_SKIPPED_IN_A_ROW):
            loop.step(float("nan"), 1.0)
    with pytest.raises(NotFiniteError, match=f"The {MAX_SKIPPED_IN_A_ROW} steps before"), loop.epoch():
        loop.step(float("nan"), 1.0)
    loop = Loop(tmp_path)
    with loop.epoch():
        for i in range(3 * MAX_SKIPPED_IN_A_ROW):
            loop.step(float("nan") if i % 3 else 1.0, 0.0)
    assert loop.guard.num_left_out == 2 * MAX_SKIPPED_IN_A_ROW


class Scaler:
    """Halves its scale when it is asked to update, as a `GradScaler` after an overflow."""

    def __init__(self):
        self.scale = 1024.0

    def get_scale(self):
        return self.scale

    def update(self, new_scale):
        self.scale = new_scale


def test_a_gradient_that_is_not_finite_is_the_scalers_affair_and_a_loss_costs_no_scale(tmp_path, caplog):
    loop = Loop(tmp_path, scaler=Scaler())
    with loop.epoch(), caplog.at_level(logging.WARNING):
        loop.step(1.0, float("inf"))
        assert loop.guard.num_left_out == 0
        assert "Left out by the loss scale" in caplog.text
        loop.guard.on_step_begin(None, loop.state, None)
        loop.guard.see_loss(torch.tensor(float("nan")))
        loop.guard.on_pre_optimizer_step(None, loop.state, None, train_dataloader=loop.loader, optimizer=None)
        loop.accelerator.scaler.scale /= 2  # by the step that the scaler leaves out
        loop.guard.on_optimizer_step(None, loop.state, None)
    assert (loop.guard.num_left_out, loop.accelerator.scaler.scale) == (1, 1024.0)


def test_a_loss_scale_that_cannot_be_the_cause_stops_the_run(tmp_path):
    loop = Loop(tmp_path, scaler=Scaler())
    loop.accelerator.scaler.scale = 1.0
    said = r"not the loss scale either: a loss scale of 1 .* last of them 1 \(rows 0"
    with pytest.raises(NotFiniteError, match=said), loop.epoch():
        loop.step(1.0, float("nan"))


def test_the_count_goes_on_from_a_checkpoint(tmp_path):
    loop = Loop(tmp_path)
    with loop.epoch():
        loop.step(float("nan"), 1.0)
    again = StepGuard(loop.args, Replicated(loop.args, None, None))
    again.load(loop.guard.state())
    assert again.num_left_out == 1
    again.load(None)  # of a checkpoint that does not say
    assert again.num_left_out == 0


def test_a_metric_that_is_not_finite_is_never_the_best(caplog):
    assert can_be_best("eval_loss", {"eval_loss": 0.5}, 3)
    assert can_be_best("eval_loss", {}, 3)
    assert not can_be_best("eval_loss", {"eval_loss": float("nan")}, 3)
    assert "eval_loss is nan at step 3: never the best." in caplog.text


def test_rows_of_a_stream_are_counted_from_its_beginning(tmp_path):
    args, loader = make_args(tmp_path), SimpleNamespace(dataset=PassedRows())
    assert name_rows(args, loader, [0, 1], 6, 0, False) == "rows 24 to 27, 28 to 31 since the stream began"


def test_steps_of_a_loop_of_the_users_own_are_left_alone_with_one_warning(tmp_path, caplog):
    loop = Loop(tmp_path, "stop")
    for _ in range(2):
        loop.step(float("nan"), 1.0)
    assert loop.model.weight.item() == 0.0
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "calls super()._run_epoch()" in caplog.text
