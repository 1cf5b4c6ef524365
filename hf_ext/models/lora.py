"""LoRA: small matrices that train beside frozen linear layers. Settings, targets per family, adding, merging.

PEFT does the work; what stands here is which layers it gets, what a merged model looks like, and the frozen weights
beside adapters in half precision: autocast rounds a float32 weight at every use and keeps the rounded copy until the
backward pass, 6 bytes per frozen weight. Stored rounded, it takes 2, and the products are bit for bit the same.
Source: Hu et al., arXiv:2106.09685.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ..errors import ArgumentError
from ..optional import require
from .families import FAMILIES

logger = logging.getLogger(__name__)

LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class LoraSettings:
    """Options of `peft.LoraConfig` that the command line offers.

    Args:
        r: rank of the update, at least 1.
        alpha: the update is multiplied by alpha / r.
        dropout: probability in [0, 1), before the first matrix.
        target_modules: names of linear layers, as the last parts of their full names; None means by family.
        kwargs: other arguments of `LoraConfig`, such as `use_dora` or `use_rslora`.

    Raises:
        ArgumentError: a rank or scale below 1, a dropout outside [0, 1), or no such argument of `LoraConfig`.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: list[str] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("r", "alpha"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"lora_{name}={getattr(self, name)}: must be at least 1.")
        if not 0 <= self.dropout < 1:
            raise ArgumentError(f"lora_dropout={self.dropout}: must be at least 0 and below 1.")
        if unknown := sorted(self.kwargs.keys() - LoraConfig.__dataclass_fields__.keys()):
            raise ArgumentError(f"lora_kwargs: peft.LoraConfig has no {', '.join(unknown)}.")


def add_adapters(encoder: nn.Module, settings: LoraSettings) -> None:
    """Puts adapters into an encoder, in place; they start as zero, so that its output does not change.

    Raises:
        ArgumentError: as `find_targets`.
    """
    inject_adapter_in_model(_lora_config(encoder, settings), encoder)


def wrap_with_lora(model: nn.Module, settings: LoraSettings) -> PeftModel:
    """Wraps `model`, changed in place, in a `PeftModel` in which adapters and its new heads train and nothing else.

    The encoder's linear layers get adapters. Heads that a pretrained checkpoint lacks (`classifier`) train in full and
    are saved with the adapters; a pretrained language-model head stays frozen.

    Raises:
        ArgumentError: as `find_targets`; or a head's name ends the name of another module, which PEFT would train too.
    """
    return get_peft_model(model, _lora_config(model, settings, find_heads(model)))


def find_targets(model: nn.Module, settings: LoraSettings) -> list[str]:
    """Finds the full names of the linear layers to adapt: those of the encoder, without heads and poolers.

    GPT-2's `Conv1D` is one. Of a model type that `FAMILIES` lacks, and without names: all in layers that repeat.

    Raises:
        ArgumentError: a named target matches nothing; or none are named, and the model has no configuration or no
            linear layer in what repeats.
    """
    inside = set(getattr(model, "base_model", model).modules())
    linear = [name for name, module in model.named_modules() if isinstance(module, LINEAR) and module in inside]
    linear = [name for name in linear if "pooler" not in name.split(".")]
    leaves = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear}))
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    known = FAMILIES[model_type].lora_targets if model_type in FAMILIES else ()
    matches = {t: [n for n in linear if f".{n}".endswith(f".{t}")] for t in settings.target_modules or known}
    unmatched = [target for target, names in matches.items() if not names]
    if settings.target_modules and unmatched:
        raise ArgumentError(f"--lora_target_modules {unmatched}: no such linear layer; there are {leaves}.")
    if matches:
        return [name for name in linear if any(name in names for names in matches.values())]
    repeated = [name for name in linear if any(part.isdigit() for part in name.split("."))]  # encoder.layer.0...
    if model_type is None or not repeated:
        raise ArgumentError(
            f"LoRA targets are known for {', '.join(FAMILIES)} and for layers that repeat in other models of "
            f"transformers; this {type(model).__name__} has none: name the linear layers to adapt, with "
            f"--lora_target_modules; there are {leaves or 'none'}."
        )
    return repeated


def find_heads(model: nn.Module) -> list[str]:
    """Names of the modules beside the encoder that a pretrained checkpoint lacks, so that they must train in full.

    Raises:
        ArgumentError: a head's name ends the name of another module: PEFT selects by the end of names.
    """
    base = getattr(model, "base_model", model)
    if base is model:
        return []
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = []
    for name, child in model.named_children():
        is_own = child is not base and all(module is not output for module in child.modules())
        if is_own and any(True for _ in child.parameters()):
            heads.append(name)
    for head in heads:
        others = [name for name, _ in model.named_modules() if name.endswith(head) and name != head]
        if others:
            raise ArgumentError(f"Head {head!r} would also select {others}: rename it, PEFT compares the end of names.")
    return heads


def unwrap_peft(model: Any) -> Any:
    """Returns the model under PEFT's wrapper, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def require_base(name: str | None) -> None:
    """Refuses adapters beside weights that are nowhere but in memory: a saved model would lack them.

    Args:
        name: folder or Hub id that those weights were read from; None or "" of a new model.

    Raises:
        ArgumentError: there is none.
    """
    if not name:
        raise ArgumentError(
            "--use_peft: a saved model would be the adapters alone, and the weights beside them are new here and kept "
            "nowhere. Leave it out, or start from a model that was saved or is on the Hub."
        )


def has_adapters(model: nn.Module | None) -> bool:
    """Returns whether PEFT layers are in the model, wherever they are."""
    return model is not None and any(isinstance(module, BaseTunerLayer) for module in model.modules())


def merge_layers(model: nn.Module) -> int:
    """Adds each adapter to the weight beside it and puts the plain layer back, in place; returns how many.

    For adapters that `add_adapters` put in; a `PeftModel` has `merge_and_unload`.

    Raises:
        ValueError: from PEFT, if a merged weight is not finite.
    """
    widen(model)
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge(safe_merge=True)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
    return len(layers)


def merged_copy(model: Any) -> Any:
    """Returns a copy of a `PeftModel`, or of a model with `merge_adapters`, with adapters merged into the weights.

    Predictions are the same up to rounding (1e-5 in float32). A base that `lora_base` stored in half precision is
    merged in float32, on the CPU: that of an `AffinityModel` read again from its encoder, of others as it was rounded.
    Cost: memory for a second copy of the model.

    Raises:
        ArgumentError: there are no adapters to merge.
    """
    if not has_adapters(model):
        raise ArgumentError(f"{type(model).__name__} has no adapters to merge: train with --use_peft.")
    twin = copy.deepcopy(model)
    if is_rounded(twin):  # float32 may not fit beside the model on its device
        twin.cpu()
    if not isinstance(twin, PeftModel):
        twin.merge_adapters()
        return twin
    if widen(twin):
        logger.warning("The frozen weights were rounded to half precision to train; they are merged as rounded.")
    return twin.merge_and_unload(safe_merge=True)


def _lora_config(model: nn.Module, settings: LoraSettings, heads: list[str] | None = None) -> LoraConfig:
    targets = find_targets(model, settings)
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in targets),
        modules_to_save=heads or None,
        **settings.kwargs,
    )


# --- frozen weights in half precision and in 4 bits -------------------------------------------------------------------


class HalfLinear(nn.Linear):
    """A linear layer whose weight is stored in half precision.

    Under autocast it is `nn.Linear`. Without, it computes in the dtype of its input from the weight as it is stored,
    where `nn.Linear` would refuse two dtypes.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return linear(input, self.weight.to(input.dtype), bias)


def narrow(layers: list[nn.Linear], dtype: torch.dtype) -> int:
    """Stores the weights of `layers` in `dtype`, in place; returns the bytes that this saves."""
    before = sum(layer.weight.nbytes for layer in layers)
    for layer in layers:
        layer.weight.data = layer.weight.data.to(dtype)
        layer.__class__ = HalfLinear
    return before - sum(layer.weight.nbytes for layer in layers)


class CodedLinear(nn.Linear):
    """A linear layer whose weight bitsandbytes stores in 4 bits; it computes in autocast's dtype, or in its input's."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        weight: Any = self.weight
        return import_module("bitsandbytes").matmul_4bit(input.to(dtype), weight, weight.quant_state, bias=bias)


def quantize(encoder: nn.Module) -> int:
    """Stores linear layers of an encoder, besides its adapters, in 4 bits (nf4), in place; returns the bytes saved.

    The scale of each 64 weights is in 8 bits (double quantisation, arXiv:2305.14314). Codes are made on the CPU, so
    that they are the same on every machine. T5's `wo` stays, to whose dtype T5 casts its states.

    Raises:
        MissingDependencyError: bitsandbytes does not work here.
    """
    bitsandbytes = require("bitsandbytes.nn", "quantization", "--load_in_4bit")
    saved = 0
    for name, layer in encoder.named_modules():
        is_left = "lora_" in name or {"wo", "contact_head"} & {*name.split(".")}
        if type(layer) is nn.Linear and not is_left:
            weight = layer.weight.detach()
            codes = bitsandbytes.Params4bit(weight.cpu(), quant_type="nf4").to("cpu")
            layer.weight = codes.to(weight.device)
            layer.__class__ = CodedLinear
            saved += weight.nbytes - layer.weight.nbytes
    return saved


def widen(model: nn.Module) -> int:
    """Stores in float32 again what `narrow` and `quantize` stored, rounded as it is; returns how many layers."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, HalfLinear | CodedLinear)]
    for layer in layers:
        weight = dequantize_module_weight(layer).data.float()
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.__class__ = nn.Linear
    return len(layers)


def is_rounded(model: nn.Module) -> bool:
    """Returns whether frozen layers of `model` are in half precision."""
    return any(isinstance(module, HalfLinear) for module in model.modules())
