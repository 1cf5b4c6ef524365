"""A loss of the user's: weights that it does not reach are named, and a mean where steps are split."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch import nn

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


def mse(outputs, labels, num_items_in_batch=None):
    return ((outputs["logits"] - labels) ** 2).sum() / len(labels)


def noisy(outputs, labels, **kwargs):
    return mse(outputs, labels + torch.rand(len(labels)))


def summed(outputs, labels, num_items_in_batch=None):
    total = ((outputs["logits"] - labels) ** 2).sum()
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def handing_on(outputs, labels, **kwargs):
    return summed(outputs, labels, **kwargs)


class Weighted:
    """Whose code is not looked at."""

    def __call__(self, outputs, labels, num_items_in_batch=None):
        return mse(outputs, labels)


def make_trainer(folder, loss=mse, model=None, **arguments):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(40, 3)).astype(np.float32)
    rows = Dataset.from_dict({"x": x.tolist(), "labels": x.sum(1).tolist()}).with_format("torch")
    given = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    given |= {"max_steps": 3, "learning_rate": 0.1, "output_dir": str(folder), **arguments}
    return FastTrainer(model or Line(), FastTrainingArguments(**given), train_dataset=rows, compute_loss_func=loss)


def test_parameters_that_the_loss_does_not_reach_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path, model=Line(has_unused=True)).train()
    assert caplog.text.count("1 trainable parameters get no gradient from the loss: forgotten.") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        make_trainer(tmp_path / "sound").train()
    assert "gradient" not in caplog.text


@pytest.mark.parametrize(
    ("loss", "steps", "is_named"),
    [
        (mse, 4, True),
        (noisy, 2, True),
        (mse, 1, False),
        (summed, 4, False),
        (handing_on, 4, False),
        (partial(mse), 4, False),
        (Weighted(), 4, False),
    ],
)
def test_a_loss_that_does_not_read_the_number_of_items_is_named_where_steps_are_split(
    tmp_path, caplog, loss, steps, is_named
):
    make_trainer(tmp_path, loss, gradient_accumulation_steps=steps)
    said = [record.getMessage() for record in caplog.records if "does not read num_items" in record.msg]
    assert len(said) == is_named
    assert all(text.startswith(f"compute_loss_func ({loss.__name__})") for text in said)
    assert all(f"gradients are {steps} times too large" in text for text in said)
