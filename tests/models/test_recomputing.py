"""Activation checkpointing: the same numbers bit for bit, less kept, attention computed once; of plain modules too."""

import copy
from collections import Counter
from types import MethodType

import pytest
import torch
from any_models import Net, recomputed_layers, resnet
from miniature_esm import make_esm
from tiny_affinity import ROWS
from tiny_affinity import make_batch as make_affinity_batch
from tiny_affinity import make_model as make_affinity_model
from tiny_encoders import make_batch, packed, real_outputs, states_and_gradients, tiny_esm, tiny_t5
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ext.errors import ArgumentError
from hf_ext.memory.probe import OTHER, Ledger
from hf_ext.models.activation_checkpointing import POLICIES, set_policy, trained_layers, unset_policy

pytestmark = pytest.mark.usefixtures("blocked_in_float32")

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
MODELS = {
    "ESM": lambda: tiny_esm(hidden_dropout_prob=0.1),
    "ESM, weights dropped": lambda: tiny_esm(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1),
    "T5": lambda: tiny_t5(dropout_rate=0.1),
}


def make(name="ESM", kernel="sdpa"):
    model = MODELS[name]().train()
    return model if kernel == "sdpa" else packed(model, kernel)


def numbers(model, half=False, batch=None, compute=real_outputs):
    """Outputs and gradients of one pass in training mode, with the same random numbers every time."""
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        outputs, gradients = states_and_gradients(model, make_batch() if batch is None else batch, compute)
    return {**outputs, **{f"gradient of {name}": x for name, x in gradients.items()}}


def same(found, expected) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "padded", "blocked"])
@pytest.mark.parametrize("name", MODELS)
def test_every_policy_gives_the_numbers_of_none_bit_for_bit(name, kernel, half):
    expected = numbers(make(name, kernel), half)
    layers = {"none": 0, "half": 1, "attention": 2, "full": 2}
    for policy in POLICIES:
        model = make(name, kernel)
        assert set_policy(model, policy) == layers[policy]
        assert same(numbers(model, half), expected), policy


# --- broken twins ----------------------------------------------------------------------------------------------------


def test_the_comparison_sees_dropout_that_is_drawn_anew():
    model = make()
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    assert not same(numbers(model), numbers(make()))


# --- what is computed, and what is kept ------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Operations that were really computed, by name."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found[operation.name().split(".")[0]] += 1
        return operation(*args, **(kwargs or {}))


def count(policy, kernel) -> Counter:
    model = make("ESM", kernel)
    set_policy(model, policy)
    with Count() as counted:
        numbers(model)
    return counted.found


def test_attention_is_computed_once_under_attention_and_twice_under_full():
    by_policy = {policy: count(policy, "padded") for policy in POLICIES}
    assert {policy: found[ATTENTION] for policy, found in by_policy.items()} == {
        **{"none": 2, "half": 3, "attention": 2, "full": 4}
    }
    products = {policy: found["aten::addmm"] for policy, found in by_policy.items()}
    assert products["none"] < products["half"] < products["attention"] <= products["full"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", ["sdpa", "padded", "blocked"])
def test_a_whole_model_keeps_less_under_each_policy(kernel):
    kept = {}
    for policy in POLICIES:
        model = make("ESM", kernel)
        set_policy(model, policy)
        ledger = Ledger(1)
        ledger.know([*model.parameters(), *model.buffers()])
        with ledger, torch.autocast("cpu", torch.bfloat16):
            output = model(**make_batch())
        kept[policy] = ledger.current[OTHER]
        del output
        assert ledger.current[OTHER] < kept[policy] / 4  # what stays is autocast's and random states
    assert kept["full"] < kept["attention"] < kept["half"] < kept["none"]


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("training", "layers"), [("full", 2), ("lora", 2), ("frozen", 0)])
def test_towers_of_an_affinity_model_and_frozen_ones_are_left_alone(demo_encoders, training, layers):
    def compute(model, batch):
        return {"logits": model(**batch).logits}

    folders = [demo_encoders[1], demo_encoders[1]]
    stock, model = (make_affinity_model(folders, training).train() for _ in range(2))
    num = len(trained_layers(model))
    assert (num > 0) is (layers > 0)
    batch = make_affinity_batch(model, ROWS)
    expected = numbers(stock, batch=batch, compute=compute)
    for policy in ("attention", "full"):
        assert set_policy(model, policy) == num
        assert same(numbers(model, batch=batch, compute=compute), expected)
    unset_policy(model)
    assert recomputed_layers(model) == []


def test_frozen_models_and_unknown_policies():
    assert set_policy(make_esm().requires_grad_(False), "full") == 0
    with pytest.raises(ArgumentError, match="policy='most': allowed are none, half, attention, full"):
        set_policy(make(), "most")


MADE = {
    "Sequential": (Net, 4),
    "TransformerEncoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.2), 3), 3),
}


def make_plain(name):
    torch.manual_seed(0)
    return MADE[name][0]().train()


def plain_numbers(model, half=False):
    """Outputs and gradients of one pass, with the same random numbers every time."""
    torch.manual_seed(5)
    x = torch.randn(6, 5 if isinstance(model, Net) else 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        output = model(x if not isinstance(model, nn.TransformerEncoder) else x[None])
    states = output["logits"] if isinstance(output, dict) else output
    model.zero_grad()
    (states * torch.arange(states.numel()).view_as(states).sin()).sum().backward()
    return {"output": states.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", MADE)
def test_gradients_are_those_without_bit_for_bit_with_dropout(name, half):
    expected, num = plain_numbers(make_plain(name), half), MADE[name][1]
    for policy in POLICIES:
        model = make_plain(name)
        assert set_policy(model, policy) == {"none": 0, "half": -(-num // 2)}.get(policy, num)
        assert same(plain_numbers(model, half), expected), policy
        assert set(model.state_dict()) == set(make_plain(name).state_dict())


def test_nothing_is_computed_again_in_evaluation():
    calls, model = [], make_plain("Sequential").eval()
    set_policy(model, "full")
    model.trunk[0].norm.register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(2, 5))["logits"].sum().backward()
    assert calls == [1]
    model.train()(torch.randn(2, 5))["logits"].sum().backward()
    assert calls == [1] * 3  # once more, and again


def test_a_policy_is_replaced_undone_and_goes_with_copies_and_leaves_a_forward_that_was_there():
    model = make_plain("Sequential")
    own = MethodType(lambda self, x: x * 2, model.trunk[1])
    vars(model.trunk[1])["forward"] = own
    expected = plain_numbers(model)
    assert [set_policy(model, policy) for policy in ("full", "half", "attention")] == [4, 2, 4]
    twin = copy.deepcopy(model)
    assert twin.trunk[0].forward.__self__ is twin.trunk[0]
    assert same(plain_numbers(model), expected)
    assert same(plain_numbers(twin), expected)
    unset_policy(model)
    assert recomputed_layers(model) == []
    assert len(recomputed_layers(twin)) == 4
    assert vars(model.trunk[1])["forward"] is own
    assert "forward" not in vars(model.trunk[0])


def test_layers_before_which_nothing_trains_keep_nothing_and_are_left_out():
    model = make_plain("Sequential")
    for part in (model.stem, model.trunk[:2]):
        part.requires_grad_(False)
    # In the order of registration: the stem, the head, then the trunk.
    model.head.requires_grad_(False)
    assert trained_layers(model) == [*model.trunk[2:]]
    assert set_policy(model, "full") == 2
    assert set_policy(make_plain("Sequential").requires_grad_(False), "full") == 0
    assert set_policy(nn.Linear(2, 2), "full") == 0
    assert set_policy(resnet().train(), "full") == 5
