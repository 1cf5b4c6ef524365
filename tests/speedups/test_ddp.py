"""DDP's search for unused weights: ended where one pass reaches all, and only there."""

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


def apply(model, collator=pad_rows, rows=None, own_loss=None, **given):
    args = make_args(**ALL, **given)
    run = Run(args, model, collator, make_rows() if rows is None else rows, own_loss=own_loss)
    context = Context(describe_hardware("T4"), args, describe_model(model), world_size=2)
    return ddp.apply(ddp.decide(context), run), run


def trainable_esm(spare=False, own_class=False):
    model = make_wide_esm()
    model.requires_grad_(True)
    if spare:
        model.spare = nn.Linear(2, 2)  # stands in the model and in no pass
    if own_class:
        model.__class__ = type("Own", (type(model),), {})
    return model


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


@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        ({"spare": True}, {}, "spare.weight and 1 more got no gradient"),
        ({"own_class": True}, {}, "passes of this model may differ"),
        ({}, {"collator": None}, "no pass over the first rows ("),
        ({}, {"own_loss": "Mine.compute_loss"}, "the loss is the user's own (Mine.compute_loss)"),
    ],
)
def test_where_a_pass_may_leave_weights_out_the_search_stays_on(model, given, why):
    decision, run = apply(trainable_esm(**model), **given)
    assert decision.reason.startswith(f"{VIEWS}; unused weights are looked for: {why}")
    assert run.args.ddp_find_unused_parameters is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ddp_find_unused_parameters": True}, "--ddp_find_unused_parameters was set"),
        ({"activation_checkpointing": True}, "activation checkpointing counts on every weight anyway"),
    ],
)
def test_what_the_user_set_is_kept(given, why):
    decision, run = apply(trainable_esm(), **given)
    assert decision.reason == f"{VIEWS}; {why}"
    assert run.args.ddp_find_unused_parameters is given.get("ddp_find_unused_parameters")


def test_towers_are_looked_through_too(make_affinity, demo_rows):
    model, collator = make_affinity("lora", "frozen")
    decision, run = apply(model, collator, demo_rows)
    assert run.args.ddp_find_unused_parameters is False, decision.reason
