"""What a model keeps between steps, by formula: weights, gradients, and the states of optimizers by their name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..models import block_matrices

WEIGHT_BYTES = 4
HALF_BYTES = 2
# nf4 codes, and for each 64 a scale of 8 bits, of which each 256 have one of 32 bits (bitsandbytes/functional.py).
CODE_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
# bitsandbytes keeps tensors below this size in 32 bits, and a float32 scale per 256 numbers of the others
# (bitsandbytes/optim/optimizer.py, init_state); torchao likewise (torchao/optim/adam.py).
SMALL_TENSOR = 4096
STATE_BLOCK = 256
STATE_BLOCK_4BIT = 128
# By parts of the names of Trainer's `--optim`: numbers kept of each weight, if not AdamW's two; of which tensor a step
# makes a float32 copy, where it goes one by one; and what steps without copies. torch's others step all tensors at
# once on a GPU, with one copy of each.
NUM_STATES = {"sgd": 0, "lion": 1, "rmsprop": 1, "adagrad": 1, "ademamix": 3}
COPY_LARGEST = ("adamw_torch_8bit", "adamw_torch_4bit", "adafactor")
COPY_NONE = ("fused", "sgd", "lion", "ademamix", "bnb", "paged", "adamw_8bit")


def weight_bytes(model: nn.Module, narrow: Sequence[nn.Linear] = (), narrow_bytes: float = HALF_BYTES) -> int:
    """Counts bytes of weights and buffers, each once, those of layers in `narrow` with `narrow_bytes` a weight."""
    total = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    return total - round(sum(layer.weight.nbytes - layer.weight.numel() * narrow_bytes for layer in narrow))


def gradient_bytes(model: nn.Module) -> int:
    """Counts bytes of gradients, of all weights that train."""
    return sum(parameter.nbytes for parameter in trained(model))


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Lists parameters that train, each once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_bytes(model: nn.Module, name: str, is_muon: bool = False) -> tuple[int, int]:
    """Counts bytes of an optimizer's states, and of what a step of it makes besides and releases again.

    Args:
        name: a value of Trainer's `--optim`; of one that is not known, what AdamW takes.
        is_muon: one float32 number per weight of repeated layers' matrices, `name` for the rest.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = {id(p) for p in block_matrices(model)} if is_muon else set()
    kept = 0
    sizes = [0]
    for parameter in trained(model):
        sizes.append(parameter.numel() * WEIGHT_BYTES)
        is_matrix = id(parameter) in matrices
        kept += sizes[-1] if is_matrix else _state_bytes(name, parameter, id(parameter) in tables)
    if matrices:  # in bfloat16: the iterate, its square, and their product
        return kept, 3 * max(sizes) // 2
    if name in COPY_LARGEST:
        return kept, max(sizes)
    return kept, 0 if any(part in name for part in COPY_NONE) else sum(sizes)


def _state_bytes(name: str, parameter: Tensor, is_table: bool) -> int:
    size = parameter.numel()
    bits = 32
    if "8bit" in name:
        bits = 8
    elif "4bit" in name:
        bits = 4
    if name == "adafactor":  # of a matrix, a number per row and per column
        rows_and_columns = size // parameter.shape[-1] + size // parameter.shape[-2] if parameter.dim() >= 2 else size
        return rows_and_columns * WEIGHT_BYTES
    num_states = next((number for part, number in NUM_STATES.items() if part in name), 2)
    if bits == 32 or size < SMALL_TENSOR or is_table:
        return num_states * size * WEIGHT_BYTES
    block = STATE_BLOCK if bits == 8 else STATE_BLOCK_4BIT
    return round(num_states * (size * bits / 8 + -(-size // block) * WEIGHT_BYTES))
