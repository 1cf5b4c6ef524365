"""DDP's search for unused weights: ended where one pass reaches all, and only there."""

import copy

import pytest
import torch
from miniature_esm import make_wide_esm
from tiny_masked_lm import make_args, make_rows
from token_rows import pad_rows
from torch import nn

from hf_ext.hardware import describe_hardware
from hf_ext.speedups import Context, Run, ddp
from hf_ext.speedups.facts import describe_model

ALL = {"speedups": ["all"]}
VIEWS = "gradients are views of what is exchanged"


def decide(model=None, world_size=2, **given):
    args = make_args(**{**ALL, **given})
    return ddp.decide(
        Context(describe_hardware("T4"), args, describe_model(model or make_wide_esm()), world_size=world_size)
    )


def apply(model, collator=pad_rows, rows=None, **given):
    run = Run(make_args(**ALL, **given), model, collator, make_rows() if rows is None else rows)
    return ddp.apply(decide(model, **given), run), run


def trainable_esm():
    model = make_wide_esm()
    model.requires_grad_(True)
    return model


class WithSpare(nn.Linear):
    """A weight that stands in the model and in no pass."""


def test_it_is_for_several_processes_under_ddp():
    assert (decide(world_size=1).status, decide(world_size=1).reason) == ("off", "one process")
    assert decide(speedups=[]).status == "off"
    assert decide().status == "applied"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ddp_find_unused_parameters": True}, "--ddp_find_unused_parameters was set"),
        ({"ddp_find_unused_parameters": False}, "--ddp_find_unused_parameters was set"),
        ({"activation_checkpointing": True}, "activation checkpointing counts on every weight anyway"),
    ],
)
def test_what_the_user_set_is_kept(given, why):
    decision, run = apply(trainable_esm(), **given)
    assert decision.reason == f"{VIEWS}; {why}"
    assert run.args.ddp_find_unused_parameters is given.get("ddp_find_unused_parameters")


def test_a_masked_language_model_is_looked_through_once_and_its_contact_head_left_out():
    model = trainable_esm()
    names = [name for name, _ in model.named_parameters() if "contact_head" in name]
    state = torch.get_rng_state()
    decision, run = apply(model)
    assert run.args.ddp_find_unused_parameters is False
    assert decision.reason == f"{VIEWS}; no search for unused weights: one pass reached all that train"
    assert decision.evidence == {"watched": len([*model.parameters()]) - 2, "left_out": 2}
    assert model._ddp_params_and_buffers_to_ignore == names
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    run.restore()
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")


def test_a_weight_that_no_pass_uses_keeps_the_search_on():
    model = trainable_esm()
    model.spare = WithSpare(2, 2)
    decision, run = apply(model)
    assert run.args.ddp_find_unused_parameters is None
    assert decision.reason == f"{VIEWS}; unused weights are looked for: spare.weight and 1 more got no gradient"
    model.spare.requires_grad_(False)
    assert apply(model)[1].args.ddp_find_unused_parameters is False


def test_models_whose_passes_may_differ_keep_the_search_on():
    class Own(type(make_wide_esm())):
        pass

    model = copy.deepcopy(trainable_esm())
    model.__class__ = Own
    decision, run = apply(model)
    assert decision.reason.endswith("unused weights are looked for: passes of this model may differ")
    assert run.args.ddp_find_unused_parameters is None


@pytest.mark.parametrize(("collator", "rows"), [(None, None), (pad_rows, []), (lambda rows: {"wrong": 1}, None)])
def test_where_no_pass_can_be_made_the_search_stays_on(collator, rows):
    decision, run = apply(trainable_esm(), collator, rows)
    assert "unused weights are looked for: no pass over the first rows (" in decision.reason
    assert run.args.ddp_find_unused_parameters is None


@pytest.mark.parametrize("towers", [("full", "full"), ("frozen", "full"), ("lora", "frozen")])
def test_towers_are_looked_through_too(make_affinity, demo_rows, towers):
    model, collator = make_affinity(*towers)
    decision, run = apply(model, collator, demo_rows)
    assert run.args.ddp_find_unused_parameters is False, decision.reason


@pytest.mark.parametrize("own_loss", ["Mine.training_step", "Mine.compute_loss", "compute_loss_func"])
def test_a_loss_of_the_users_which_may_leave_weights_out_keeps_the_search_on(own_loss):
    model = trainable_esm()
    run = Run(make_args(**ALL), model, pad_rows, make_rows(), own_loss=own_loss)
    decision = ddp.apply(decide(model), run)
    assert decision.reason == f"{VIEWS}; unused weights are looked for: the loss is the user's own ({own_loss})"
    assert run.args.ddp_find_unused_parameters is None
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
