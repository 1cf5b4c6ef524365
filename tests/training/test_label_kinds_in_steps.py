"""Every kind of label has one gradient and one loss, however a step or an evaluation is split; residues are cached."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import distance
from labelled_rows import KINDS, MAX_RESIDUES, make_labelled, make_rows, make_trainer
from small_memory import Room
from transformers import Trainer, TrainerCallback

from hf_ext.errors import CacheError
from hf_ext.models import AffinityModel

PACKED = {"speedups": ["attention", "packing"], "max_tokens_per_batch": 64, "train_sampling_strategy": "random"}


class Gradients(TrainerCallback):
    """Collects the gradient of each optimizer step as one vector."""

    def __init__(self):
        self.vectors = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.vectors.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))


def set_bias(model):
    """Else classes are all alike at first, and unknown labels would not be missed."""
    model.head.layers[-1].bias.data = torch.linspace(-1, 2, model.head.num_outputs or 1)


def train_step(name, folder, encoder, **given):
    trainer = make_trainer(name, folder, encoder, **given)
    set_bias(trainer.model)
    trainer.add_callback(gradients := Gradients())
    trainer.train()
    return gradients.vectors[0], trainer.state.log_history[0]["loss"], trainer


def sum_over_rows(model, collator, rows):
    """Gradient and loss of all known labels, row by row."""
    model.zero_grad()
    labels = [collator([row])["labels"] for row in rows]
    known, total = sum(int(one.ne(-100).sum()) for one in labels), 0.0
    for row in rows:
        loss = model(**collator([row]), num_items_in_batch=known).loss
        loss.backward()
        total += loss.item()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), total


@pytest.mark.parametrize("name", KINDS)
def test_accumulated_and_packed_steps_have_the_gradient_of_single_rows(name, demo_encoders, tmp_path):
    whole, loss, trainer = train_step(name, tmp_path, demo_encoders[1])
    twin, collator = make_labelled(name, demo_encoders[1])
    twin.head.load_state_dict({**trainer.model.head.state_dict(), **dict(twin.head.named_parameters())})  # the scales
    twin.config.label_mean, twin.config.label_std = trainer.model.config.label_mean, trainer.model.config.label_std
    set_bias(twin)
    expected, expected_loss = sum_over_rows(twin.train(), collator, list(make_rows(name)))
    assert distance(whole, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for split in (
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 7, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 8, **PACKED},
    ):
        gradient, split_loss, _ = train_step(name, tmp_path, demo_encoders[1], **split)
        assert distance(gradient, expected) < 1e-4
        assert split_loss == pytest.approx(expected_loss, rel=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_a_step_that_did_not_fit_has_the_gradient_of_one_that_does(name, demo_encoders, tmp_path):
    expected, loss, _ = train_step(name, tmp_path, demo_encoders[1])
    for given in ({}, {"speedups": PACKED["speedups"]}):
        trainer = make_trainer(name, tmp_path, demo_encoders[1], **given)
        set_bias(trainer.model)
        room = Room(calls=(1,))
        room.watch(next(part for part in trainer.model.modules() if type(part).__name__ == "EsmLayer"))
        trainer.add_callback(gradients := Gradients())
        trainer.train()
        assert room.num_failed == 1
        assert distance(gradients.vectors[0], expected) < 1e-5
        assert next(e["loss"] for e in trainer.state.log_history if "loss" in e) == pytest.approx(loss, rel=1e-4)


def test_a_twin_that_averages_each_batch_is_told_apart(demo_encoders, tmp_path, monkeypatch):
    whole, *_ = train_step("residue_classes", tmp_path, demo_encoders[1])
    forward = AffinityModel.forward

    def averaging(self, *args, num_items_in_batch=None, **kwargs):
        output = forward(self, *args, **kwargs)
        output.loss = output.loss / 4
        return output

    monkeypatch.setattr(AffinityModel, "forward", averaging)
    split = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    gradient, *_ = train_step("residue_classes", tmp_path, demo_encoders[1], **split)
    assert distance(gradient, whole) > 0.01


@pytest.mark.parametrize("name", KINDS)
def test_evaluations_and_predictions_do_not_depend_on_the_batch_size(name, demo_encoders, tmp_path):
    trainer = make_trainer(name, tmp_path, demo_encoders[1])
    trainer.fit_scaling()
    set_bias(trainer.model)
    found = []
    for size in (16, 3):
        trainer.args.per_device_eval_batch_size = size
        found.append((trainer.evaluate()["eval_loss"], trainer.predict(trainer.eval_dataset)))
    (loss, whole), (other_loss, other) = found
    rows = trainer.eval_dataset
    batch = trainer.data_collator(list(rows))
    with torch.no_grad():
        output = trainer.model.eval()(**batch)
    assert loss == pytest.approx(output.loss.item(), rel=1e-5)
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert whole.predictions.shape == output.logits.shape
    np.testing.assert_allclose(whole.predictions, output.logits, atol=1e-4)
    np.testing.assert_allclose(other.predictions, whole.predictions, atol=1e-4)
    np.testing.assert_array_equal(whole.label_ids, batch["labels"])
    np.testing.assert_array_equal(other.label_ids, whole.label_ids)
    stock = make_trainer(name, tmp_path, demo_encoders[1], cls=Trainer, per_device_eval_batch_size=3)
    stock.model.load_state_dict(trainer.model.state_dict())
    assert stock.evaluate()["eval_loss"] != pytest.approx(loss, rel=1e-5)  # a mean of means


@pytest.mark.parametrize("training", ["full", "frozen"])
@pytest.mark.parametrize("name", KINDS)
def test_a_subset_is_evaluated_while_a_run_trains(name, training, demo_encoders, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_subset": 8, "max_steps": 2}
    evaluated |= {"speedups": ["embedding_cache"]} if training == "frozen" else {}
    trainer = make_trainer(name, tmp_path, demo_encoders[1], training, **evaluated)
    trainer.train()
    logged = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(logged) == 2
    assert "eval_full_loss" in logged[-1]


CACHED = {"speedups": ["embedding_cache"], "max_steps": 2, "per_device_train_batch_size": 5}


@pytest.mark.parametrize("name", ["residue_classes", "residue_numbers"])
def test_cached_residues_train_as_an_encoder_that_runs_in_each_step(name, demo_encoders, tmp_path):
    live = train_step(name, tmp_path, demo_encoders[1], training="frozen", **{**CACHED, "speedups": ["attention"]})
    cached = train_step(name, tmp_path, demo_encoders[1], training="frozen", **CACHED)
    assert distance(cached[0], live[0]) < 2e-3  # float16
    assert cached[1] == pytest.approx(live[1], rel=1e-3)
    evidence = cached[2].plan["embedding_cache"].evidence
    assert evidence["num_encoded"] == len(set(make_rows(name)["chain"]))
    assert not cached[2].model.encoders  # let go
    rows = make_rows(name)
    for trainer in (live[2], cached[2]):
        trainer.model.eval()
    expected, found = (trainer.predict(rows) for trainer in (live[2], cached[2]))
    assert found.predictions.shape[:2] == (16, MAX_RESIDUES)
    np.testing.assert_allclose(found.predictions, expected.predictions, atol=1e-2)
    np.testing.assert_array_equal(found.label_ids, expected.label_ids)
    again = train_step(name, tmp_path, demo_encoders[1], training="frozen", **CACHED)[2]
    assert again.plan["embedding_cache"].evidence["num_encoded"] == 0


def test_states_that_the_disk_does_not_hold_are_refused_with_their_size(demo_encoders, tmp_path, monkeypatch):
    trainer = make_trainer("residue_classes", tmp_path, demo_encoders[1], training="frozen", **CACHED)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(
        CacheError, match=r"16 sequences .* GB in float16, and 1e-06 GB are free .* --without embedding"
    ):
        trainer.train()


@pytest.mark.parametrize("training", ["lora", "full"])
def test_encoders_that_train_learn_residues(training, demo_encoders, tmp_path):
    longer = {"max_steps": 12, "learning_rate": 3e-3, "logging_steps": 1, "use_peft": training == "lora"}
    trainer = make_trainer("residue_classes", tmp_path, demo_encoders[1], training, **longer)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < 0.9 * losses[0]
