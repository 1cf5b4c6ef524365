"""Activation checkpointing, Trainer's own and of parts: the same numbers bit for bit, less kept, on any model."""

import copy
from functools import partial

import pytest
import torch
from any_models import TRAINED, Net, rows_of_numbers
from inside import OTHER, Ledger
from miniature_esm import make_wide_esm
from tiny_affinity import ROWS
from tiny_affinity import make_batch as make_affinity_batch
from tiny_affinity import make_model as make_affinity_model
from tiny_encoders import make_batch, packed, real_outputs, states_and_gradients, tiny_esm, tiny_t5
from tiny_masked_lm import largest_weight_difference, make_args, make_trainer
from torch.utils.checkpoint import checkpoint

from hf_ext.errors import ArgumentError, PlanRefused
from hf_ext.models import keep_activations, recompute
from hf_ext.plan import make_plan
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


# --- attention, feed-forward, layers, every n-th ----------------------------------------------------------------------

PARTS = (
    {"parts": "attention"},
    {"parts": "feed_forward"},
    {"parts": "layers"},
    {"parts": "layers", "every_n_layers": 2},
)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "padded", "blocked"])
@pytest.mark.parametrize("name", MODELS)
def test_each_part_computed_again_gives_the_numbers_of_a_model_without_bit_for_bit(name, kernel, half):
    expected = numbers(make(name, kernel), half)
    for given in PARTS:
        model = make(name, kernel)
        assert recompute(model, **given) == (1 if "every_n_layers" in given else 2)
        assert same(numbers(model, half), expected)
        assert same(numbers(copy.deepcopy(model), half), expected)
        assert same(numbers(model.eval(), half), numbers(make(name, kernel).eval(), half))
        before = [vars(module).keys() for module in make(name, kernel).modules()]
        keep_activations(model)
        assert [vars(module).keys() for module in model.modules()] == before


@pytest.mark.parametrize("given", PARTS)
def test_the_comparison_sees_dropout_of_each_part_that_is_drawn_anew(given, monkeypatch):
    monkeypatch.setattr("hf_ext.models.blocks.checkpoint", partial(checkpoint, preserve_rng_state=False))
    model = make()
    recompute(model, **given)
    # Dropout of ESM's weights and states stands in its attention and its feed-forward layer.
    assert not same(numbers(model), numbers(make()))


def test_each_part_keeps_less_and_layers_least():
    kept = {}
    for given in ({}, *PARTS):
        model, ledger = make(), Ledger(1)
        if given:
            recompute(model, **given)
        ledger.know([*model.parameters(), *model.buffers()])
        with ledger:
            output = model(**make_batch())
        kept[str([*given.values()])] = ledger.current[OTHER]
        del output
    none, attention, feed_forward, layers, second = kept.values()
    assert layers < second < none
    assert layers < min(attention, feed_forward)
    assert max(attention, feed_forward) < none
    # What each part saves is apart from what the other does; a layer also saves what stands between them.
    assert (none - attention) + (none - feed_forward) <= none - layers


def test_an_encoder_that_does_not_train_is_left_alone(demo_encoders):
    for training, num_blocks in (("full", True), ("frozen", False)):
        model = make_affinity_model([demo_encoders[1]] * 2, training).train()
        assert bool(recompute(model, "attention")) == num_blocks


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_of_any_model_ends_in_the_weights_of_one_without(tmp_path, name):
    make_model, make_rows = TRAINED[name]
    weights = {}
    for asked in (None, "layers", "2"):
        args = make_args(tmp_path / str(asked), max_steps=3, activation_checkpointing=asked)
        torch.manual_seed(0)
        trainer = FastTrainer(make_model(), args, train_dataset=make_rows())
        trainer.train()
        assert trainer.plan.applied("activation_checkpointing") == (asked is not None)
        weights[asked] = trainer.model.state_dict()
        trainer.end()
        assert not any("forward" in vars(module) for module in trainer.model.modules() if asked)
    for asked in ("layers", "2"):
        assert all(torch.equal(tensor, weights[asked][key]) for key, tensor in weights[None].items())


def test_the_plan_has_the_ledger_count_what_is_computed_again(tmp_path):
    every = {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
    for asked, others, counted in (
        (None, {}, (False, 1)),
        (True, every, (True, 2)),
        ("attention", {}, ("attention", 1)),
        ("3", {}, ("layers", 3)),
    ):
        args = make_args(tmp_path, activation_checkpointing=asked, **others)
        costs = make_plan(args, make()).count_costs(args)
        assert (costs.recomputes, costs.every_n_layers) == counted


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
def test_words_and_numbers_are_read_from_anywhere_and_the_older_name_still_works(tmp_path):
    given = {"TRUE": True, "false": False, "3": 3, "Attention": "attention", 2: 2, 0: False, True: True, None: False}
    for asked, read in given.items():
        found = make_args(tmp_path, activation_checkpointing=asked).activation_checkpointing
        assert (found, type(found)) == (read, type(read))
    assert make_args(tmp_path, gradient_checkpointing=True).activation_checkpointing is True


def test_what_cannot_be_computed_again_is_refused_before_the_run(tmp_path):
    with pytest.raises(ArgumentError, match=r"activation_checkpointing='half': allowed are true, false, attention, "):
        make_args(tmp_path, activation_checkpointing="half")
    for given, words in (
        ({"activation_checkpointing": "attention"}, "no repeated layer that trains has an attention part: use layers"),
        ({"activation_checkpointing": "-1"}, "allowed are true"),
        ({"activation_checkpointing": "layers", "activation_checkpointing_kwargs": {"offload": True}}, "are for true"),
        ({"activation_checkpointing": 2, "without": ["activation_checkpointing"]}, "take one of them"),
    ):
        with pytest.raises((ArgumentError, PlanRefused), match=words):
            FastTrainer(Net(), make_args(tmp_path, **given), train_dataset=rows_of_numbers())
