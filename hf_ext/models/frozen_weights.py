"""How linear layers that do not train are stored: in half precision, or by bitsandbytes in 8 or 4 bits per weight.

Half precision: autocast rounds a float32 weight at every use and keeps the rounded copy until the backward pass, 6
bytes per frozen weight. Stored rounded, it takes 2, and the products are bit for bit the same.
8 and 4 bits: LLM.int8's codes (a scale per output) and nf4's (a scale per 64 weights), in bitsandbytes' own layers.
Source: LLM.int8, arXiv:2208.07339; QLoRA, arXiv:2305.14314.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ..errors import ArgumentError
from ..optional import require

BITS = (8, 4)
# Parts of names of what stays as it is: what is new or decides alone, and is small. ESM's contact head would fail, and
# T5 casts its states to the dtype of `wo`, which transformers leaves in float32, too.
HEADS = (
    *("head", "heads", "classifier", "contact_head", "lm_head", "cls", "pooler", "pooling", "qa_outputs", "score"),
    *("regressor", "ridge", "original_module", "modules_to_save", "wo"),
)


class HalfLinear(nn.Linear):
    """A linear layer whose weight is stored in half precision.

    Under autocast it is `nn.Linear`. Without, it computes in the dtype of its input from the weight as it is stored,
    where `nn.Linear` would refuse two dtypes.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features)."""
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


def widen(model: nn.Module) -> int:
    """Stores what `narrow` stored in half precision in float32 again, rounded as it is; returns how many layers."""
    layers = [module for module in model.modules() if isinstance(module, HalfLinear)]
    for layer in layers:
        layer.weight.data = layer.weight.data.float()
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return len(layers)


@contextmanager
def computing_in_float32(encoder: nn.Module) -> Iterator[None]:
    """Within it, weights in half precision are widened, in place; afterwards they are narrowed, which loses nothing.

    Cost: one pass over the weights each way, and memory for them in float32; nothing is read from disk.
    """
    halves = [(p, p.dtype) for p in encoder.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    for parameter, _ in halves:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter, dtype in halves:
            parameter.data = parameter.data.to(dtype)


def is_rounded(model: nn.Module) -> bool:
    """Whether frozen layers of `model` are in half precision."""
    return any(isinstance(module, HalfLinear) for module in model.modules())


def quantize_linear_layers(
    model: nn.Module, bits: int, skip: Collection[str] = HEADS, device: torch.device | str | None = None
) -> list[str]:
    """Stores the frozen linear layers of `model` in `bits` bits per weight, in place; returns their names.

    Args:
        model: an encoder, or a model with one; on any device.
        bits: 8 or 4.
        skip: parts of names (between dots) that leave a layer as it is; `HEADS` by default.
        device: where the codes are to be; None: where the layers are.

    Raises:
        ArgumentError: another number of bits, or weights that are not finite.
        MissingDependencyError: no bitsandbytes that works here.

    Cost: one layer at a time is there twice.
    """
    if bits not in BITS:
        raise ArgumentError(f"{bits} bits: frozen layers are stored in {' or '.join(map(str, BITS))} bits.")
    library: Any = require("bitsandbytes.nn", "quantization", "weights in 8 or 4 bits (--load_in_8bit, --load_in_4bit)")
    found = {
        name: layer
        for name, layer in model.named_modules()
        if type(layer) is nn.Linear and layer.weight.is_floating_point()
        if not any(p.requires_grad for p in layer.parameters()) and not {*skip}.intersection(name.split("."))
    }
    for name, layer in found.items():
        weight, shape = layer.weight.detach(), (layer.in_features, layer.out_features, layer.bias is not None)
        if not weight.to(torch.float16).isfinite().all():  # which bitsandbytes rounds them to first
            raise ArgumentError(f"{name}: weights above 65504, NaN or infinite cannot be stored in {bits} bits.")
        if bits == 8:
            stored = library.Linear8bitLt(*shape, has_fp16_weights=False, device="meta")
            codes = library.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        else:
            stored = library.Linear4bit(*shape, compress_statistics=False, quant_type="nf4", device="meta")
            codes = library.Params4bit(weight.cpu(), compress_statistics=False, quant_type="nf4", module=stored)
            stored.support_avx512bf16_for_cpu = False  # else repacked in evaluation, and without a gradient after it
        stored.weight = codes.to(device or weight.device)  # quantised there
        stored.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, stored.train(layer.training))
    return list(found)
