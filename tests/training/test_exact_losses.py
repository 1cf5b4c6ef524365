"""`Losses` without a Trainer: whose loss it is, and what counts."""

import logging

import pytest
import torch
from tiny_classifier import make_args, make_model

from hf_ext.data.even_batches import RepeatedRows
from hf_ext.training.losses import Losses, countable


def mine(outputs, labels, num_items_in_batch=None):
    return outputs["logits"].sum()


@pytest.fixture
def losses(tmp_path):
    losses = Losses(make_args(tmp_path))
    losses.settle()
    return losses


def test_the_loss_is_ours_where_nobody_else_decides_it(losses):
    model = make_model()
    assert losses.decide(model, False, None).is_exact
    assert losses.decide(model, True, None).function is None
    assert losses.decide(model, False, "Mine.compute_loss").function is None
    assert losses.decide(torch.nn.Linear(2, 1), False, None).function is None
    model.accepts_loss_kwargs = True
    assert losses.decide(model, False, None).function is None


def test_what_the_user_gave_or_took_away_later_counts(losses):
    losses.give(mine)
    decided = losses.decide(make_model(), False, None)
    assert decided.function is mine
    assert decided.is_users
    losses.give(None)
    assert losses.decide(make_model(), False, None).function is None


def test_the_exact_loss_of_another_model_is_not_ours(losses):
    losses.give(losses.decide(make_model(), False, None).function)
    assert losses.decide(make_model(), False, None).is_users


def test_before_trainer_is_made_there_is_what_was_given(tmp_path):
    losses = Losses(make_args(tmp_path))
    losses.give(None)
    assert losses.decide(make_model(), False, None).function is None
    losses.settle()
    assert losses.decide(make_model(), False, None).is_exact


def test_a_measurement_of_minus_100_counts_and_a_row_of_another_process_does_not(losses):
    class Measuring(torch.nn.Module):
        def row_losses(self, logits, labels, bounds):
            """Has one per row."""

    labels = torch.tensor([-100.0, 7.0])
    loss = losses.decide(Measuring(), False, None)
    own, repeated = countable([{"labels": labels}, RepeatedRows(labels=labels)], loss)
    assert (own["labels"] != -100).sum() == 2
    assert (repeated["labels"] != -100).sum() == 0
    (left,) = countable([{"labels": labels}], losses.decide(torch.nn.Linear(2, 1), False, None))
    assert (left["labels"] != -100).sum() == 1


@pytest.mark.parametrize(
    ("accumulation", "override", "said"),
    [
        (2, None, "The loss of Linear may be averaged"),
        (2, "Mine.compute_loss", "averaged over the batches"),
        (1, None, ""),
    ],
)
def test_a_loss_that_may_be_a_mean_is_warned_of_where_steps_have_several_batches(
    tmp_path, caplog, accumulation, override, said
):
    losses = Losses(make_args(tmp_path, gradient_accumulation_steps=accumulation))
    losses.settle()
    with caplog.at_level(logging.WARNING):
        losses.warn_of_means(losses.decide(torch.nn.Linear(2, 1), False, override), is_summed=False)
    own = [record.getMessage() for record in caplog.records if record.name.startswith("hf_ext.")]
    assert len(own) == bool(said)
    assert said in "".join(own)
