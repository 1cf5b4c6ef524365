"""Policies in a run: what the plan says, the weights of a run without, less kept, compiled blocks, resuming."""

import json
from pathlib import Path

import pytest
import torch
from any_models import recomputed_layers
from compiled_runs import compiled_trainer
from compiled_runs import evidence as graphs_of
from miniature_esm import make_wide_esm
from tiny_masked_lm import largest_weight_difference, make_trainer

from hf_ext.models.activation_checkpointing import POLICIES

PACKED = {"speedups": ["attention", "packing"]}


@pytest.fixture
def compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small_esm():
    return make_wide_esm(hidden_dropout_prob=0.1)


def evidence(trainer) -> dict:
    written = json.loads((Path(trainer.args.output_dir) / "plan.json").read_text())["decisions"]
    return next(decision["evidence"] for decision in written if decision["name"] == "activation_checkpointing")


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("bf16_cpu")
@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "none"])
def test_a_run_ends_in_the_weights_of_one_without(tmp_path, policy):
    half = {**PACKED, "bf16": True}
    settings = {"padded": {}, "packed": PACKED, "blocked": half}
    for name, given in settings.items():
        given = {**given, "attention": name} if given is half else given
        stock = make_trainer(tmp_path / name / "stock", small_esm(), **given)
        stock.train()  # at once: making a trainer sets the seed that its dropout is drawn with
        trainer = make_trainer(tmp_path / name / policy, small_esm(), activation_policy=policy, **given)
        assert len(recomputed_layers(trainer.model)) == (1 if policy == "half" else 2)
        trainer.train()
        assert largest_weight_difference(stock.model, trainer.model) == 0
        assert evidence(trainer) == {"layers": 1 if policy == "half" else 2}
        trainer.end()
        assert recomputed_layers(trainer.model) == []


def test_a_policy_leaves_no_gradient_and_draws_no_number(tmp_path):
    state = torch.get_rng_state()
    model = small_esm().eval()
    after = torch.get_rng_state()
    make_trainer(tmp_path, model, activation_policy="attention", seed=3)
    with_policy = torch.get_rng_state()
    make_trainer(tmp_path / "b", model, seed=3)
    assert torch.equal(with_policy, torch.get_rng_state())
    assert not torch.equal(state, after)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(module.training for module in model.modules())


# --- together with compiled blocks -----------------------------------------------------------------------------------


POLICY, TRAINERS = {"activation_policy": "attention"}, {"activation_checkpointing": True}
PADDED = {**PACKED, "attention": "padded"}


@pytest.mark.nightly
@pytest.mark.parametrize(("given", "asked"), [(PACKED, POLICY), ({}, POLICY), (PADDED, TRAINERS)])
def test_compiled_and_recomputed_is_the_run_without_either(tmp_path, compiler, given, asked):
    blocks = {**given, "speedups": [*given.get("speedups", []), "compile"]}
    stock = make_trainer(tmp_path / "stock", **given)
    trainer = compiled_trainer(tmp_path / "run", "aot_eager", given=blocks, **asked)
    assert trainer.plan.applied("compile")
    assert graphs_of(trainer)["graphs"] >= 3
    first = trainer.model.esm.encoder.layer[0]
    assert first._compiled_call_impl is None  # the checkpoint stands around what is compiled
    assert first.attention._compiled_call_impl is not None
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-6
    assert graphs_of(trainer)["recompilations"] == 0
    trainer.end()
    assert first.attention._compiled_call_impl is None


@pytest.mark.nightly
@pytest.mark.parametrize(("policy", "kernel"), [("half", "blocked"), ("attention", "padded")])
def test_inductor_compiles_what_is_recomputed(tmp_path, compiler, policy, kernel):
    given = {**PACKED, "attention": kernel}
    stock = make_trainer(tmp_path / "stock", **given)
    blocks = {**given, "speedups": [*PACKED["speedups"], "compile"]}
    trainer = compiled_trainer(tmp_path / "run", "inductor", given=blocks, activation_policy=policy)
    assert trainer.plan.applied("compile")
    for each in (stock, trainer):
        each.train()
    assert largest_weight_difference(stock.model, trainer.model) < 1e-5


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [("attention", "attention"), (None, "half")])
def test_a_run_goes_on_exactly_and_with_another_policy_too(tmp_path, before, after):
    given = {"optim": "adamw_torch", "learning_rate": 1e-2, **PACKED}
    policies = [{"activation_policy": policy} if policy else {} for policy in (before, after)]
    saving = {"save_strategy": "steps", "save_steps": 2}
    whole = make_trainer(tmp_path / "whole", small_esm(), **saving, **given, **policies[0])
    whole.train()
    resumed = make_trainer(tmp_path / "resumed", small_esm(), **given, **policies[1])
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert whole.state.global_step == resumed.state.global_step == 4
    assert largest_weight_difference(whole.model, resumed.model) == 0
