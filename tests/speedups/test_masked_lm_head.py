"""The masked-LM head at labelled tokens: fewer rows, the sum over the items it is given, evaluation as it was."""

import copy

import pytest
import torch
from miniature_esm import make_wide_esm
from peft import LoraConfig, get_peft_model
from tiny_masked_lm import IGNORED, largest_weight_difference, make_args, make_rows, make_trainer
from token_rows import pad_rows
from transformers import Trainer

from hf_ext.speedups.fused_layers import label_only

BATCH = pad_rows(make_rows(4))
NUM_LABELS = int(BATCH["labels"].ne(IGNORED).sum())
HEAD = {"speedups": ["masked_lm_head"]}


@pytest.fixture
def pair():
    """A model whose head computes where labels are, and one of transformers."""
    stock = make_wide_esm()
    model = copy.deepcopy(stock)
    assert label_only(model) == 1
    return model, stock


def loss_of(model, batch=BATCH, **given) -> float:
    return model.train()(**batch, **given).loss.item()


def test_the_loss_is_the_sum_over_the_number_of_items_that_it_is_given(pair):
    model, stock = pair
    assert loss_of(model) == pytest.approx(loss_of(stock), rel=1e-6)
    assert loss_of(model, num_items_in_batch=2 * NUM_LABELS) == pytest.approx(loss_of(stock) / 2, rel=1e-6)
    assert loss_of(model, num_items_in_batch=torch.tensor(NUM_LABELS)) == pytest.approx(loss_of(stock), rel=1e-6)


def test_a_batch_without_labels_costs_nothing_instead_of_being_no_number(pair):
    batch = {**BATCH, "labels": torch.full_like(BATCH["labels"], IGNORED)}
    loss = pair[0].train()(**batch).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad.abs().max() == 0 for p in pair[0].parameters() if p.grad is not None)
    assert torch.isnan(pair[1](**batch).loss)


def test_the_head_computes_one_row_per_labelled_token(pair):
    seen = []
    for model in pair:
        model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
        model.train()(**BATCH)
    assert seen == [NUM_LABELS, BATCH["labels"].numel()]
    assert seen[1] > 2 * seen[0]


def test_evaluation_and_calls_without_labels_are_as_they_were(pair):
    unlabelled = {name: value for name, value in BATCH.items() if name != "labels"}
    for mode, batch in ((False, BATCH), (True, unlabelled)):
        found, expected = (model.train(mode)(**batch) for model in pair)
        assert torch.equal(found.logits, expected.logits)
        assert found.loss is None or torch.equal(found.loss, expected.loss)


def test_it_applies_under_lora_and_its_gradients_are_those_of_stock(tmp_path):
    def wrapped():
        torch.manual_seed(0)
        return get_peft_model(make_wide_esm(), LoraConfig(r=2, target_modules=["query", "value"]))

    plain, ours = make_trainer(tmp_path / "plain", wrapped()), make_trainer(tmp_path / "ours", wrapped(), **HEAD)
    assert ours.plan["masked_lm_head"].evidence == {"heads": 1}
    for trainer in (plain, ours):
        trainer.train()
    assert largest_weight_difference(ours.model, plain.model) < 1e-6


def test_stock_trainer_weighs_labels_by_how_a_step_is_split_and_this_does_not(tmp_path):
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    ours = make_trainer(tmp_path / "ours", **HEAD, **split)
    stock = Trainer(make_wide_esm(), make_args(tmp_path / "stock", **split), pad_rows, make_rows())
    whole = make_trainer(tmp_path / "whole", per_device_train_batch_size=8)
    for trainer in (ours, stock, whole):
        trainer.train()
    assert largest_weight_difference(ours.model, whole.model) < 1e-5
    assert largest_weight_difference(stock.model, whole.model) > 1e-4
