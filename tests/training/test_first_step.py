"""A loss of the user's is looked at in the first step: what does not train is named, and nothing else changes."""

import logging
import random

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import Trainer

from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments


class Line(nn.Module):
    """y = w x + b after dropout; a parameter that nothing uses where asked."""

    def __init__(self, has_unused: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout = nn.Linear(3, 1), nn.Dropout(0.5)
        if has_unused:
            self.forgotten = nn.Parameter(torch.ones(2))

    def forward(self, x, labels=None):
        return {"logits": self.linear(self.dropout(x))[:, 0]}


class Swallowing(Line):
    """Says that it divides by the number of items, and does not."""

    accepts_loss_kwargs = True

    def forward(self, x, labels=None, **kwargs):
        outputs = super().forward(x)
        return {"loss": mse(outputs, labels), **outputs}


def mse(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels) ** 2).sum() / len(labels)


def summed(outputs, labels, num_items_in_batch=None):
    total = ((outputs["logits"] - labels) ** 2).sum()
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def noisy(outputs, labels, **kwargs):
    return mse(outputs, labels + torch.rand(len(labels)))


def none_yet(outputs, labels, num_items_in_batch=None):
    return mse(outputs, labels).clamp(max=0.0)  # as a hinge that no row has reached


def indifferent(outputs, labels, num_items_in_batch=None):
    return 0.0 * mse(outputs, labels) + 1.0


def rows():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 3)).astype(np.float32)
    return Dataset.from_dict({"x": x.tolist(), "labels": x.sum(1).tolist()}).with_format("torch")


def make_trainer(folder, loss=mse, model=None, cls=FastTrainer, **arguments):
    given = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    given |= {"max_steps": 3, "learning_rate": 0.1, "output_dir": str(folder), **arguments}
    return cls(model or Line(), FastTrainingArguments(**given), train_dataset=rows(), compute_loss_func=loss)


def test_a_loss_that_changes_with_no_weight_is_named(tmp_path, caplog):
    trainer = make_trainer(tmp_path, indifferent)
    trainer.train()
    said = [record.getMessage() for record in caplog.records if "does not change with any" in record.msg]
    assert len(said) == 1
    assert said[0].startswith("compute_loss_func (indifferent) does not change with any of the 2 trainable parameters")
    assert trainer.state.global_step == 3


def test_parameters_that_the_loss_does_not_reach_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, model=Line(has_unused=True)).train()
    assert "1 trainable parameters get no gradient from the loss: forgotten." in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "sound").train()
    assert "gradient" not in caplog.text


def train(trainer):
    """Losses and weights; seeds are set by hand, as dropout and the sampler draw from them."""
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    drawn = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    return losses, trainer.model.linear.weight.tolist(), drawn


def test_training_is_stock_trainers_though_the_loss_was_looked_at(tmp_path):
    def counting():
        calls = []

        def loss(outputs, labels, num_items_in_batch=None):
            calls.append(None)  # which nobody puts back
            return noisy(outputs, labels) + 0.1 * len(calls)

        return loss

    given = {"gradient_accumulation_steps": 2}
    ours = train(make_trainer(tmp_path, noisy, **given))
    assert len(ours[0]) == 3
    assert ours == train(make_trainer(tmp_path, noisy, cls=Trainer, **given))
    moved = [train(make_trainer(tmp_path, counting(), cls=cls, **given))[0] for cls in (FastTrainer, Trainer)]
    assert moved[0] != moved[1]


@pytest.mark.parametrize(
    ("loss", "model", "steps", "name"),
    [
        (mse, None, 4, "compute_loss_func (mse)"),
        (noisy, None, 2, "compute_loss_func (noisy)"),
        (None, Swallowing(), 2, "The loss of Swallowing"),
        (mse, None, 1, None),
        (summed, None, 4, None),
        (none_yet, None, 4, None),
    ],
)
def test_a_mean_that_trainer_takes_for_a_share_of_the_step_is_named_where_steps_are_split(
    tmp_path, caplog, loss, model, steps, name
):
    torch.manual_seed(1)
    make_trainer(tmp_path, loss, model, gradient_accumulation_steps=steps).train()
    said = [record.getMessage() for record in caplog.records if "does not change with num_items" in record.msg]
    assert [text.split(" does")[0] for text in said] == ([] if name is None else [name])
    assert all(f"gradients are {steps} times too large" in text for text in said)
