"""A loss of the user's is tried before the first step: what cannot train is refused, and nothing else changes."""

import logging
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset
from torch import nn

from hf_ext.errors import ArgumentError
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

NUM_ROWS = 40


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


def summed(outputs, labels, num_items_in_batch=None):
    total = ((outputs["logits"] - labels) ** 2).sum()
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def noisy(outputs, labels, **kwargs):
    return mse(outputs, labels + torch.rand(len(labels)))


def none_yet(outputs, labels, num_items_in_batch=None):
    return mse(outputs, labels).clamp(max=0.0)  # as a hinge that no row has reached


def detached(outputs, labels, num_items_in_batch=None):
    return mse({"logits": outputs["logits"].detach()}, labels)


def indifferent(outputs, labels, num_items_in_batch=None):
    return 0.0 * mse(outputs, labels) + 1.0


def not_finite(outputs, labels, num_items_in_batch=None):
    return mse(outputs, labels) / 0.0


def per_row(outputs, labels, num_items_in_batch=None):
    return (outputs["logits"] - labels) ** 2


def rows():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM_ROWS, 3)).astype(np.float32)
    return Dataset.from_dict({"x": x.tolist(), "labels": x.sum(1).tolist()}).with_format("torch")


def make_trainer(folder, loss=mse, model=None, cls=FastTrainer, data=None, **arguments):
    args = FastTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_steps=3,
        learning_rate=0.1,
        **arguments,
    )
    return cls(model or Line(), args, train_dataset=rows() if data is None else data, compute_loss_func=loss)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (detached, r"compute_loss_func \(detached\) is detached from the model.*\.item\(\)"),
        (not_finite, "is inf on the first batch"),
        (per_row, r"returned shape \(8,\): one number"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_before_the_first_step(tmp_path, loss, words):
    trainer = make_trainer(tmp_path, loss)
    with pytest.raises(ArgumentError, match=words):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_loss_that_changes_with_no_weight_is_refused_where_speedups_are_asked_for_and_else_named(tmp_path, caplog):
    words = "does not change with any of the 2 trainable parameters: all gradients are zero"
    with pytest.raises(ArgumentError, match=words):
        make_trainer(tmp_path, indifferent, speedups=["data_loading"]).train()
    trainer = make_trainer(tmp_path, indifferent)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert words in caplog.text
    assert trainer.state.global_step == 3


def test_a_loss_that_needs_what_a_step_makes_of_the_trainer_is_not_checked_and_trains(tmp_path, caplog):
    class Counting(FastTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return mse(model(inputs["x"]), inputs["labels"]) / self.current_gradient_accumulation_steps

    with caplog.at_level(logging.WARNING):
        trainer = make_trainer(tmp_path, None, cls=Counting)
        trainer.train()
    assert "The loss is not checked before training: AttributeError" in caplog.text
    assert trainer.state.global_step == 3


def test_a_loss_that_is_not_finite_is_left_to_nan_policy_skip(tmp_path, caplog):
    def only_first(outputs, labels, num_items_in_batch=None, calls=[]):  # noqa: B006
        calls.append(1)
        return mse(outputs, labels) / (0.0 if len(calls) == 1 else 1.0)

    trainer = make_trainer(tmp_path, only_first, nan_policy="skip")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert trainer.state.global_step == 3
    assert "is inf on the first batch" in caplog.text


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
    return losses, trainer.model.linear.weight.detach().clone(), drawn


class Unchecked(FastTrainer):
    def check_loss(self, loader):
        """Nothing."""


class Careless(FastTrainer):
    """The broken twin: its check leaves the random state moved."""

    def check_loss(self, loader):
        super().check_loss(loader)
        torch.rand(1)


def test_training_is_the_same_with_and_without_the_check(tmp_path):
    losses, weight, drawn = train(make_trainer(tmp_path / "checked"))
    expected, expected_weight, expected_drawn = train(make_trainer(tmp_path / "unchecked", cls=Unchecked))
    assert len(losses) == 3
    assert (losses, drawn) == (expected, expected_drawn)
    assert torch.equal(weight, expected_weight)
    assert train(make_trainer(tmp_path / "careless", cls=Careless))[0] != expected


def test_modes_and_gradients_stay_as_they_were(tmp_path):
    seen = {}

    class Watching(FastTrainer):
        def check_loss(self, loader):
            self.model.linear.eval()
            self.model.linear.weight.grad = torch.full((1, 3), 2.0)
            super().check_loss(loader)
            seen["modes"] = [self.model.training, self.model.linear.training, self.model.dropout.training]
            seen["gradient"] = self.model.linear.weight.grad.tolist(), self.model.linear.bias.grad

    make_trainer(tmp_path, cls=Watching).train()
    assert seen["modes"] == [True, False, True]
    assert seen["gradient"] == ([[2.0, 2.0, 2.0]], None)


def test_a_subclass_and_a_foreign_model_are_checked_too(tmp_path):
    class Mine(FastTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = detached(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    class Own(Line):
        def forward(self, x, labels=None):
            logits = super().forward(x)["logits"]
            return {"loss": detached({"logits": logits}, labels), "logits": logits}

    with pytest.raises(ArgumentError, match=r"The loss of Mine\.compute_loss is detached"):
        make_trainer(tmp_path, None, cls=Mine).train()
    with pytest.raises(ArgumentError, match="The loss of Own is detached"):
        make_trainer(tmp_path, None, model=Own()).train()


def test_our_own_losses_are_not_checked_again(tmp_path, make_affinity, demo_rows):
    checked = []

    class Watching(FastTrainer):
        def check_loss(self, loader):
            checked.append(type(self.model).__name__)
            super().check_loss(loader)

    model, collator = make_affinity()
    args = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 1}
    data = demo_rows.select(range(8))
    Watching(model, FastTrainingArguments(str(tmp_path), **args), collator, data).train()
    assert checked == []
    make_trainer(tmp_path, cls=Watching).train()
    assert checked == ["Line"]


def test_a_stream_is_left_out_and_said_so(tmp_path, caplog):
    stream = IterableDataset.from_generator(lambda: iter(rows()))
    with caplog.at_level(logging.INFO, logger="hf_ext"):
        make_trainer(tmp_path, data=stream).train()
    assert "The loss is not checked before training: the training data is a stream." in caplog.text


def test_a_loss_on_cached_embeddings_is_checked(tmp_path, make_affinity, demo_rows):
    def broken(outputs, labels, num_items_in_batch=None):
        return ((outputs["logits"].detach() - labels) ** 2).mean()

    model, collator = make_affinity()
    args = FastTrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", save_strategy="no", max_steps=1,
        speedups=["embedding_cache"], embedding_cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    trainer = FastTrainer(model, args, collator, demo_rows.select(range(16)), compute_loss_func=broken)
    with pytest.raises(ArgumentError, match="is detached"):
        trainer.train()


class Swallowing(Line):
    """Says that it divides by the number of items, and does not."""

    accepts_loss_kwargs = True

    def forward(self, x, labels=None, **kwargs):
        outputs = super().forward(x)
        return {"loss": mse(outputs, labels), **outputs}


def test_a_mean_that_trainer_takes_for_a_share_of_the_step_is_named_where_steps_are_split(tmp_path, caplog):
    for loss, model, steps, name in (
        (mse, None, 4, r"compute_loss_func (mse)"),
        (noisy, None, 2, r"compute_loss_func (noisy)"),
        (None, Swallowing(), 2, "The loss of Swallowing"),
        (mse, None, 1, None),
        (summed, None, 4, None),
        (none_yet, None, 4, None),
    ):
        caplog.clear()
        torch.manual_seed(1)
        trainer = make_trainer(tmp_path, loss, model, gradient_accumulation_steps=steps)
        trainer.train()
        said = [record.getMessage() for record in caplog.records if "does not change with num_items" in record.msg]
        assert [text.split(" does")[0] for text in said] == ([] if name is None else [name])
        assert all(f"gradients are {steps} times too large" in text for text in said)
