"""The repeated layers of any model, its blocks, read from its structure.

One answer for everything that goes block by block: compiled blocks, those that are computed again in the backward pass,
FSDP2's pieces (and what FSDP2 must leave whole or in float32), Muon's matrices, and the memory ledger.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..errors import ArgumentError
from .affinity import AffinityModel
from .head import RegressionHead
from .lora import unwrap_peft

FEED_FORWARD = "feed_forward_chunk"  # what blocks of ESM, BERT and their like call after their attention

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_STACKS = (PreTrainedModel, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)  # never one layer of many


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of `name_blocks`."""
    return [*name_blocks(model).values()]


def name_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated layers of a model under their full names, each once, in the model's order.

    From the outside in, these are:
    - in an `nn.ModuleList` or `nn.Sequential`, the members of a class of which two or more have parameters of the same
      names and shapes (what only some of them have, as T5's position bias, does not count);
    - a `ModuleList`'s only member, where it holds no repeated layers itself.
    Modules that attributes or an `nn.ModuleDict` hold (`block1`, `block2`) are not found.
    A lone linear layer, table or norm is no block (a list of heads), nor is a whole encoder or a `PreTrainedModel` (an
    ensemble). Of a `PreTrainedModel` the part under the task head is searched, of an `AffinityModel` its encoders.

    Args:
        model: any, under PEFT's wrapper or not.
    """
    found = {}
    for prefix, root in _roots(unwrap_peft(model)):
        for name, block in _walk(root, prefix):
            found[id(block)] = name, block
    return dict(found.values())


def block_lists(model: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """Maps full names to the lists whose every member is a block, in the model's order; none of a single attribute."""
    blocks = {id(block) for block in name_blocks(model).values()}
    return {
        name: module
        for name, module in unwrap_peft(model).named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) and all(id(m) in blocks for m in module)
    }


def block_parts(block: nn.Module) -> list[nn.Module]:
    """Returns what a block calls one after the other (attention, feed-forward): its children with matrices."""
    parts = []
    for child in block.children():
        if isinstance(child, _CONTAINERS):
            parts += block_parts(child)
        elif any(weight.dim() >= 2 for weight in child.parameters()):
            parts.append(child)
    return parts


def describe_blocks(blocks: list[nn.Module]) -> str:
    """Describes blocks for a line of the plan: `12 BertLayer`, or `2 T5Block and 4 SwinLayer`."""
    return " and ".join(f"{n} {name}" for name, n in Counter(type(block).__name__ for block in blocks).items())


def _roots(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yields prefix of names and module of what is searched."""
    if isinstance(inner, AffinityModel):
        for name, encoder in inner.encoders.items():
            yield f"encoders.{name}.", encoder
        return
    root = inner.base_model if isinstance(inner, PreTrainedModel) else inner
    name = next((name for name, module in inner.named_modules() if module is root), "")
    yield f"{name}." if name else "", root


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated(module)
    for name, child in module.named_children():
        if name in repeated:
            yield prefix + name, child
        else:
            yield from _walk(child, f"{prefix}{name}.")


def _repeated(module: nn.Module) -> set[str]:
    """Names of the children of `module` that repeat each other."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return set()
    children = {name: child for name, child in module.named_children() if _may_be_block(child)}
    if isinstance(module, nn.ModuleList) and len(module) == 1:
        return {name for name, child in children.items() if not [*_walk(child, "")]}
    # Of each class of which two agree in their parameters, all: also a first that takes another width.
    classes: dict[type, dict[str, dict[str, Any]]] = {}
    for name, child in children.items():
        classes.setdefault(type(child), {})[name] = _shapes(child)
    found: set[str] = set()
    for members in classes.values():
        shapes = [*members.values()]
        if any(_agree(one, other) for i, one in enumerate(shapes) for other in shapes[i + 1 : i + 3]):
            found |= members.keys()
    return found


def _agree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Returns whether two modules' parameters of the same name have the same shape, and most names are in both."""
    common = one.keys() & other.keys()
    if 2 * len(common) < min(len(one), len(other)):
        return False
    return all(one[name] == other[name] for name in common)


def _shapes(module: nn.Module) -> dict[str, Any]:
    """Returns shapes by name, without adapters, which only some layers may have; under ZeRO-3 whole shapes."""
    return {
        name.replace(".base_layer", ""): tuple(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in module.named_parameters()
        if "lora_" not in name
    }


def _may_be_block(module: nn.Module) -> bool:
    """Returns whether a module has weights, and is more than one linear layer, table or norm."""
    weights = [*module.parameters()]
    if isinstance(module, (*_STACKS, *_CONTAINERS)) or not weights:
        return False
    return any(True for _ in module.children()) or sum(p.dim() >= 2 for p in weights) >= 2


def block_classes(model: nn.Module) -> list[str]:
    """Returns class names of `find_blocks`, each once, in the model's order."""
    return list(dict.fromkeys(type(block).__name__ for block in find_blocks(model)))


def choose_classes(model: nn.Module, asked: list[str] | None) -> list[str]:
    """Chooses the classes to shard by: those asked for, else `block_classes`.

    Raises:
        ArgumentError: the model has no module of a class that was asked for.
    """
    if asked is None:
        return block_classes(model)
    there = {type(module).__name__ for module in model.modules()}
    if lacking := [name for name in asked if name not in there]:
        blocks = ", ".join(block_classes(model)) or "no repeated layers"
        raise ArgumentError(
            f"fsdp_transformer_layer_cls_to_wrap {', '.join(lacking)}: the model has no such module. Its layers are "
            f"{blocks}: name these, or leave the option out."
        )
    return list(asked)


def unused_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns trainable weights that no loss of ours or of transformers reaches: those of ESM's contact heads."""
    named = model.named_parameters()
    return {name: p for name, p in named if p.requires_grad and "contact_head" in name.split(".")}


def exact_modules(model: nn.Module) -> list[nn.Module]:
    """Returns modules that compute in the dtype of their weights, also where training is in half precision.

    Heads of an `AffinityModel`, which round predictions otherwise, and its frozen encoders, whose live embeddings are
    to agree with cached ones.
    """
    if not isinstance(model, AffinityModel):
        return []
    frozen = [
        encoder
        for encoder in model.encoders.values()
        if not any(parameter.requires_grad for parameter in encoder.parameters())
    ]
    heads = [module for module in model.modules() if isinstance(module, RegressionHead)]
    return [*frozen, *heads]


def find_base_layers(model: nn.Module) -> list[nn.Linear]:
    """Finds frozen float32 linear layers of encoders that have adapters, in their repeated layers.

    Without those of DoRA, whose norms are taken from the weights themselves, and quantised ones, which are no plain
    `nn.Linear`.
    """
    adapted: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    dora = {id(m.get_base_layer()) for m in adapted if getattr(m, "lora_magnitude_vector", None)}
    return [
        module
        for block in find_blocks(model)
        if any(isinstance(module, BaseTunerLayer) for module in block.modules())
        for module in block.modules()
        if type(module) is nn.Linear
        and id(module) not in dora
        and not module.weight.requires_grad
        and module.weight.dtype == torch.float32
    ]


# --- computed again in the backward pass ------------------------------------------------------------------------------


def recompute(model: nn.Module, parts: str, every_n_layers: int = 1) -> int:
    """Has parts of the blocks that train computed again in the backward pass: less is kept, all numbers stay.

    In the instances, within their hooks (FSDP2's run once); copies of the model take it along.

    Args:
        parts: "layers" (whole blocks), or of each its "attention" or "feed_forward": `FEED_FORWARD` where it has that,
            else those of `block_parts` whose class is called so, or not. A lone linear layer keeps nothing that would
            go.
        every_n_layers: of these blocks only each n-th.

    Returns:
        How many.
    """
    trained = [block for block in find_blocks(model) if any(p.requires_grad for p in block.parameters())]
    found = [method for block in trained[::every_n_layers] for method in _list_methods(block, parts)]
    for module, name in found:
        vars(module)[name] = partial(_compute_again, module, getattr(module, name))
    return len(found)


def find_recomputed(model: nn.Module) -> list[Any]:
    """Finds what `recompute` changed: modules and names of methods."""
    methods = ((module, name) for module in model.modules() for name in ("forward", FEED_FORWARD))
    return [(one, name) for one, name in methods if getattr(vars(one).get(name), "func", None) is _compute_again]


def keep_activations(model: nn.Module) -> None:
    """Takes back what `recompute` did."""
    for module, name in find_recomputed(model):
        method = vars(module).pop(name).args[1]
        if method != getattr(module, name):  # one that stood in the instance before
            vars(module)[name] = method


def _compute_again(module: nn.Module, method: Any, *args: Any, **kwargs: Any) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return method(*args, **kwargs)
    return checkpoint(partial(method, **kwargs), *args, use_reentrant=False)


def _list_methods(block: nn.Module, parts: str) -> list[Any]:
    if parts == "layers":
        return [(block, "forward")]
    if parts == "feed_forward" and hasattr(block, FEED_FORWARD):
        return [(block, FEED_FORWARD)]
    whole = [part for part in block_parts(block) if not isinstance(part, nn.Linear)]
    attending = [part for part in whole if re.search("attention|attn", type(part).__name__, re.I)]
    return [(part, "forward") for part in whole if (part in attending) == (parts == "attention")]
