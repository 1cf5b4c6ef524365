"""Layers whose forward is replaced by one that computes less: ESM's GELU in one kernel, the head at labels only."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import BertForMaskedLM, EsmcForMaskedLM, EsmForMaskedLM
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.esm.modeling_esm import EsmIntermediate

from ..data import locate_labels
from ..models import exact_loss, find_replaceable, has_loss_of, replace_forward, restore_forward, restore_forwards
from .base import OTHER_FORWARD, Context, Decision, Run, Settings, Speedup, applied, off, skipped

_DIVIDES = "accepts_loss_kwargs"  # tells Trainer to pass num_items_in_batch
HEADS = {EsmForMaskedLM: "lm_head", EsmcForMaskedLM: "lm_head", BertForMaskedLM: "cls"}  # what follows the encoder


class FusedGelu(Speedup):
    """One GELU kernel in ESM's feed-forward layers instead of five element-wise ones.

    Class I. Effect: `transformers` computes ESM's GELU as x * 0.5 * (1 + erf(x / sqrt(2))), with an intermediate of
    four times the hidden width per operation; torch's own GELU is the same function in one pass, and in training it
    keeps one of those intermediates instead of four. A comment in transformers warns that torch's GELU gave slightly
    other results; on ESM-2 8M in float32 the last hidden states differ by 6e-6 at most.
    Remove when `EsmIntermediate` calls `torch.nn.functional.gelu` (modeling_esm.py, transformers 5.24).
    """

    NAME = "fused_gelu"
    predicts = True

    def decide(self, context: Context) -> Decision:
        """Applies to models with ESM encoders."""
        if not self.wanted(context):
            return off()
        problem = context.replicas or (None if "esm" in context.model.families else "no ESM encoder")
        if problem:
            return skipped(problem)
        return applied("ESM's feed-forward layers")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Fuses now, and in encoders that the model loads later."""
        if run.change_encoders(fuse_gelu) == 0:
            return skipped(OTHER_FORWARD)
        run.on_end(partial(restore_forwards, run.model, EsmIntermediate))
        return decision

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Fuses all of its layers."""
        fuse_gelu(model)


def fuse_gelu(model: nn.Module) -> int:
    """Makes every ESM feed-forward layer in `model` use torch's GELU; returns how many. Weights are untouched."""
    layers = find_replaceable(model, EsmIntermediate)
    for layer, _ in layers:
        replace_forward(layer, _gelu_forward)
    return len(layers)


def _gelu_forward(layer: EsmIntermediate, hidden_states: torch.Tensor) -> torch.Tensor:
    return nn.functional.gelu(layer.dense(hidden_states))


class MaskedLMHead(Speedup):
    """The masked-LM head on the tokens that have a label, not on all.

    Class I. Effect: with 15 % of the tokens masked, the head (a hidden layer, a norm, the vocabulary) computes 15 % of
    its rows in training; logits at other tokens never enter the loss. In evaluation, and without labels, the model is
    as it was. The loss is the sum over labelled tokens / `num_items_in_batch`, so it stays exact under accumulation.
    Models: those of ESM-2, ESM C and BERT.
    Where labels stand comes with the batches of `MaskedLMCollator`; from those of other collators it is read.
    Cost: training outputs carry no `logits`; on a GPU one read from the device per pass where it is read.
    """

    NAME = "masked_lm_head"

    def decide(self, context: Context) -> Decision:
        """Applies to the masked language models of `HEADS`, unless the loss is someone else's."""
        if not self.wanted(context):
            return off()
        known = [model.__name__ for model in HEADS]
        if context.replicas:
            return skipped(context.replicas)
        if not set(known) & set(context.model.classes):
            return skipped(f"the model is none of {', '.join(known)}")
        if context.args.label_smoothing_factor:
            return skipped("--label_smoothing_factor needs all logits")
        return applied("computed where there is a label")

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Changes every such model in the run's, until the run ends; none where a user's loss may need the logits."""
        if run.own_loss is not None:
            return skipped(f"the loss is the user's own ({run.own_loss}) and may need all logits")
        heads = label_only(run.model)
        if not heads:
            return skipped("its forward or loss_function is not that of transformers")
        run.on_end(partial(all_tokens, run.model))
        run.ask_layout(locates_labels=True)
        return decision.with_evidence(heads=heads)

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Makes its heads compute at labelled tokens in training."""
        label_only(model)


def label_only(model: nn.Module) -> int:
    """Makes each masked language model in `model` compute its head at labelled tokens in training; returns how many.

    Those whose forward or loss is the user's own are left alone.
    """
    found = [
        (masked_lm, family) for masked_lm, family in find_replaceable(model, *HEADS) if has_loss_of(masked_lm, family)
    ]
    for masked_lm, family in found:
        replace_forward(masked_lm, _label_only_forward(family))
        vars(masked_lm)[_DIVIDES] = True
    return len(found)


def all_tokens(model: nn.Module) -> None:
    """Gives each of them its own forward back."""
    for module in model.modules():
        if isinstance(module, tuple(HEADS)) and vars(module).pop(_DIVIDES, False):
            restore_forward(module)


def _label_only_forward(family: Any) -> Any:
    """Makes the forward of one class, with its signature: the names tell Trainer which columns of the data to keep."""
    takes = signature(family.forward)
    head = HEADS[family]

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        given = takes.bind(model, *args, **kwargs).arguments
        labels = given.get("labels")
        if labels is None or not model.training:
            kwargs.pop("num_items_in_batch", None)
            return family.forward(model, *args, **kwargs)
        inputs = {name: value for name, value in given.items() if name not in ("self", "labels", "kwargs")}
        inputs |= given.get("kwargs", {})
        num_items = inputs.pop("num_items_in_batch", None)
        outputs = model.base_model(**{**inputs, "return_dict": True})
        labelled = _locate(labels, inputs.get("layout"))
        logits = getattr(model, head)(outputs.last_hidden_state.flatten(0, 1).index_select(0, labelled))
        loss = exact_loss("tokens", model.config, logits, labels.flatten().index_select(0, labelled), num_items)
        return MaskedLMOutput(loss=loss, hidden_states=outputs.hidden_states, attentions=outputs.attentions)

    forward.__signature__ = takes  # type: ignore[attr-defined]
    return forward


def _locate(labels: Any, layout: Any) -> Any:
    """Finds where labels stand in the flattened rows, as the batch says, or read from them."""
    known = None if layout is None or layout.shape != tuple(labels.shape) else layout.labelled
    return locate_labels(labels) if known is None else known.to(labels.device)
