"""Linear layers whose products are of 8-bit integers, for frozen encoders on CPUs."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

CHUNK = 256  # rows: what stays in the cache from one pass to the next
LEAST = 1e-12


def computes_in_int8(bits: int | None, device: str) -> bool:
    """Whether encoders of so many bits are of `Int8Linear` on such a device: "cpu", "cuda".

    8 on a CPU with AVX-512; without it, torch has no fast product of 8-bit integers.
    """
    return bits == 8 and device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Int8Linear(nn.Module):
    """A frozen linear layer: (..., k) -> (..., n), in the dtype of autocast or of its inputs.

    Weights have a scale for each output, activations one for each token, measured as they come, so that a sequence's
    numbers do not depend on its batch (LLM.int8, arXiv:2208.07339, without outliers). A weight takes one byte.

    Cost on a CPU with AVX-512 VNNI, beside bfloat16: see benchmarks/README.md.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        weight, bias = layer.weight.detach().float(), layer.bias
        scale = weight.abs().amax(1).clamp(min=LEAST) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("codes", (weight / scale[:, None]).round().to(torch.int8).t().contiguous())
        self.register_buffer("bias", torch.zeros_like(scale) if bias is None else bias.detach().float())

    scale: torch.Tensor
    codes: torch.Tensor
    bias: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return multiply(inputs, self.codes, self.scale, self.bias)


def multiply(inputs: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What `Int8Linear` computes, of its buffers: codes (k, n), scale and bias (n,)."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    kind = inputs.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
    outputs = inputs.new_empty(len(rows), len(scale), dtype=dtype)
    scaled = torch.empty_like(outputs[:CHUNK], dtype=torch.float32)
    for part, into in zip(rows.split(CHUNK), outputs.split(CHUNK)):
        part = part.float()
        step = part.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127
        product = torch._int_mm((part / step).round_().to(torch.int8), codes)
        torch.mul(product, step, out=scaled[: len(part)])
        torch.addcmul(bias, scaled[: len(part)], scale, out=into)
    return outputs.reshape(*inputs.shape[:-1], -1)


def in_int8(module: nn.Module, skipped: Collection[str] = ()) -> nn.Module:
    """Replaces the linear layers in `module`, but for those of the names in `skipped`, at any depth."""
    for name, child in [*module.named_children()]:
        if name in skipped:
            continue
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            in_int8(child, skipped)
    return module
