"""torch's GELU in ESM's feed-forward layers gives what transformers' own formula gives."""

import copy
from functools import partial

import pytest
import torch
from closeness import largest
from miniature_esm import make_wide_esm
from torch import nn
from transformers import EsmModel
from transformers.models.esm.modeling_esm import EsmIntermediate

from hf_ext.speedups.fused_layers import fuse_gelu
from hf_ext.trainer import FastTrainer
from hf_ext.training_args import FastTrainingArguments

IDS = torch.tensor([[0, 5, 6, 7, 8, 2], [0, 9, 10, 2, 1, 1]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


@pytest.fixture(scope="module")
def stock() -> EsmModel:
    return make_wide_esm(partial(EsmModel, add_pooling_layer=False), token_dropout=False).eval()


def run_model(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Last hidden states, and the gradient of a loss on them for every parameter that has one."""
    model.zero_grad()
    states = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    weights = (
        torch.linspace(-1, 1, states.numel()).sin().view_as(states)
    )  # a sum of squares is constant after LayerNorm
    (states * weights)[MASK.bool()].sum().backward()
    return states.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Of hidden states and of gradients, each relative to the largest one."""
    (states, grads), (other_states, other_grads) = run_model(model), run_model(other)
    assert len(grads) == len(other_grads) > 20
    scale = largest(grad.abs().max() for grad in other_grads)
    worst = largest((a - b).abs().max() for a, b in zip(grads, other_grads))
    return largest([worst / scale, (states - other_states).abs().max() / other_states.abs().max()])


def test_hidden_states_and_gradients_equal_stock_esm(stock):
    fused = copy.deepcopy(stock)
    assert fuse_gelu(fused) == 2
    assert largest_difference(fused, stock) < 1e-5


def test_the_comparison_tells_a_tanh_gelu_apart(stock):
    broken = copy.deepcopy(stock)
    for layer in broken.modules():
        if isinstance(layer, EsmIntermediate):
            layer.forward = lambda x, layer=layer: nn.functional.gelu(layer.dense(x), approximate="tanh")
    assert largest_difference(broken, stock) > 1e-5


def test_fewer_operations_run_and_stock_layers_stay_as_they_were(stock):
    def count_erf(model):
        with torch.profiler.profile() as profile, torch.no_grad():
            model(input_ids=IDS, attention_mask=MASK)
        calls = {event.key: event.count for event in profile.key_averages()}
        return calls.get("aten::erf", 0), calls.get("aten::gelu", 0)

    fused = copy.deepcopy(stock)
    fuse_gelu(fused)
    assert count_erf(fused) == (0, 2)
    assert count_erf(stock) == (2, 0)


def test_after_end_the_users_model_computes_as_before_and_loads_encoders_as_they_are(tmp_path, make_affinity):
    model, collator = make_affinity()
    args = FastTrainingArguments(str(tmp_path), speedups=["fused_gelu"], use_cpu=True, report_to="none")
    trainer = FastTrainer(model, args, data_collator=collator)
    assert trainer.plan.applied("fused_gelu")

    def fused():
        model.attach_encoders()
        found = ["forward" in m.__dict__ for m in model.modules() if isinstance(m, EsmIntermediate)]
        model.release_encoders()
        return found

    assert fused() == [True, True]
    trainer.end()
    assert fused() == [False, False]
    model.attach_encoders()
    again = FastTrainer(model, args, data_collator=collator)
    assert [("forward" in m.__dict__) for m in model.modules() if isinstance(m, EsmIntermediate)] == [True, True]
    again.end()
    assert [("forward" in m.__dict__) for m in model.modules() if isinstance(m, EsmIntermediate)] == [False, False]
