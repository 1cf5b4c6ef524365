"""Layers whose forward is replaced by one that computes less: ESM's GELU and attention, the head at labels only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertForMaskedLM, EsmcForMaskedLM, EsmForMaskedLM
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.esm.modeling_esm import EsmIntermediate, EsmSelfAttention, eager_attention_forward

from ..data import locate_labels
from ..models import exact_loss, find_replaceable, has_loss_of, replace_forward, restore_forward, restore_forwards
from .base import OTHER_FORWARD, Context, Decision, Run, Settings, Speedup, applied, are_weights_split, skipped
from .compile import Compile

_DIVIDES = "accepts_loss_kwargs"  # tells Trainer to pass num_items_in_batch
HEADS = {EsmForMaskedLM: "lm_head", EsmcForMaskedLM: "lm_head", BertForMaskedLM: "cls"}  # what follows the encoder
# What a module has beside its weights, when calling it does more than its product.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class FusesEsm(Speedup):
    """Those that give modules of ESM another forward."""

    predicts = True
    family: type[nn.Module]

    def apply(self, decision: Decision, run: Run) -> Decision:
        """Fuses now, and in encoders that the model loads later."""
        if run.change_encoders(self.fuse) == 0:
            return skipped(OTHER_FORWARD)
        run.on_end(partial(restore_forwards, run.model, self.family))
        return decision

    def change(self, model: nn.Module, settings: Settings) -> None:
        """Fuses all of its layers."""
        self.fuse(model)

    def fuse(self, model: nn.Module) -> int:
        """Fuses the modules of `family` in `model`; returns how many. Weights are untouched."""
        raise NotImplementedError


class FusedGelu(FusesEsm):
    """One GELU kernel in ESM's feed-forward layers instead of five element-wise ones.

    Class I. Effect: `transformers` computes ESM's GELU as x * 0.5 * (1 + erf(x / sqrt(2))), with an intermediate of
    four times the hidden width per operation; torch's own GELU is the same function in one pass, and in training it
    keeps one of those intermediates instead of four. A comment in transformers warns that torch's GELU gave slightly
    other results; on ESM-2 8M in float32 the last hidden states differ by 6e-6 at most.
    On CPUs under bf16 autocast, where no gradient is kept, one operation of oneDNN has product, bias and GELU, rounded
    once; `fused_qkv` has its product by it too. It is tried on small numbers first; else torch's own compute.
    Remove when `EsmIntermediate` calls `torch.functional.gelu` (modeling_esm.py, transformers 5.24).
    """

    NAME = "fused_gelu"
    family = EsmIntermediate

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to models with ESM encoders."""
        problem = context.replicas or (None if "esm" in context.model.families else "no ESM encoder")
        if problem:
            return skipped(problem)
        return applied("ESM's feed-forward layers")

    def fuse(self, model: nn.Module) -> int:
        """Fuses as `fuse_gelu` does."""
        return fuse_gelu(model)


def fuse_gelu(model: nn.Module) -> int:
    """Makes every ESM feed-forward layer in `model` use torch's GELU; returns how many. Weights are untouched."""
    layers = find_replaceable(model, EsmIntermediate)
    for layer, _ in layers:
        replace_forward(layer, _gelu_forward)
    return len(layers)


def _gelu_forward(layer: Any, hidden_states: Tensor) -> Tensor:
    dense = layer.dense
    if _are_plain([dense]):
        return _linear(hidden_states, dense.weight, dense.bias, "gelu")
    return functional.gelu(dense(hidden_states))


def _linear(states: Tensor, weight: Tensor, bias: Tensor, then: str = "none") -> Tensor:
    """Computes a product with a bias, and torch's GELU where `then` is "gelu"; by oneDNN's operation where it may."""
    is_half = states.is_cpu and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    # torch's compiler takes the operation with constant weights only; autocast leaves float64 alone.
    is_other = torch.is_grad_enabled() or torch.compiler.is_compiling() or weight.dtype == torch.float64
    if is_half and not is_other and _has_operation():
        return torch.ops.mkldnn._linear_pointwise(*map(Tensor.bfloat16, (states, weight, bias)), then, [], "none")
    output = functional.linear(states, weight, bias)
    return functional.gelu(output) if then == "gelu" else output


@cache
def _has_operation() -> bool:
    """Tells whether torch has that private operation, it runs on this CPU, and computes small numbers as it should."""
    x = torch.ones(16, 16).tril().bfloat16()
    try:
        found = torch.ops.mkldnn._linear_pointwise(x, x, x[0], "gelu", [], "none")
    except (AttributeError, RuntimeError):
        return False
    return torch.allclose(found, functional.gelu(functional.linear(x, x, x[0])), 0.02)


class FusedQkv(FusesEsm):
    """Queries, keys and values of ESM-2 in one matrix product on CPUs, rotated in two passes over memory, not ten.

    Class I. Effect: the halves of queries and keys that a rotation mixes are put side by side, by the order in which
    rows of the weights are read, so that a rotation is a product of complex numbers, and so is its gradient; scores do
    not depend on that order. States are cast once instead of three times.
    Hardware: CPUs; on GPUs `compile` fuses the rotation with what stands beside it, and so it does on CPUs where it is
    on.
    Layers with adapters, hooks or a user's code on a projection compute as transformers does.
    Cost: the weights of a layer are copied in each pass.
    Remove when transformers lets a model take another rotation without the hub (`use_kernelized_func`, 5.24).
    """

    NAME = "fused_qkv"
    family = EsmSelfAttention

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to ESM encoders on CPUs, unless their blocks are compiled."""
        if "esm" not in context.model.families:
            return skipped("no ESM encoder")
        if context.hardware.kind != "cpu":
            return skipped(f"made for CPUs, not for {context.hardware.name}")
        if context.args.attention == "faesm":
            return skipped("faesm computes them")
        if are_weights_split(context.args):
            return skipped("FSDP and ZeRO bring the weights of a layer when it is called")
        if Compile().decide(context).status == "applied" or context.args.torch_compile:
            return skipped("compiled blocks fuse it")
        return applied("ESM's attention layers")

    def fuse(self, model: nn.Module) -> int:
        """Fuses as `fuse_qkv` does."""
        return fuse_qkv(model)


def fuse_qkv(model: nn.Module) -> int:
    """Makes every attention layer of ESM in `model` with rotary positions do so; returns how many. Weights stay."""
    layers = [layer for layer, _ in find_replaceable(model, EsmSelfAttention)]
    layers = [layer for layer in layers if layer.position_embedding_type == "rotary"]
    for layer in layers:
        replace_forward(layer, _attention_forward)
    return len(layers)


def _attention_forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    encoder_hidden_states: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    position_embeddings: Any = None,
    **kwargs: Any,
) -> Any:
    """Computes `EsmSelfAttention.forward`."""
    parts = (layer.query, layer.key, layer.value)
    if encoder_hidden_states is not None or not _are_plain(parts):
        others = (encoder_hidden_states, encoder_attention_mask, position_embeddings)
        return type(layer).forward(layer, hidden_states, attention_mask, *others, **kwargs)
    heads = layer.num_attention_heads
    size = layer.attention_head_size
    # Side by side, queries and keys interleaved: (..., width) -> (..., 3 * width).
    weight, bias = (_join([getattr(part, name) for part in parts], heads) for name in ("weight", "bias"))
    joined = _linear(hidden_states, weight, bias).unflatten(-1, (3, heads, size))
    rotated, value = joined.split([2, 1], -3)
    cos, sin = (part[..., None, : size // 2].float() for part in position_embeddings)
    turn = torch.complex(cos, sin)
    turns = torch.stack([turn * size**-0.5, turn], -3)  # ESM scales queries before the rotation
    pairs = torch.view_as_complex(rotated.float().unflatten(-1, (-1, 2)))
    query, key = torch.view_as_real(pairs * turns).flatten(-2).to(joined.dtype).unbind(-3)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(layer.config._attn_implementation, eager_attention_forward)
    states = (part.transpose(1, 2) for part in (query, key, value.squeeze(-3)))
    dropout = layer.dropout if layer.training else 0.0
    output, weights = attend(layer, *states, attention_mask, dropout=dropout, scaling=layer.scaling, **kwargs)
    return output.reshape(*hidden_states.shape[:-1], -1).contiguous(), weights


def _are_plain(parts: Sequence[nn.Module]) -> bool:
    """Returns whether calling these is their product with a bias and no more."""
    if any(type(part) is not nn.Linear or part.bias is None for part in parts):
        return False
    return not any("forward" in vars(part) or any(getattr(part, name) for name in _HOOKS) for part in parts)


def _join(parts: Sequence[Tensor], heads: int) -> Tensor:
    """Joins rows of three: of the first two, the halves of each head in turn."""
    query, key, value = parts
    return torch.cat(
        [*(part.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2) for part in (query, key)), value]
    )


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

    def decide_wanted(self, context: Context) -> Decision:
        """Applies to the masked language models of `HEADS`, unless the loss is someone else's."""
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
