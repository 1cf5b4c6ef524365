"""Activation checkpointing of modules that are no `PreTrainedModel`: the same numbers with dropout, less kept."""

import copy
from types import MethodType

import pytest
import torch
from any_models import Net, recomputed_layers, resnet
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

from hf_ext.memory.probe import OTHER, Ledger
from hf_ext.models.activation_checkpointing import (
    POLICIES,
    set_policy,
    trained_layers,
    unset_policy,
)
from hf_ext.models.blocks import find_blocks


class Around(nn.Module):
    """A plain module around a model of transformers."""

    def __init__(self):
        super().__init__()
        shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        self.inner = BertModel(BertConfig(vocab_size=40, **shape), add_pooling_layer=False)

    def forward(self, x):
        return self.inner((x.abs() * 10).long().clamp(max=39)).last_hidden_state


MADE = {
    "Sequential": (Net, 4),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.2), 3), 3),
    "around a PreTrainedModel": (Around, 2),
}


def make(name):
    torch.manual_seed(0)
    return MADE[name][0]().train()


def numbers(model, half=False):
    """Outputs and gradients of one pass, with the same random numbers every time."""
    torch.manual_seed(5)
    x = torch.randn(6, 5 if isinstance(model, Net) else 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = model(x if not isinstance(model, nn.TransformerEncoder) else x[None])
    states = output["logits"] if isinstance(output, dict) else output
    model.zero_grad()
    (states * torch.arange(states.numel()).view_as(states).sin()).sum().backward()
    return {"output": states.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_without_bit_for_bit_with_dropout(name, half):
    expected, num = numbers(make(name), half), MADE[name][1]
    for policy in POLICIES:
        model = make(name)
        assert set_policy(model, policy) == {"none": 0, "half": -(-num // 2)}.get(policy, num)
        assert same(numbers(model, half), expected), policy
        assert set(model.state_dict()) == set(make(name).state_dict())


@pytest.mark.parametrize("name", ["Sequential", "TransformerEncoder"])
def test_the_comparison_sees_dropout_that_is_drawn_anew(name):
    model = make(name)
    for block in find_blocks(model):
        plain = type(block).forward

        def broken(self, *args, plain=plain, **kwargs):
            return checkpoint(plain, self, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        vars(block)["forward"] = MethodType(broken, block)
    assert not same(numbers(model), numbers(make(name)))


def test_less_is_kept_and_nothing_is_computed_again_in_evaluation():
    kept = {}
    for policy in ("none", "half", "full"):
        model = make("Sequential")
        set_policy(model, policy)
        with Ledger(1) as ledger:
            ledger.know(model.parameters())
            output = model(torch.randn(512, 5))
        kept[policy] = ledger.current[OTHER]
        del output
    assert kept["full"] < 0.6 * kept["none"]
    assert kept["full"] < kept["half"] < kept["none"]
    calls, model = [], make("Sequential").eval()
    set_policy(model, "full")
    model.trunk[0].norm.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(2, 5))["logits"].sum().backward()
    assert calls == [1]
    model.train()(torch.randn(2, 5))["logits"].sum().backward()
    assert calls == [1] * 3  # once more, and again


def test_a_policy_is_replaced_undone_and_goes_with_copies_and_leaves_a_forward_that_was_there():
    model = make("Sequential")
    own = MethodType(lambda self, x: x * 2, model.trunk[1])
    vars(model.trunk[1])["forward"] = own
    expected = numbers(model)
    assert [set_policy(model, policy) for policy in ("full", "half", "attention")] == [4, 2, 4]
    twin = copy.deepcopy(model)
    assert twin.trunk[0].forward.__self__ is twin.trunk[0]
    assert same(numbers(model), expected)
    assert same(numbers(twin), expected)
    unset_policy(model)
    assert recomputed_layers(model) == []
    assert len(recomputed_layers(twin)) == 4
    assert vars(model.trunk[1])["forward"] is own
    assert "forward" not in vars(model.trunk[0])


def test_layers_before_which_nothing_trains_keep_nothing_and_are_left_out():
    model = make("Sequential")
    for part in (model.stem, model.trunk[:2]):
        part.requires_grad_(False)
    # In the order of registration: the stem, the head, then the trunk.
    model.head.requires_grad_(False)
    assert trained_layers(model) == [*model.trunk[2:]]
    assert set_policy(model, "full") == 2
    assert set_policy(make("Sequential").requires_grad_(False), "full") == 0
    assert set_policy(nn.Linear(2, 2), "full") == 0
    assert set_policy(resnet().train(), "full") == 5
