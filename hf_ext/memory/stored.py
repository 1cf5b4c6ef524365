"""What a model keeps between steps, by formula: weights, gradients, and the states of optimizers by their name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.muon import block_matrices
from .fakes import SCALE_BLOCK, Base

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, HALF_BYTES = 4, 4, 8, 2  # AdamW has two float32 states
# bitsandbytes keeps tensors below this size in 32 bits, and a float32 scale per 256 numbers of the others
# (bitsandbytes/optim/optimizer.py, init_state); torchao likewise (torchao/optim/adam.py).
SMALL_TENSOR, STATE_BLOCK, STATE_BLOCK_4BIT = 4096, 256, 128


@dataclass(frozen=True)
class Optimizer:
    """Bytes that an optimizer keeps and works with.

    Attributes:
        num_states: numbers that it keeps of each weight.
        bits: of each of them, where the tensor is large and no embedding table; else 32.
        factored: of a matrix, one number per row and per column instead.
        works_on: what a step makes besides, in float32 copies: of "nothing", the "largest" tensor, or "all".
        note: what it does to learning or numerics beside AdamW; empty where nothing.
    """

    num_states: float
    bits: int = 32
    factored: bool = False
    works_on: str = "nothing"
    note: str = ""


_IN_8_BITS = "8-bit states: other numerics"
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch_fused": Optimizer(2),
    "adamw_torch": Optimizer(2, works_on="all"),  # torch steps all tensors at once on a GPU, with one copy of each
    "adamw_torch_8bit": Optimizer(2, bits=8, works_on="largest", note=_IN_8_BITS),
    "adamw_torch_4bit": Optimizer(2, bits=4, works_on="largest", note="4-bit states: other numerics"),
    "adamw_bnb_8bit": Optimizer(2, bits=8, note=_IN_8_BITS),
    "adamw_8bit": Optimizer(2, bits=8, note=_IN_8_BITS),
    "paged_adamw_8bit": Optimizer(2, bits=8, note=_IN_8_BITS),
    "paged_adamw_32bit": Optimizer(2),
    "ademamix": Optimizer(3),
    "ademamix_8bit": Optimizer(3, bits=8, note=_IN_8_BITS),
    "paged_ademamix_32bit": Optimizer(3),
    "paged_ademamix_8bit": Optimizer(3, bits=8, note=_IN_8_BITS),
    "lion_32bit": Optimizer(1),
    "lion_8bit": Optimizer(1, bits=8, note=_IN_8_BITS),
    "paged_lion_32bit": Optimizer(1),
    "paged_lion_8bit": Optimizer(1, bits=8, note=_IN_8_BITS),
    "rmsprop": Optimizer(1, works_on="all"),
    "rmsprop_bnb": Optimizer(1),
    "rmsprop_bnb_32bit": Optimizer(1),
    "rmsprop_bnb_8bit": Optimizer(1, bits=8, note=_IN_8_BITS),
    "adagrad": Optimizer(1, works_on="all"),
    "sgd": Optimizer(0),
    "adafactor": Optimizer(1, factored=True, works_on="largest", note="another optimizer"),
}
UNKNOWN = Optimizer(2, works_on="all")  # what AdamW takes


def weight_bytes(model: nn.Module, base: Base = "as it is", base_layers: Sequence[nn.Linear] = ()) -> int:
    """Weights and buffers, each once, with `base_layers` stored as `base` says."""
    total = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    if base == "as it is":
        return total
    for layer in base_layers:
        size, rows = layer.weight.numel(), layer.out_features
        total -= layer.weight.nbytes
        total += {
            "half": size * HALF_BYTES,
            "8-bit": size + rows * WEIGHT_BYTES,
            "4-bit": size // 2 + -(-size // SCALE_BLOCK) * WEIGHT_BYTES,
        }[base]
    return total


def gradient_bytes(model: nn.Module) -> int:
    """Of all weights that train."""
    return sum(parameter.nbytes for parameter in trained(model))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Parameters that train, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_bytes(model: nn.Module, name: str, is_muon: bool = False, pattern: str | None = None) -> tuple[int, int]:
    """States of an optimizer, and what a step of it makes besides and lets go of again.

    Args:
        name: a value of Trainer's `--optim`; of one that is not known, what AdamW takes.
        is_muon: one float32 number per weight of repeated layers' matrices, `name` for the rest.
        pattern: of the names of these layers, as of `find_blocks`.
    """
    kind = OPTIMIZERS.get(name, UNKNOWN)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(p) for p in block_matrices(model, pattern)} if is_muon else set()
    kept, sizes = 0, []
    for parameter in trained(model):
        sizes.append(parameter.numel() * WEIGHT_BYTES)
        if id(parameter) in matrices:
            kept += parameter.numel() * WEIGHT_BYTES
        else:
            kept += _state_bytes(kind, parameter, id(parameter) in tables)
    if matrices:  # in bfloat16: the iterate, its square, and their product
        return kept, 3 * max(sizes) // 2
    works: dict[str, Callable[[Any], int]] = {"nothing": lambda _: 0, "largest": max, "all": sum}
    return kept, works[kind.works_on](sizes) if sizes else 0


def _state_bytes(kind: Optimizer, parameter: torch.Tensor, is_table: bool) -> int:
    size = parameter.numel()
    if kind.factored and parameter.dim() >= 2:
        return (size // parameter.shape[-1] + size // parameter.shape[-2]) * WEIGHT_BYTES
    if kind.bits == 32 or size < SMALL_TENSOR or is_table:
        return round(kind.num_states * size * WEIGHT_BYTES)
    block = STATE_BLOCK if kind.bits == 8 else STATE_BLOCK_4BIT
    return round(kind.num_states * (size * kind.bits / 8 + -(-size // block) * WEIGHT_BYTES))
