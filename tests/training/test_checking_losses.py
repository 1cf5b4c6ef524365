"""`LossCheck` without a Trainer: any model, any loader, any function that computes a loss."""

import logging

import pytest
import torch
from tiny_classifier import make_args
from torch.utils.data import DataLoader, IterableDataset

from hf_ext.errors import ArgumentError
from hf_ext.plan import make_plan
from hf_ext.training.loss_check import LossCheck, is_foreign, name_loss
from hf_ext.training.losses import DecidedLoss

ROWS = [{"x": torch.full((3,), float(i)), "y": torch.tensor(float(i))} for i in range(20)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def run(folder, model, compute, **given):
    args = make_args(folder, **given)
    LossCheck(args, make_plan(args)).check(model, DataLoader(ROWS, 4), compute, "Mine", ())


def test_a_loss_that_trains_passes_and_leaves_everything_as_it_was(tmp_path, model, caplog):
    seen = []

    def compute(batch):
        seen.append((batch["y"].tolist(), model.training))
        return (model(batch["x"]).squeeze(1) - batch["y"]).square().mean() + torch.rand(()) * 0

    model.train()
    state = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, model, compute)
    assert seen == [([0.0, 6.0, 12.0, 19.0], False)]  # spread over the rows
    assert model.training
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda out: out.detach().sum(), "Mine is detached from the model"),
        (lambda out: out, r"Mine returned shape \(4, 1\)"),
        (lambda out: out.sum().item(), "Mine returned float"),
        (lambda out: out.sum() / 0, "Mine is -?inf on the first batch"),
    ],
)
def test_a_loss_that_cannot_train_is_refused(tmp_path, model, broken, said):
    with pytest.raises(ArgumentError, match=said):
        run(tmp_path, model, lambda batch: broken(model(batch["x"])))


def test_a_loss_without_gradient_is_an_error_only_where_speedups_are_asked_for(tmp_path, model, caplog):
    def flat(batch):
        return model(batch["x"]).sum() * 0.0

    with caplog.at_level(logging.WARNING):
        run(tmp_path, model, flat)
    assert "Mine does not change with any of the 2 trainable parameters: all gradients are zero" in caplog.text
    with pytest.raises(ArgumentError, match="does not change"):
        run(tmp_path, model, flat, speedups=["tf32"])


def test_what_cannot_be_checked_is_named(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from ROWS

    args = make_args(tmp_path)
    check, loader = LossCheck(args, make_plan(args)), DataLoader(ROWS, 4)
    assert check.why_left_out(loader, ROWS, False, None) is None
    assert "parts" in check.why_left_out(loader, ROWS, True, None)
    assert "Mine.training_step" in check.why_left_out(loader, ROWS, False, "Mine.training_step")
    assert "stream" in check.why_left_out(loader, Stream(), False, None)
    assert "by their number" in check.why_left_out(iter(loader), ROWS, False, None)


def test_a_loss_that_lacks_something_outside_a_step_is_said_and_a_finding_is_not_hidden(tmp_path, caplog):
    args = make_args(tmp_path)
    check = LossCheck(args, make_plan(args))

    def lacks():
        raise AttributeError("no epoch yet")

    def finds():
        raise ArgumentError("detached")

    with caplog.at_level(logging.INFO):
        check.attempt(lacks, None)
        check.attempt(finds, "it is a stream")
    assert "not checked before training: AttributeError: no epoch yet" in caplog.text
    assert "not checked before training: it is a stream." in caplog.text
    with pytest.raises(ArgumentError, match="detached"):
        check.attempt(finds, None)


def test_whose_loss_it_is():
    def mine(outputs, labels, num_items_in_batch=None):
        """Of the user."""

    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x)

    for loss, override, name in (
        (DecidedLoss(Own(1, 1), mine, False, None), None, "compute_loss_func (test_whose_loss_it_is.<locals>.mine)"),
        (DecidedLoss(Own(1, 1), None, False, None), "Mine.compute_loss", "The loss of Mine.compute_loss"),
        (DecidedLoss(Own(1, 1), None, False, None), None, "The loss of Own"),
    ):
        assert is_foreign(loss, override)
        assert name_loss(loss, override) == name
