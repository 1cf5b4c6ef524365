"""Activation checkpointing, Trainer's own: the same numbers bit for bit, less kept, also packed and beside adapters."""

import pytest
import torch
from any_models import Net, rows_of_numbers
from inside import OTHER, Ledger
from miniature_esm import make_wide_esm
from tiny_affinity import ROWS
from tiny_affinity import make_batch as make_affinity_batch
from tiny_affinity import make_model as make_affinity_model
from tiny_encoders import make_batch, packed, real_outputs, states_and_gradients, tiny_esm, tiny_t5
from tiny_masked_lm import largest_weight_difference, make_args, make_trainer

from hf_ext.trainer import FastTrainer

pytestmark = pytest.mark.usefixtures("blocked_in_float32")

MODELS = {
    "ESM": lambda: tiny_esm(hidden_dropout_prob=0.1),
    "ESM, weights dropped": lambda: tiny_esm(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    "T5": lambda: tiny_t5(dropout_rate=0.1),
}


def make(name="ESM", kernel="sdpa", **recomputing):
    model = MODELS[name]().train()
    if recomputing:
        model.activation_checkpointing_enable(**recomputing)
    return model if kernel == "sdpa" else packed(model, kernel)


def numbers(model, half=False, batch=None, compute=real_outputs):
    """Outputs and gradients of one pass in training mode, with the same random numbers every time."""
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        outputs, gradients = states_and_gradients(model, make_batch() if batch is None else batch, compute)
    return {**outputs, **{f"gradient of {name}": x for name, x in gradients.items()}}


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "padded", "blocked"])
@pytest.mark.parametrize("name", MODELS)
def test_recomputing_gives_the_numbers_of_a_model_without_bit_for_bit(name, kernel, half):
    recomputed = numbers(make(name, kernel, every_n_layers=1), half)
    assert same(recomputed, numbers(make(name, kernel), half))


def test_the_comparison_sees_dropout_that_is_drawn_anew():
    kwargs = {"use_reentrant": False, "preserve_rng_state": False}
    assert not same(numbers(make(activation_checkpointing_kwargs=kwargs)), numbers(make()))


@pytest.mark.parametrize("kernel", ["sdpa", "padded", "blocked"])
def test_a_model_keeps_less(kernel):
    kept = {}
    for n, given in enumerate(({}, {"every_n_layers": 1})):
        model, ledger = make("ESM", kernel, **given), Ledger(1)
        ledger.know([*model.parameters(), *model.buffers()])
        with ledger, torch.autocast("cpu", torch.bfloat16):
            output = model(**make_batch())
        kept[n] = ledger.current[OTHER]
        del output
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize("training", ["full", "lora", "frozen"])
def test_towers_of_an_affinity_model_recompute_where_they_train(demo_encoders, training):
    def compute(model, batch):
        return {"logits": model(**batch).logits}

    stock, model = (make_affinity_model([demo_encoders[1]] * 2, training).train() for _ in range(2))
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing is (training != "frozen")
    batch = make_affinity_batch(model, ROWS)
    assert same(numbers(model, batch=batch, compute=compute), numbers(stock, batch=batch, compute=compute))


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize("given", [{}, {"speedups": ["attention", "packing"]}, {"attention": "blocked", "bf16": True}])
def test_a_run_ends_in_the_weights_of_one_without(tmp_path, given):
    found = {}
    for recomputed in (False, True):
        model = make_wide_esm(hidden_dropout_prob=0.1)
        trainer = make_trainer(tmp_path / str(recomputed), model, activation_checkpointing=recomputed, **given)
        trainer.train()
        found[recomputed] = trainer.model
    assert largest_weight_difference(found[False], found[True]) == 0


def test_the_preset_leaves_it_out_where_a_model_cannot(tmp_path):
    args = make_args(tmp_path, preset="low_memory", max_steps=1, without=["compile"])
    assert args.activation_checkpointing
    trainer = FastTrainer(Net(), args, train_dataset=rows_of_numbers())
    trainer.train()
    assert not trainer.args.activation_checkpointing
