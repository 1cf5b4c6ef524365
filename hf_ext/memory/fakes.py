"""A small copy of a model that has shapes and no memory: a few of its layers, on torch's fake tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..data import BatchLayout, VarlenLayout
from ..models import block_lists, find_base_layers, find_encoders, is_packed, narrow, pack_encoders

HALF = torch.bfloat16  # float16 takes as much


@dataclass(frozen=True)
class LayerSlice:
    """A list of repeated layers, and how many of them a copy keeps.

    Attributes:
        layers: the whole model's.
        kept: `first`, one that stands for all in the middle, and one at the end; all where they differ.
        name: of the list in the model; not needed where all are kept.
    """

    layers: nn.ModuleList | nn.Sequential
    kept: int
    first: int = 1
    name: str = ""

    @property
    def copies(self) -> int:
        """How often the middle stands for itself in the whole model."""
        return 1 + len(self.layers) - self.kept


def slice_layers(model: nn.Module) -> list[LayerSlice]:
    """Chooses what is kept of each list of `block_lists`: it stands for the whole, whatever its depth."""
    slices = []
    for name, layers in block_lists(model).items():
        # What goes into the first layer is held by the caller; where layers keep nothing else, that would count.
        first = 1 if any(parameter.requires_grad for parameter in layers.parameters()) else 2
        kept = first + 2 if first + 2 < len(layers) and _alike(layers) else len(layers)
        slices.append(LayerSlice(layers, kept, first, name))
    return slices


def _alike(layers: nn.ModuleList | nn.Sequential) -> bool:
    """Returns whether all layers but the first (T5's has the position bias) have the same weights, training the same.

    None of them is in the list twice, and a list that computes by itself does it as `nn.Sequential`.
    """
    if len({id(layer) for layer in layers}) < len(layers):
        return False
    if isinstance(layers, nn.Sequential) and type(layers) is not nn.Sequential:
        return False
    seen = {
        tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
        for layer in list(layers)[1:]
    }
    return len(seen) <= 1 and len({type(layer) for layer in layers}) <= 1


def copy_as_fake(model: nn.Module, slices: list[LayerSlice], is_narrow: bool = False) -> nn.Module:
    """Copies a model with the layers that `slices` keep, its weights fake tensors on the CPU.

    To be called in a fake mode.

    What was changed on the model (attention, packing, adapters, a fused GELU) is changed on the copy. Not for
    compiled layers, whose code is no part of the module.

    Args:
        is_narrow: frozen layers beside adapters are stored in half precision.

    Raises:
        TypeError, RuntimeError: the model holds what cannot be copied.

    Cost: some milliseconds; no weight is read.
    """
    memo: dict[int, Any] = {}
    dropped = [layer for piece in slices for layer in list(piece.layers)[piece.kept :]]
    left_out = {id(module) for layer in dropped for module in layer.modules()}
    for module in model.modules():
        if id(module) not in left_out:
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and id(tensor) not in memo:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                memo[id(hooks)] = OrderedDict((key, hook) for key, hook in hooks.items() if _computes(hook))
    for piece in slices:
        if piece.kept < len(piece.layers):
            members = [copy.deepcopy(layer, memo) for layer in list(piece.layers)[: piece.kept]]
            in_turn = isinstance(piece.layers, nn.Sequential)
            memo[id(piece.layers)] = nn.Sequential(*members) if in_turn else nn.ModuleList(members)
    made = copy.deepcopy(model, memo)
    if is_narrow:
        narrow(find_base_layers(made), HALF)
    return made


def _computes(hook: object) -> bool:
    """Returns whether a hook is part of what the model computes.

    Others count or time what passes, and shall not see this.
    """
    return str(getattr(hook, "__module__", "")).split(".")[0] in ("transformers", "peft")


def fake_batch(mode: FakeTensorMode, value: object) -> Any:
    """Makes every tensor in the batch a fake one; numbers, layouts of packed rows and the like stay readable."""
    if isinstance(value, Tensor):
        return mode.from_tensor(value.cpu()) if value.device.type != "meta" else torch.empty_like(value, device="cpu")
    if isinstance(value, dict):
        return {name: fake_batch(mode, part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: fake_batch(mode, getattr(value, field.name)) for field in fields(value) if field.init}
        return replace(value, **parts)
    return value


def give_layouts(model: nn.Module) -> None:
    """Tells packed encoders of a fake copy that every row is full: the mask, where they would read it, is empty."""
    for encoder in find_encoders(model):
        if is_packed(encoder):
            pack_encoders(encoder)  # without filling up
            encoder.__dict__["forward"] = partial(_call_full, encoder.forward)


def _call_full(packed: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
    layout = fake_batch(input_ids.fake_mode, _full_rows(*input_ids.shape))
    return packed(input_ids, *args, **{**kwargs, "layout": layout})


@lru_cache(maxsize=8)
def _full_rows(rows: int, width: int) -> BatchLayout:
    with unset_fake_temporarily(), torch.device("cpu"):
        return BatchLayout((rows, width), VarlenLayout.from_mask(torch.ones(rows, width, dtype=torch.long)))


# Functions that autocast computes in float32 on CUDA and leaves in half precision on a CPU, of those that encoders
# call (https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32").
_EXACT_NAMES = (
    *("layer_norm", "softmax", "log_softmax", "cross_entropy", "mse_loss", "smooth_l1_loss", "softplus"),
    *("exp", "log", "pow", "rsqrt", "sum", "cumsum"),
)
_EXACT_ON_CUDA = {
    getattr(place, name) for place in (functional, torch, Tensor) for name in _EXACT_NAMES if hasattr(place, name)
}


class _CudaRule(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _EXACT_ON_CUDA and torch.is_autocast_enabled("cpu"):
            args = tuple(_widened(arg) for arg in args)
        return function(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    is_half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def autocast_rule(kind: str) -> AbstractContextManager[Any]:
    """Makes autocast on CPU tensors compute as that of a device of `kind`; backward must be inside of it too."""
    return nullcontext() if kind == "cpu" else _CudaRule()
