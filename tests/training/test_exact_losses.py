"""`Losses` without a Trainer: whose loss it is, and the loss of an evaluation set however it is split."""

import logging
import math

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


def evaluate(losses, parts, keep=lambda rows: rows):
    """Three rows of label 0, whose probabilities are 1/2, 3/4 and 3/4, in batches of the sizes `parts`."""
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0], [math.log(3), 0.0]])
    loss, metrics = losses.decide(make_model(), False, None), {"eval_loss": -1.0}
    with losses.rows() as rows:
        assert losses.wants_rows(loss, ["labels"], None, [])
        for part in logits.split(parts):
            losses.keep(loss, part, {}, torch.zeros(len(part), dtype=torch.int64), keep)
    losses.finish(rows, metrics, "eval")
    return metrics["eval_loss"]


EXPECTED = (math.log(2) + 2 * math.log(4 / 3)) / 3  # 0.4228, and 0.4904 as the mean of the means of [1, 2]


@pytest.mark.parametrize("parts", [[3], [1, 2], [2, 1], [1, 1, 1]])
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(losses, parts):
    assert evaluate(losses, parts) == pytest.approx(EXPECTED, abs=1e-6)
    assert losses.num_items == 3


def test_rows_that_only_fill_a_batch_do_not_count(losses):
    assert evaluate(losses, [1, 2], keep=lambda rows: rows[:1]) == pytest.approx(
        (math.log(2) + math.log(4 / 3)) / 2, abs=1e-6
    )


def test_rows_are_wanted_only_in_an_evaluation_whose_loss_is_known(losses):
    loss = losses.decide(make_model(), False, None)
    assert not losses.wants_rows(loss, ["labels"], None, [])
    with losses.rows():
        assert losses.wants_rows(loss, ["labels"], None, [])
        assert not losses.wants_rows(loss, ["labels"], "Mine.prediction_step", [])
        assert not losses.wants_rows(loss, ["start", "end"], None, [])
        assert not losses.wants_rows(loss, ["labels"], None, ["logits"])
        assert not losses.wants_rows(losses.decide(make_model(), True, None), ["labels"], None, [])
    losses.finish([], metrics := {"eval_loss": 2.0}, "eval")
    assert (metrics, losses.num_items) == ({"eval_loss": 2.0}, None)


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
