"""What a layer keeps for its backward pass and what it computes again, as policies.

They act in layers of transformers that know how to be computed again, and else through torch's checkpoint around each
block (`blocks.py`), with the same contexts. transformers' own switch is not thrown: it also asks the inputs of frozen
layers for gradients, and gives T5's cross-attention a mask with one, for which torch has another kernel.

`attention` keeps what attention puts out, which is dear to compute and small, by naming operations to torch's selective
checkpointing. The numbers are those without: random states are restored before a layer is computed again, and an
operation that draws itself (attention with dropout) is always computed again, since what is drawn after it would shift.
One exception: under autocast, gradients of a weight that a pass uses twice are added in float32, not in half precision.

Source: torch.utils.checkpoint.create_selective_checkpoint_contexts; `activation_checkpointing_enable` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import ArgumentError
from .blocks import find_blocks
from .cpu_attention import keeping_no_weights
from .lora import unwrap_peft

Policy = Literal["none", "half", "attention", "full"]
POLICIES: tuple[Policy, ...] = get_args(Policy)  # least computed again first

# By name, so that packages that register some of them (flash-attn) need not be there.
ATTENTION = frozenset(
    {
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        *("aten::_scaled_dot_product_fused_attention_overrideable", "aten::_efficient_attention_forward"),
        *("aten::_flash_attention_forward", "torch_attn::_varlen_attn", "hf_ext::blocked_attention"),
        *("flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    }
)
_OWN = "recomputed_by_hf_ext"  # in a layer that is no `GradientCheckpointingLayer`: options, and the forward it had


def set_policy(model: nn.Module, policy: Policy) -> int:
    """Makes a model's layers compute again in the backward pass what `policy` does not keep, while they train.

    Of a `PreTrainedModel` that can, in those layers that transformers would take; of any other model, and
    by `model.block_pattern`, around the forward of each block.

    Args:
        model: any, or one with adapters of PEFT.
        policy: `none` keeps everything; `half` all of every second layer; `attention` what attention puts out; `full`
            what goes into each layer. Replaces the one before.

    Returns:
        Number of layers that compute something again; 0 where the model has none that can.

    Raises:
        ArgumentError: an unknown policy.

    Cost: that share of a forward pass per step; about 20 microseconds per operation for those that name operations.
    """
    if policy not in POLICIES:
        raise ArgumentError(f"policy={policy!r}: allowed are {', '.join(POLICIES)}.")
    unset_policy(model)
    if policy == "none":
        return 0
    given: dict[str, Any] = {"use_reentrant": False}
    if policy == "attention":
        given["context_fn"] = _contexts
    layers = trained_layers(model)[:: 2 if policy == "half" else 1]
    for layer in layers:
        _recompute_layer(layer, given)
    return len(layers)


def _recompute_layer(layer: Any, given: dict[str, Any]) -> None:
    """One layer; those of transformers know how, and leave their cache out."""
    if isinstance(layer, GradientCheckpointingLayer):
        layer.gradient_checkpointing = True
        vars(layer)["_gradient_checkpointing_func"] = partial(checkpoint, **given)
        return
    # In the instance, as packing has it: names of modules and weights stay, and copies take it along.
    vars(layer)[_OWN] = (given, vars(layer).get("forward"))
    vars(layer)["forward"] = MethodType(_forward_and_again, layer)


def _forward_and_again(layer: Any, *args: Any, **kwargs: Any) -> Any:
    given, replaced = vars(layer)[_OWN]
    plain = replaced or partial(type(layer).forward, layer)
    if not (layer.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    return checkpoint(partial(plain, **kwargs), *args, **given)


def unset_policy(model: nn.Module) -> None:
    """Lets every layer of `model` keep what its backward pass reads."""
    inner: Any = unwrap_peft(model)
    if _supports(inner) and inner.is_activation_checkpointing:
        inner.activation_checkpointing_disable()
    for layer in model.modules():
        if _OWN in vars(layer):
            _, replaced = vars(layer).pop(_OWN)
            vars(layer).pop("forward")
            if replaced is not None:
                vars(layer)["forward"] = replaced
        elif isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            layer.gradient_checkpointing = False


def is_recomputed(module: nn.Module) -> bool:
    """Whether a module computes something again in the backward pass, as a whole."""
    return _OWN in vars(module) or bool(getattr(module, "gradient_checkpointing", False))


def trained_layers(model: nn.Module) -> list[Any]:
    """Layers that can be computed again, in their order; none of encoders that do not train at all.

    Those that transformers would take, where it can; else `find_blocks`, but for those before which nothing trains.
    """
    inner = unwrap_peft(model)
    left_out = _frozen_parts(inner)
    if getattr(model, "block_pattern", None) is None and _supports(inner):
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        return [layer for layer in layers if layer not in left_out]
    untrained: set[int] = set()
    for weight in inner.parameters():
        if weight.requires_grad:
            break
        untrained.add(id(weight))
    return [
        block
        for block in find_blocks(model)
        if block not in left_out and not all(id(weight) in untrained for weight in block.parameters())
    ]


def _frozen_parts(model: nn.Module) -> set[nn.Module]:
    """All modules of those `PreTrainedModel`s in `model` that do not train."""
    encoders = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    frozen = [part for part in encoders if not any(weight.requires_grad for weight in part.parameters())]
    return {module for part in frozen for module in part.modules()}


def _supports(model: Any) -> bool:
    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and layers


@contextmanager
def _recording(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """A context of torch's selective checkpointing, inside which our attention keeps no weights either.

    Nor does autocast keep its copies of weights: a weight that a layer uses a second time (one encoder for two inputs)
    would not be cast in the forward pass and be cast when computed again, where torch counts operations.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with keeping_no_weights(), mode:
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What a layer computes under: in the forward pass, and when it is computed again."""
    first, again = create_selective_checkpoint_contexts(_decide)
    return _recording(first), _recording(again)


def _decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation.name().split(".")[0] in ATTENTION and not _draws(operation, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers: it has dropout, above 0."""
    schema = getattr(operation, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.name == "dropout_p":
            return bool(args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value))
    return False
