"""The masked-LM head on the tokens that have a label, not on all.

Class I. Effect: with 15 % of the tokens masked, ESM's head (a hidden layer, a norm, the vocabulary) computes 15 % of
its rows in training; logits at other tokens never enter the loss. In evaluation, and without labels, the model is as it
was. The loss is the sum over labelled tokens / `num_items_in_batch`, so it stays exact under accumulation.
Cost: training outputs carry no `logits`.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn
from transformers import EsmForMaskedLM
from transformers.modeling_outputs import MaskedLMOutput

from ..models.exact_loss import IGNORED, exact_loss
from .base import Context, Decision, Kind, Run, off

NAME = "masked_lm_head"
KIND: Kind = "I"


def decide(context: Context) -> Decision:
    """Applies to ESM's masked language model, unless the loss is someone else's."""
    if not context.wants(NAME, KIND):
        return off(NAME, KIND)
    if "EsmForMaskedLM" not in context.model.classes:
        return Decision(NAME, KIND, "skipped", "no masked-LM head of ESM")
    if context.args.label_smoothing_factor:
        return Decision(NAME, KIND, "skipped", "--label_smoothing_factor needs all logits")
    return Decision(NAME, KIND, "applied", "computed where there is a label")


def apply(decision: Decision, run: Run) -> Decision:
    """Changes every such head in the model."""
    return decision.with_evidence(heads=label_only(run.model))


def label_only(model: nn.Module) -> int:
    """Makes each `EsmForMaskedLM` in `model` compute its head at labelled tokens in training; returns how many."""
    heads = [module for module in model.modules() if isinstance(module, EsmForMaskedLM)]
    for head in heads:
        head.__dict__["forward"] = MethodType(_forward, head)
        head.__dict__["accepts_loss_kwargs"] = True  # tells Trainer to pass num_items_in_batch
    return len(heads)


def _forward(
    model: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    position_ids: Any = None,
    inputs_embeds: Any = None,
    labels: Any = None,
    num_items_in_batch: Any = None,
    **kwargs: Any,
) -> Any:
    inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "inputs_embeds": inputs_embeds, **kwargs}
    if labels is None:
        return type(model).forward(model, input_ids, **inputs)
    if not model.training:  # Trainer expects the loss over all processes here too
        output = type(model).forward(model, input_ids, **inputs)
        loss = exact_loss("tokens", model.config, output.logits, labels, num_items_in_batch)
        return MaskedLMOutput(**{**output, "loss": loss})
    states = model.esm(input_ids, **inputs)[0]
    is_labelled = labels.ne(IGNORED)
    logits = model.lm_head(states[is_labelled])
    loss = exact_loss("tokens", model.config, logits, labels[is_labelled], num_items_in_batch)
    return MaskedLMOutput(loss=loss)
