"""The masked-LM head at labelled tokens: the loss and gradients of stock, fewer rows, evaluation as it was."""

import copy

import pytest
import torch
from closeness import largest
from miniature_esm import make_wide_esm
from peft import LoraConfig, get_peft_model
from tiny_masked_lm import IGNORED, largest_weight_difference, make_args, make_rows, make_trainer, resumed_difference
from token_rows import pad_rows
from transformers import EsmForMaskedLM, Trainer

from hf_ext.speedups.fused_layers import label_only

BATCH = pad_rows(make_rows(4))
NUM_LABELS = int(BATCH["labels"].ne(IGNORED).sum())
HEAD = {"speedups": ["masked_lm_head"]}


def loss_and_gradients(model, batch=BATCH, **given) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model.train()(**batch, **given).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(model, stock, **given) -> float:
    """Of the loss and of each gradient, relative to stock's largest one."""
    (loss, grads), (stock_loss, stock_grads) = loss_and_gradients(model, **given), loss_and_gradients(stock)
    assert grads.keys() == stock_grads.keys()
    scale = largest(grad.abs().max() for grad in stock_grads.values())
    errors = [(grads[name] - stock_grads[name]).abs().max().item() / scale for name in grads]
    return largest([abs(loss - stock_loss) / stock_loss, *errors])


@pytest.fixture
def stock() -> EsmForMaskedLM:
    return make_wide_esm()


@pytest.fixture
def model(stock) -> EsmForMaskedLM:
    twin = copy.deepcopy(stock)
    assert label_only(twin) == 1
    return twin


# --- equivalence -----------------------------------------------------------------------------------------------------


def test_loss_and_every_gradient_are_those_of_stock(model, stock):
    assert largest_error(model, stock) < 1e-6


def test_the_loss_is_the_sum_over_the_number_of_items_that_it_is_given(model, stock):
    loss, _ = loss_and_gradients(stock)
    halved, _ = loss_and_gradients(model, num_items_in_batch=2 * NUM_LABELS)
    assert halved == pytest.approx(loss / 2, rel=1e-6)
    as_tensor, _ = loss_and_gradients(model, num_items_in_batch=torch.tensor(NUM_LABELS))
    assert as_tensor == pytest.approx(loss, rel=1e-6)


def test_under_lora_it_is_stock_too(model, stock):
    config = LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    wrapped = []
    for base in (model, stock):
        torch.manual_seed(0)
        wrapped.append(get_peft_model(base, config))
    assert largest_error(*wrapped) < 1e-6
    assert label_only(wrapped[0]) == 1


def test_a_batch_without_labels_costs_nothing_instead_of_being_no_number(model, stock):
    batch = {**BATCH, "labels": torch.full_like(BATCH["labels"], IGNORED)}
    loss, grads = loss_and_gradients(model, batch)
    assert loss == 0
    assert all(grad.abs().max() == 0 for grad in grads.values())
    assert torch.isnan(stock(**batch).loss)


# --- effect, and what stays ------------------------------------------------------------------------------------------


def test_the_head_computes_one_row_per_labelled_token(model, stock):
    def count_rows(twin):
        seen = []
        twin.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:-1].numel()))
        twin.train()(**BATCH)
        return seen

    assert count_rows(model) == [NUM_LABELS]
    assert count_rows(stock) == [BATCH["labels"].numel()]
    assert BATCH["labels"].numel() > 2 * NUM_LABELS


def test_evaluation_and_calls_without_labels_are_as_they_were(model, stock):
    unlabelled = {name: value for name, value in BATCH.items() if name != "labels"}
    for mode, batch in ((False, BATCH), (False, unlabelled), (True, unlabelled)):
        found, expected = (twin.train(mode)(**batch) for twin in (model, stock))
        assert torch.equal(found.logits, expected.logits)
        assert (found.loss is None) == (expected.loss is None)
        assert found.loss is None or torch.equal(found.loss, expected.loss)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}])
def test_training_ends_in_the_weights_of_the_exact_loss(tmp_path, given):
    plain, ours = make_trainer(tmp_path / "plain", **given), make_trainer(tmp_path / "ours", **HEAD, **given)
    assert ours.plan["masked_lm_head"].evidence == {"heads": 1}
    plain.train()
    ours.train()
    assert largest_weight_difference(ours.model, plain.model) < 1e-6
    if given:  # micro-batches with their own means, as transformers 5.23 trains ESM
        stock = Trainer(make_wide_esm(), make_args(tmp_path / "stock", **given), pad_rows, make_rows())
        stock.train()
        assert largest_weight_difference(stock.model, plain.model) > 1e-5


def test_a_run_that_was_stopped_goes_on_exactly(tmp_path):
    assert resumed_difference(tmp_path / "same", **HEAD) == 0
    assert resumed_difference(tmp_path / "other", seed=4, allow_changed=["seed"], **HEAD) > 1e-3  # other rows


def test_end_and_off_leave_the_model_alone(tmp_path):
    model = make_wide_esm()
    trainer = make_trainer(tmp_path, model, **HEAD)
    assert "forward" in vars(model)
    trainer.end()
    assert "forward" not in vars(model)
    make_trainer(tmp_path, model)
    assert "forward" not in vars(model)
