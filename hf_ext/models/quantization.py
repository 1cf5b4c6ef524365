"""Frozen linear layers stored in 8 or 4 bits per weight, by bitsandbytes, and dequantised at each use.

Codes and scales are bitsandbytes' own: LLM.int8's (a scale per output) and nf4's (a scale per 64 weights). Its layers
are not used, because of what they do around them (bitsandbytes 0.50.2, on a CPU): after one evaluation `Linear4bit`
is repacked on AVX512-BF16, and a layer without bias then passes back a gradient of zero; `Linear8bitLt` rounds inputs
to 8 bits too in evaluation, not in training, and keeps every input for a backward pass that needs none; both round the
bias in place to the dtype of the first input. Here training and evaluation compute alike, in the dtype of nn.Linear,
under autocast in autocast's, and autograd keeps nothing but the codes. Source: LLM.int8, arXiv:2208.07339; QLoRA,
arXiv:2305.14314; bitsandbytes, `nn/modules.py` and `autograd/_functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import linear

from ..errors import ArgumentError
from ..optional import require

BITS = (8, 4)
BLOCK = 64  # weights that share a scale in 4 bits
# Parts of names of what is never quantised: what is new or decides alone, and is small. ESM's contact head would fail.
HEADS = (
    *("head", "heads", "classifier", "contact_head", "lm_head", "cls", "pooler", "pooling", "qa_outputs", "score"),
    *("regressor", "ridge", "original_module", "modules_to_save"),
)


class QuantizedLinear(nn.Linear):
    """A frozen linear layer of `bits` bits per weight: (..., in_features) to (..., out_features).

    Its codes are no entry of its state dict, so that nobody writes them as the model's weights; PEFT adapts it as it
    does `nn.Linear`, and cannot merge into it.

    Attributes:
        weight: codes, int8; for 4 bits two in each. (int8 is also what T5 takes for "leave my input as it is".)
        scales: float32, (out_features,) or one per 64 weights; stays so when the model is cast.
        bias: as it was, or None.
    """

    weight: nn.Parameter
    scales: nn.Parameter

    def __init__(self, layer: nn.Linear, bits: int):
        nn.Module.__init__(self)  # no float weight is made
        self.in_features, self.out_features, self.bits = layer.in_features, layer.out_features, bits
        self.shape = layer.weight.shape
        codes, scales = _quantize(layer.weight.detach(), bits)
        # Parameters, although they never train: DDP sends buffers again before each forward pass.
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear` of the dequantised weights: computes in the input's dtype, under autocast in autocast's."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        return _Dequantizing.apply(input.to(dtype), self.weight, self.scales, self.bias, self.shape, self.bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weights that the layer computes with: (out_features, in_features)."""
        return _dequantize(self.weight, self.scales, self.shape, self.bits, dtype)

    def has_codes_of(self, layer: nn.Linear) -> bool:
        """Whether the codes are those of `layer`, up to 1 % of them: devices differ in how they round ties."""
        codes, _ = _quantize(layer.weight.detach().to(self.weight.device), self.bits)
        return codes.shape == self.weight.shape and (codes == self.weight).float().mean().item() > 0.99

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        scales = self.scales.data
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.float32:  # somebody casts the model
            self.scales.data = scales.to(self.scales.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        if f"{prefix}weight" in state_dict:
            errors.append(f"{prefix}weight: stored in {self.bits} bits here, which cannot take other weights")
        if self.bias is not None and f"{prefix}bias" in state_dict:
            with torch.no_grad():
                self.bias.copy_(state_dict[f"{prefix}bias"])
        elif self.bias is not None and strict:
            missing.append(f"{prefix}bias")


class _Dequantizing(torch.autograd.Function):
    """Weights are dequantised again for the backward pass, so that no copy of them is kept."""

    @staticmethod
    def forward(ctx: Any, x: Any, codes: Any, scales: Any, bias: Any, shape: torch.Size, bits: int) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.layer = shape, bits
        weight = _dequantize(codes, scales, shape, bits, x.dtype)
        return linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (codes, scales), (shape, bits) = ctx.saved_tensors, ctx.layer
        return gradient @ _dequantize(codes, scales, shape, bits, gradient.dtype), None, None, None, None, None


def quantize_linear_layers(model: nn.Module, bits: int, skip: Collection[str] = HEADS) -> list[str]:
    """Stores the frozen linear layers of `model` in `bits` bits per weight, in place; returns their names.

    Adapters of PEFT stay where they are, around the layers.

    Args:
        model: an encoder, or a model with one; on any device.
        bits: 8 or 4.
        skip: parts of names (between dots) that leave a layer as it is; `HEADS` by default.

    Raises:
        ArgumentError: another number of bits, or weights that are not finite.
        MissingDependencyError: no bitsandbytes that works here.

    Cost: one layer at a time is there twice.
    """
    if bits not in BITS:
        raise ArgumentError(f"{bits} bits: frozen layers are stored in {' or '.join(map(str, BITS))} bits.")
    found = dict(find_frozen_layers(model, skip))
    for name, layer in found.items():
        if not layer.weight.to(torch.float16).isfinite().all():  # which bitsandbytes rounds them to first
            raise ArgumentError(f"{name}: weights above 65504, NaN or infinite cannot be stored in {bits} bits.")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, QuantizedLinear(layer, bits))
    return list(found)


def find_frozen_layers(model: nn.Module, skip: Collection[str] = HEADS) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers that `quantize_linear_layers` replaces: plain, of floats, and nothing in them trains."""
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or not module.weight.is_floating_point():
            continue
        if not any(p.requires_grad for p in module.parameters()) and not {*skip}.intersection(name.split(".")):
            yield name, module


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Those of the model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def quantized_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Codes under the names that the float weights have in a state dict."""
    return {f"{name}.weight" if name else "weight": layer.weight for name, layer in quantized_layers(model).items()}


def keep_gradients(model: nn.Module) -> int:
    """Keeps bitsandbytes' own 4-bit layers, of a model that was loaded so, from being repacked; returns how many.

    Its `Linear4bit` (0.50.2) is repacked when it first evaluates on a CPU with AVX512-BF16, and then gives no gradient.
    """
    found = [m for m in model.modules() if hasattr(m, "support_avx512bf16_for_cpu")]
    for layer in found:
        layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return len(found)


def make_float(model: nn.Module) -> list[str]:
    """Puts float32 layers in place of quantised ones; returns their names.

    Their weights are what the codes stand for, until somebody fills in those that were quantised.
    """
    found = quantized_layers(model)
    for name, layer in found.items():
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
        plain.bias = layer.bias
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, plain.train(layer.training))
    return list(found)


def _quantize(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, int8, and scales, float32."""
    purpose = "weights in 8 or 4 bits (--load_in_8bit, --load_in_4bit)"
    functional: Any = require("bitsandbytes.functional", "quantization", purpose)
    if bits == 8:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
        return codes, scales.float()
    codes, state = functional.quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
    return codes.view(torch.int8), state.absmax.float()


def _dequantize(
    codes: torch.Tensor, scales: torch.Tensor, shape: torch.Size, bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """Weights of `shape`, in `dtype`: rounded once."""
    if bits == 8:
        return codes.to(dtype).mul_(scales.unsqueeze(1) * (1 / 127))
    from bitsandbytes import functional

    state = functional.QuantState(absmax=scales, shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
    return cast(torch.Tensor, functional.dequantize_4bit(codes.view(torch.uint8), state))
