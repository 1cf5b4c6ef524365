"""Batches for a tiny ESM-2 with any head, and its outputs and gradients side by side with a twin's."""

import copy

import torch
from closeness import largest
from miniature_esm import MASK, PAD, make_wide_esm
from torch import nn
from transformers import PreTrainedModel

CLS, EOS = 0, 2
# Two padded proteins: 6 and 4 tokens with <cls> and <eos>.
IDS = torch.tensor([[CLS, 5, 6, 7, 8, EOS], [CLS, 9, 10, EOS, PAD, PAD]])
MASKED_IDS = torch.tensor([[CLS, 5, MASK, 7, MASK, EOS], [CLS, MASK, 10, EOS, PAD, PAD]])
PADDING_MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
# Hides a residue inside the first protein and the first token of the second; pad tokens of the second are attended to.
CALLERS_MASK = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0]])

BATCHES = {
    "padded": {"input_ids": IDS, "attention_mask": PADDING_MASK},
    "masked tokens": {"input_ids": MASKED_IDS, "attention_mask": PADDING_MASK},
    "caller's mask": {"input_ids": IDS, "attention_mask": CALLERS_MASK},
    "no mask": {"input_ids": IDS},
    "left padding": {"input_ids": IDS.flip(1), "attention_mask": PADDING_MASK.flip(1)},
    "caller's positions": {
        "input_ids": IDS,
        "attention_mask": PADDING_MASK,
        "position_ids": torch.tensor([[0, 2, 4, 6, 8, 10], [3, 4, 5, 9, 0, 0]]),
    },
}


def make_esm(*given, **settings) -> PreTrainedModel:
    """`make_wide_esm`, evaluating."""
    return make_wide_esm(*given, **settings).eval()


def run_esm(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outputs at attended tokens, (tokens, width), and the gradient of every parameter that has one."""
    model.zero_grad()
    output = model(**batch)[0]
    attended = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    values = output[attended]
    # A plain sum of the states after a LayerNorm is constant, so every value gets a weight of its own.
    weights = torch.linspace(-1, 1, values.numel(), device=values.device).sin().view_as(values)
    (values.float() * weights).sum().backward()
    return values.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(model: nn.Module, other: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Between two models: of outputs and of gradients, each relative to the largest value."""
    (values, grads), (other_values, other_grads) = run_esm(model, batch), run_esm(other, batch)
    assert grads.keys() == other_grads.keys()
    assert len(grads) >= 34  # 2 layers x 16 parameters and the final LayerNorm's 2
    scale = largest(grad.abs().max() for grad in other_grads.values())
    worst = largest((grads[name] - other_grads[name]).abs().max() for name in grads)
    return largest([worst / scale, (values - other_values).abs().max() / other_values.abs().max()])


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model and an independent copy of it."""
    return model, copy.deepcopy(model)
